"""The top of the command: signals, exit codes and unknown variables. docs/cli.md lists the codes."""
import difflib
import logging
import os
import signal
import sys
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import click

from ..errors import K3Error, OutOfMemory, out_of_memory
from ..runtime.process_end import leave
from . import output

log = logging.getLogger("k3cuda")

READER_GONE = 141   # what a shell shows for a program that SIGPIPE ended
# Variables that no flag of this version has; those of later parts of the program are known so that nobody is warned of them.
OTHER_VARIABLES = {"K3CUDA_API_KEY", "K3CUDA_CACHE_DIR", "K3CUDA_COMMIT", "K3CUDA_CUBIN_DIR", "K3CUDA_DECODE_BACKEND", "K3CUDA_JOB_TOKEN", "K3CUDA_OFFLINE", "K3CUDA_SHARE_GPU"}


class Terminated(KeyboardInterrupt):
    """SIGTERM: a clean stop like Ctrl-C, with an exit code of its own."""


def stop_code(stop: KeyboardInterrupt) -> int:
    return 128 + (signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT)


def arm_signals() -> None:
    """The next SIGINT or SIGTERM stops cleanly, the one after it kills. Chat arms again after each answer it stopped."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:   # a shell starts background jobs deaf to Ctrl-C: they stay so
            signal.signal(number, _stop)


@contextmanager
def first_interrupt_asks(wanted: bool = True):
    """Within it, and where it is `wanted`, the first Ctrl-C only sets `asked` of what it gives; the next one stops as ever."""
    request = SimpleNamespace(asked=False)

    def ask(number, frame):
        request.asked = True
        signal.signal(number, _stop)

    is_armed = wanted and signal.getsignal(signal.SIGINT) is _stop
    if is_armed:
        signal.signal(signal.SIGINT, ask)
    try:
        yield request
    finally:
        if is_armed:
            arm_signals()


def disarm_signals() -> None:
    """The next signal kills."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is _stop:
            signal.signal(number, signal.SIG_DFL)


def _stop(number, frame):
    disarm_signals()
    raise Terminated if number == signal.SIGTERM else KeyboardInterrupt


def _wants_json_log(args) -> bool:
    """Whether errors of the command line itself, which come before any flag is obeyed, are to be JSON."""
    asked = os.environ.get("K3CUDA_LOG_FORMAT", "")
    for word, following in zip(args, [*args[1:], ""]):
        name, _, value = str(word).partition("=")
        if name.replace("_", "-") == "--log-format":
            asked = value or str(following)
    return asked.lower() == "json"


class Group(click.Group):
    """A group whose commands return their exit code, or None for 0, and raise K3Error."""

    def list_commands(self, ctx):
        return list(self.commands)   # in the order of use, not of the alphabet

    def invoke(self, ctx):
        try:
            self._warn_of_unknown_variables(ctx)
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:   # before click turns it into "Aborted!" and 1
            return stop_code(stop)

    def main(self, args=None, prog_name="k3cuda", **extra):
        standalone = extra.pop("standalone_mode", True)
        output.protect_streams()
        output.log_as_json(_wants_json_log(sys.argv[1:] if args is None else args))
        arm_signals()
        code = self._run(args, prog_name, extra)
        if standalone:
            disarm_signals()   # an interpreter that ends has nothing left to stop cleanly
            leave(code)
        return code

    def _run(self, args, prog_name: str, extra: dict) -> int:
        try:
            code = super().main(args, prog_name, standalone_mode=False, **extra) or 0
            output.finish_streams()
            return code
        except click.Abort as e:
            return stop_code(e.__cause__) if isinstance(e.__cause__, KeyboardInterrupt) else 1
        except KeyboardInterrupt as stop:
            return stop_code(stop)
        except (output.ReaderGone, BrokenPipeError):
            return READER_GONE
        except SystemExit as end:   # of another rank than 0: its job is over, and rank 0 has the words
            return end.code
        except (K3Error, click.ClickException) as e:
            return self._failed(e, e.code if isinstance(e, K3Error) else e.exit_code)
        except MemoryError as e:
            return self._failed(out_of_memory(e), OutOfMemory.code)
        except Exception as e:
            if isinstance(e, OSError) and e.errno in output.FULL:   # --help and --version, which click prints itself
                e = output.unwritable(e)
                return self._failed(e, e.code)
            first = str(e).partition("\n")[0]
            output.show_error(K3Error(f"internal error: {type(e).__name__}: {first}",
                                      "run again with -v for the traceback, and please report it"), K3Error.code)
            log.debug("traceback", exc_info=True)
            return K3Error.code

    @staticmethod
    def _failed(error: Exception, code: int) -> int:
        output.show_error(error, code)
        log.debug("traceback", exc_info=error)
        return code

    def variables(self, prefix: str = "K3CUDA") -> set[str]:
        """Every variable that some flag reads, and OTHER_VARIABLES."""
        names = set(OTHER_VARIABLES)
        for command in self.commands.values():
            own = f"{prefix}_{command.name}".upper()
            if isinstance(command, Group):
                names |= command.variables(own)
            for param in command.params:
                names.update([param.envvar] if isinstance(param.envvar, str) else param.envvar or ())
                if isinstance(param, click.Option):
                    names.add(f"{own}_{param.name}".upper())
        return names

    def _warn_of_unknown_variables(self, ctx) -> None:
        if ctx.resilient_parsing or ctx.parent:   # a group inside another knows only its own
            return
        known = self.variables()
        unknown = sorted(n for n in os.environ if n.startswith("K3CUDA_") and n not in known)
        if unknown:
            close = [f"{n} (did you mean {near[0]}?)" if (near := difflib.get_close_matches(n, known, 1, 0.8)) else n for n in unknown]
            ctx.obj = f"ignored unknown variables: {', '.join(close)}"
