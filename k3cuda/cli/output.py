"""What goes where: stdout carries the result and nothing else, stderr everything else, and neither ever ends in a traceback."""
import errno
import json
import logging
import math
import os
import sys
import time

import click

from ..errors import K3Error, OutOfMemory, UsageError

log = logging.getLogger("k3cuda")

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)   # no more fits on the disk


class ReaderGone(Exception):
    """Nobody reads stdout any more, or it was closed from the start."""


class _Handler(logging.Handler):
    """One line a record: text, or a JSON object for containers."""

    def __init__(self):
        super().__init__()
        self.as_json = False

    def emit(self, record):
        text, level = record.getMessage(), record.levelname.lower()
        if record.exc_info:
            text += "\n" + logging.Formatter().formatException(record.exc_info)
        self.line(level, text if record.levelno == logging.INFO or self.as_json else f"{level}: {text}")

    def line(self, level: str, text: str, **fields):
        if self.as_json:
            now = time.time()
            stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z"
            text = to_json({"time": stamp, "level": level, "logger": log.name, "message": text} | fields)
        write_stderr(text + "\n")


_handler = _Handler()


def log_as_json(wanted: bool) -> None:
    """Lines on stderr as JSON objects or as text."""
    _handler.as_json = wanted


def configure_logging(level: str | None, quiet: bool, verbose: bool, log_format: str) -> None:
    """-v and -q win over the level; without any of them info on a terminal, warnings elsewhere. Only our own logger is touched."""
    level = "debug" if verbose else "error" if quiet else level or ("info" if is_terminal(sys.stderr) else "warning")
    log_as_json(log_format == "json")
    log.setLevel(level.upper())
    log.propagate = False
    if _handler not in log.handlers:
        log.addHandler(_handler)


def say(text: str) -> None:
    """A line on stderr whatever the level is, short of errors only."""
    if log.isEnabledFor(logging.WARNING):
        _handler.line("info", text)


def show_error(error: Exception, code: int) -> None:
    """The last words of a run that failed."""
    if isinstance(error, click.ClickException) and not _handler.as_json:
        error.show()
        return
    message = error.format_message() if isinstance(error, click.ClickException) else str(error)
    fields = {"code": code}
    if isinstance(error, K3Error):
        message, fields["hint"] = error.message, error.hint or None
        if error.hint and not _handler.as_json:
            message += f"\n  {error.hint}"
    _handler.line("error", message if _handler.as_json else f"Error: {message}", **fields)


def write_stderr(text: str, dim: bool = False) -> None:
    """Diagnostics are never worth failing for: a stderr that is gone is given up without a word."""
    if dim and is_terminal(sys.stderr) and not os.environ.get("NO_COLOR"):
        text = click.style(text, dim=True)
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError):
        _give_up(sys.stderr, 2)


def is_terminal(stream) -> bool:
    try:
        return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"
    except ValueError:   # closed
        return False


def protect_streams() -> None:
    """Makes the three standard streams safe to use: see the reasons below."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:   # closed by the caller: the next file we open must not take its number
            os.open(os.devnull, os.O_RDWR)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):   # a narrow encoding, or half a character in an argument, is no reason to fail
            stream.reconfigure(errors="backslashreplace")


def finish_streams() -> None:
    """Flushes stdout while an error can still be told. Raises what Result.write raises."""
    if sys.stdout is not None:
        _guarded(sys.stdout.flush)


class Result:
    """Where the result goes: stdout, or the file of `flag`."""

    def __init__(self, path: str | None = None, flag: str = "--output"):
        self._path, self._flag, self._file, self._last = path, flag, None, ""
        if path is not None:
            self._open("a").close()   # a path that can't be written is told before a model is loaded

    def _open(self, mode: str):
        try:
            return open(self._path, mode, encoding="utf-8", errors="backslashreplace")
        except OSError as e:
            raise click.BadParameter(f"{self._path}: {e.strerror}", param_hint=self._flag) from e

    def write(self, text: str) -> None:
        """Raises ReaderGone where nobody reads any more, OutOfMemory where the disk is full."""
        if not text:
            return
        if self._path is None and sys.stdout is None:
            raise ReaderGone
        if self._path is not None and self._file is None:
            self._file = self._open("w")
        stream, self._last = self._file or sys.stdout, text[-1]
        _guarded(lambda: (stream.write(text), stream.flush()))

    def end_line(self) -> None:
        """A final newline where it is missing."""
        if self._last not in ("", "\n"):
            self.write("\n")

    def document(self, value, indent: int | None = None) -> None:
        """One JSON document on lines of its own."""
        stream = self._file or sys.stdout
        ascii_only = self._path is None and (getattr(stream, "encoding", None) or "utf-8").lower().replace("-", "") != "utf8"
        self.write(to_json(value, indent, ascii_only) + "\n")

    def close(self) -> None:
        if self._file is not None:
            _guarded(self._file.close)


def to_json(value, indent: int | None = None, ascii_only: bool = False) -> str:
    """JSON without NaN or Infinity: what is no number is null."""
    return json.dumps(_finite(value), indent=indent, ensure_ascii=ascii_only, allow_nan=False)


def _finite(value):
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, (list, tuple)) else value


def _guarded(write) -> None:
    try:
        write()
    except BrokenPipeError as e:
        _give_up(sys.stdout, 1)
        raise ReaderGone from e
    except OSError as e:
        _give_up(sys.stdout, 1)
        raise unwritable(e) from e


def unwritable(e: OSError) -> K3Error:
    """What a result that could not be written is called."""
    found = f"the result could not be written: {e.strerror or e}"
    if e.errno in FULL:
        return OutOfMemory(found, "free some space and run again")
    return UsageError(found, "give a file that can be written with --output, or another stdout")


def _give_up(stream, fd: int) -> None:
    # What is still buffered would be tried again, and fail loudly, when the interpreter ends.
    try:
        if stream.fileno() == fd:
            os.dup2(os.open(os.devnull, os.O_WRONLY), fd)
    except (OSError, ValueError, AttributeError):
        pass
