"""What kinds of flags and commands there are: aliases, refusals, variables. The flags themselves are in options.py."""
import math

import click

from . import output

SPECULATIVE = "k3cuda.speculative_config"   # where values that one flag gives for others wait in click's context until all are read
_NOT_NEEDED = "k3cuda.not_needed"   # as that, lines to be said once it is known whether any are wanted


class Option(click.Option):
    """An option with further spellings that work and that --help doesn't show."""

    def __init__(self, *declarations, aliases=(), **attributes):
        super().__init__(*declarations, **attributes)
        self.aliases = list(aliases)

    def add_to_parser(self, parser, ctx):
        shown = self.opts
        self.opts = shown + self.aliases
        try:
            super().add_to_parser(parser, ctx)
        finally:
            self.opts = shown


class Text(click.types.StringParamType):
    """Text for the model. In a variable several values stand on lines of their own, since each may hold blanks."""

    envvar_list_splitter = "\n"

    def convert(self, value, param, ctx):
        value = super().convert(value, param, ctx)
        if any("\udc80" <= c <= "\udcff" for c in value):   # bytes that the locale could not read: text is UTF-8
            value = value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        return value


class Number(click.FloatRange):
    """A finite number of a range. click's own lets nan through, which no comparison keeps out, and inf, which no time or size here can be."""

    def convert(self, value, param, ctx):
        found = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"found {value!r:.60}, wanted a finite number", param, ctx)
        return found


class NotNeeded(Option):
    """A flag of others that says what is so here anyway, or what is not so: accepted, with one line that says why it changes nothing.

    Args:
        accepts, wanted: which values say that, and what they are called; any by default.
        instead: the way out for other values.
    """

    def __init__(self, *declarations, why: str, accepts=None, wanted: str = "", instead: str = "leave it out", **attributes):
        super().__init__(*declarations, hidden=True, callback=self._explain, expose_value=False, **attributes)
        self.why, self._accepts, self._wanted, self._instead = why, accepts, wanted, instead

    @staticmethod
    def _explain(ctx, option, value):
        if value in (None, False, ()) or ctx.resilient_parsing:
            return
        if option._accepts and not option._accepts(value):
            raise click.UsageError(f"{option.opts[0]}: found {value!r:.60}, wanted {option._wanted}; {option._instead}", ctx)
        ctx.meta.setdefault(_NOT_NEEDED, []).append(f"{option.opts[0]} is not needed: {option.why}")


def flags(*options):
    """A decorator that adds `options` in this order."""
    def decorate(command):
        for declarations, attributes in reversed(options):
            command = click.option(*declarations, **{"cls": Option} | attributes)(command)
        return command
    return decorate


def flag(*declarations, **attributes):
    return declarations, attributes


LOG_FLAGS = (
    flag("--quiet", "-q", is_flag=True, aliases=["--log-disable"], help="Errors only on stderr."),
    flag("--verbose", "-v", is_flag=True, help="Everything on stderr, tracebacks too."),
    flag("--log-level", type=click.Choice(["debug", "info", "warning", "error"], False), envvar="K3CUDA_LOG_LEVEL",
          help="[default: info on a terminal, else warning]"),
    flag("--log-format", type=click.Choice(["text", "json"], False), default="text", envvar="K3CUDA_LOG_FORMAT", show_default=True,
          help="Form of the lines on stderr."),
)


class Command(click.Command):
    """A command with the log flags; they are obeyed before it starts."""

    def __init__(self, *args, **attributes):
        super().__init__(*args, **attributes)
        self.params += [Option(declarations, **rest) for declarations, rest in LOG_FLAGS]

    def invoke(self, ctx):
        for name, value in ctx.meta.get(SPECULATIVE, {}).items():
            if ctx.params[name] not in (None, value):
                raise click.UsageError(f"--speculative-config: {name} {value!r:.60} beside {ctx.params[name]!r:.60}; give one of them", ctx)
            ctx.params[name] = value
        output.configure_logging(*(ctx.params.pop(name) for name in ("log_level", "quiet", "verbose", "log_format")))
        if ctx.obj:   # what the group had to say before there was a log
            output.log.warning(ctx.obj)
        for line in ctx.meta.get(_NOT_NEEDED, ()):
            output.say(line)
        return super().invoke(ctx)
