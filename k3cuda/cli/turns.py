"""Where the turns of a conversation come from: lines of a terminal or a pipe, and what makes several of them one."""
import os
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from ..errors import UsageError
from .group import arm_signals
from .output import is_terminal, log, write_stderr

INVITATION, MORE = "> ", ". "
FENCE = '"""'
LONGEST_HISTORY = 1000   # lines


class Turn(NamedTuple):
    """What was typed. `is_command`: it begins with a slash that no quotes protect."""

    text: str
    is_command: bool


class Turns:
    """Reads one turn after the other. With readline on a terminal lines are edited, and a pasted text is one turn.

    Args:
        interactive: somebody sits there: ask, and let them start a line again.
    """

    def __init__(self, interactive: bool):
        self._interactive = interactive
        # Without both of them Python reads a line without readline.
        self._readline = _readline() if interactive and is_terminal(sys.stdout) else None
        if interactive and hasattr(sys.stdin, "reconfigure"):
            sys.stdin.reconfigure(errors="replace")

    @contextmanager
    def history(self, wanted: bool):
        """Lines of earlier conversations, from before the first turn to behind the last, in a file of the user's alone."""
        path = history_file() if wanted and self._readline else None
        if path is not None:
            try:
                self._readline.read_history_file(path)
            except OSError as e:   # none yet, or one that may not be read
                log.debug("no history: %s", e)
        try:
            yield
        finally:
            if path is not None:
                self._save(path)

    def next(self) -> "Turn | None":
        """A turn: a line, or several where one ends in a backslash or they stand between triple quotes. None at the end.

        Raises:
            UsageError: a pipe that ends between triple quotes.
            KeyboardInterrupt: where nothing was typed yet.
        """
        while True:
            try:
                return self._turn()
            except _StartedAgain:
                write_stderr("\n")

    def _turn(self) -> "Turn | None":
        line = self._line(INVITATION)
        if line is None:
            return None
        if line.startswith(FENCE):
            return Turn(self._fenced(line[len(FENCE):]), False)
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            line = self._line(MORE)
            if line is None:
                break
            lines.append(line)
        return Turn("\n".join(lines), lines[0].startswith("/"))

    def _fenced(self, first: str) -> str:
        lines = [first]
        while not lines[-1].rstrip().endswith(FENCE):
            line = self._line(MORE)
            if line is None:
                if self._interactive:
                    raise _StartedAgain
                raise UsageError(f"a turn begun with {FENCE} does not end", f"end it with {FENCE}")
            lines.append(line)
        lines[-1] = lines[-1].rstrip()[:-len(FENCE)]
        return "\n".join(lines).removeprefix("\n").removesuffix("\n")

    def _line(self, invitation: str) -> str | None:
        """A line without its break, None at the end."""
        try:
            return self._read(invitation)
        except KeyboardInterrupt as e:
            typed = invitation != INVITATION or bool(self._readline and self._readline.get_line_buffer())
            if not self._interactive or not typed or type(e) is not KeyboardInterrupt:
                raise
            arm_signals()
            raise _StartedAgain from e

    def _read(self, invitation: str) -> str | None:
        if self._readline:
            try:
                return input(invitation)
            except EOFError:
                write_stderr("\n")
                return None
        if self._interactive:
            write_stderr(invitation)
        line = sys.stdin.buffer.readline() if sys.stdin else b""
        if not line and self._interactive:
            write_stderr("\n")
        return line.decode("utf-8", "replace").rstrip("\r\n") if line else None

    def _save(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))   # what was said is nobody else's business
            self._readline.set_history_length(LONGEST_HISTORY)
            self._readline.write_history_file(path)
        except OSError as e:
            log.debug("history not kept: %s", e)


class _StartedAgain(Exception):
    """What was typed of a turn is dropped."""


def history_file() -> Path | None:
    """k3cuda/chat_history under XDG_STATE_HOME or ~/.local/state; None where there is no home."""
    if os.environ.get("XDG_STATE_HOME"):
        return Path(os.environ["XDG_STATE_HOME"]) / "k3cuda" / "chat_history"
    try:
        return Path.home() / ".local" / "state" / "k3cuda" / "chat_history"
    except RuntimeError:   # no HOME and no entry in the user database
        return None


def _readline():
    try:
        import readline
    except ImportError:   # a Python built without it
        return None
    if "libedit" not in (readline.__doc__ or ""):   # which knows no bracketed paste: there each line of a pasted text is a turn
        readline.parse_and_bind("set enable-bracketed-paste on")
    readline.set_auto_history(True)
    return readline
