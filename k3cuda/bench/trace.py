"""Traces of agents: sessions of turns with gaps between them and a context that grows. docs/bench.md has the form of a file."""
import json
from dataclasses import dataclass, replace

from ..errors import UsageError


@dataclass(frozen=True)
class Turn:
    """One request of a session.

    Attributes:
        new_tokens: that stand behind the context so far. output_tokens: of the answer, which joins the context.
        gap_s: from the end of the answer before it, or from the start of the session.
        keep_tokens: how much of the context is kept first, from its beginning; None: all.
    """

    new_tokens: int
    output_tokens: int
    gap_s: float = 0.0
    keep_tokens: int | None = None


@dataclass(frozen=True)
class Session:
    """Turns of one agent. `prefix_tokens` at the beginning are the same for all sessions with that `prefix`."""

    name: str
    turns: tuple[Turn, ...]
    prefix: str | None = None
    prefix_tokens: int = 0

    @property
    def context_tokens(self) -> int:
        """Of the context behind its last answer."""
        context = self.prefix_tokens
        for turn in self.turns:
            context = (context if turn.keep_tokens is None else turn.keep_tokens) + turn.new_tokens + turn.output_tokens
        return context


_KEYS = {"session", "new_tokens", "output_tokens", "gap_s", "keep_tokens", "prefix", "prefix_tokens"}
MOST = 1 << 24   # tokens


def read_trace(text: str, name: str) -> list[Session]:
    """Sessions in the order of their first lines. UsageError, with the line, for what is no trace; `name` is the file's."""
    found: dict[str, Session] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            session = _named(record)
            found[session] = _with_turn(found[session], record) if session in found else _first(session, record)
        except (ValueError, RecursionError) as e:
            raise UsageError(f"{name}, line {number}: {e}", "docs/bench.md has the form of a trace") from e
    if not found:
        raise UsageError(f"{name}: found no turns", "give a file with one JSON object a line")
    return list(found.values())


def _named(record) -> str:
    if not isinstance(record, dict):
        raise ValueError(f"found {type(record).__name__}, wanted an object with session, new_tokens and output_tokens")
    if unknown := sorted(record.keys() - _KEYS):
        raise ValueError(f"unknown key {unknown[0]!r:.60}, wanted {', '.join(sorted(_KEYS))}")
    session = record.get("session")
    if not isinstance(session, (str, int)) or isinstance(session, bool) or session == "":
        raise ValueError(f"session: found {session!r:.60}, wanted text or an integer")
    return str(session)


def _first(session: str, record: dict) -> Session:
    prefix = record.get("prefix")
    if ("prefix" in record) != ("prefix_tokens" in record) or not (prefix is None or isinstance(prefix, str)):
        raise ValueError("prefix: wanted a name, and prefix_tokens beside it")
    if "keep_tokens" in record:
        raise ValueError("keep_tokens: the first turn of a session has nothing to keep")
    return Session(session, (_turn(record),), prefix, 0 if prefix is None else _count(record, "prefix_tokens", 1))


def _with_turn(session: Session, record: dict) -> Session:
    if "prefix" in record or "prefix_tokens" in record:
        raise ValueError("prefix: only the first turn of a session begins it")
    turn = _turn(record)
    if turn.keep_tokens is not None and turn.keep_tokens > session.context_tokens:
        raise ValueError(f"keep_tokens: found {turn.keep_tokens}, the context before this turn has {session.context_tokens}")
    return replace(session, turns=(*session.turns, turn))


def _turn(record: dict) -> Turn:
    keep = None if record.get("keep_tokens") is None else _count(record, "keep_tokens", 0)
    return Turn(_count(record, "new_tokens", 1), _count(record, "output_tokens", 1), _seconds(record), keep)


def _count(record: dict, name: str, least: int) -> int:
    value = record.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MOST:
        raise ValueError(f"{name}: found {value!r:.60}, wanted an integer of at least {least}")
    return value


def _seconds(record: dict) -> float:
    value = record.get("gap_s", 0)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1e9:
        raise ValueError(f"gap_s: found {value!r:.60}, wanted seconds")
    return float(value)
