"""What can be typed in a chat besides turns: commands that begin with a slash."""
import json
import secrets
from dataclasses import fields, replace
from typing import Callable, NamedTuple

from ..errors import UsageError
from .output import say, to_json
from .prompts import read_json

HINT = "/help lists commands"
NONE, ON, OFF = "none", "on", "off"
_NOT_OF_A_TURN = {"logprobs", "num_drafts"}   # fields of SamplingParams that a chat cannot show


class _Command(NamedTuple):
    """`run(talk, argument)` gives an exit code where the conversation is to end, else None."""

    run: Callable
    argument: str
    what: str


def obey(talk, line: str) -> int | None:
    """Runs the command of a line. Raises UsageError for one that is unknown, or whose argument is wrong or missing."""
    word, _, argument = line.partition(" ")
    name = _ALIASES.get(word, word)
    if name not in COMMANDS:
        raise UsageError(f"{word:.40} is no command", f"{HINT}; with a blank before it the line is a turn")
    return COMMANDS[name].run(talk, argument.strip())


def _help(talk, argument: str) -> None:
    for name, command in COMMANDS.items():
        say(f"{name + ' ' + command.argument:<22} {command.what}")
    say('a line that ends in a backslash goes on in the next; """ begins and ends a turn of several lines')


def _reset(talk, argument: str) -> None:
    _begin(talk, _system(talk))
    say("a new conversation")


def _undo(talk, argument: str) -> None:
    last = _last_question(talk)
    say(f"taken back: {talk.dialogue.messages[last]['content']:.60}")
    talk.dialogue.cut(last)


def _retry(talk, argument: str) -> int | None:
    last = _last_question(talk)
    if not talk.params.greedy:   # the same seed would give the same answer
        talk.params = replace(talk.params, seed=talk.params.seed + 1)
        say(f"seed {talk.params.seed}")
    talk.dialogue.cut(last + 1)
    return talk.answer(last)


def _set_system(talk, argument: str) -> None:
    if not argument:
        say(f"system message: {_system(talk)[0]['content']}" if _system(talk) else "no system message")
        return
    rest = talk.dialogue.messages[len(_system(talk)):]
    _begin(talk, [] if argument == NONE else [{"role": "system", "content": argument}], rest)


def _set(talk, argument: str) -> None:
    names = [f.name for f in fields(talk.params) if f.name not in _NOT_OF_A_TURN]
    if not argument:
        resolved = talk.params.resolved(talk.llm.generation_config)
        for name in names:
            say(f"{name} {to_json(getattr(resolved, name))}")
        return
    name, _, value = argument.partition(" ")
    name = name.replace("-", "_")
    if name not in names:
        raise UsageError(f"/set: found {name!r:.40}, wanted one of {', '.join(names)}")
    if not value:
        raise UsageError(f"/set {name}: no value", f"give one, or {NONE} for the default")
    given = _value(value.strip()) if value.strip() != NONE else _new_seed() if name == "seed" else getattr(type(talk.params)(), name)
    talk.params = replace(talk.params, **{name: given})


def _new_seed() -> int:
    from ..runtime.sampling import DRAWN_SEED_BITS

    seed = secrets.randbits(DRAWN_SEED_BITS)
    say(f"seed {seed}")
    return seed


def _value(text: str):
    try:
        return json.loads(text)
    except ValueError:
        return text


def _think(talk, argument: str) -> None:
    from ..runtime.conversation import EFFORTS

    words = {ON: "max", OFF: NONE}
    if argument:
        effort = words.get(argument, argument)
        if effort not in EFFORTS:
            raise UsageError(f"/think: found {argument!r:.40}, wanted {', '.join((*words, *EFFORTS))}")
        talk.effort = effort
    say(f"reasoning effort {talk.effort}")


def _save(talk, argument: str) -> None:
    path = _file("/save", argument)
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(to_json(talk.dialogue.messages, 2) + "\n")
    except (OSError, ValueError) as e:   # ValueError: a NUL in the path
        raise UsageError(f"{path}: cannot be written ({getattr(e, 'strerror', None) or e})") from e
    say(f"{len(talk.dialogue.messages)} messages in {path}")


def _load(talk, argument: str) -> None:
    from ..runtime.chat import render

    path = _file("/load", argument)
    found = read_json(path)
    messages = found.get("messages") if isinstance(found, dict) else found
    render(messages)   # what cannot be rendered is told now
    _begin(talk, messages)
    say(f"{len(messages)} messages from {path}")


def _tokens(talk, argument: str) -> None:
    from ..runtime.conversation import conversation_ids

    count = len(conversation_ids(talk.llm.tokenizer, talk.dialogue, reasoning_effort=talk.effort)) if talk.dialogue.messages else 0
    say(f"{count} tokens of {talk.llm.max_model_len}")


def _exit(talk, argument: str) -> int:
    return 0


COMMANDS = {
    "/help": _Command(_help, "", "this list"),
    "/reset": _Command(_reset, "", "forget all turns; the system message stays"),
    "/undo": _Command(_undo, "", "take the last turn and its answer back"),
    "/retry": _Command(_retry, "", "another answer to the last turn"),
    "/system": _Command(_set_system, "[TEXT]", f"show or change the system message; {NONE} takes it away"),
    "/set": _Command(_set, "[NAME VALUE]", "show or change sampling, as in /set temperature 0.7"),
    "/think": _Command(_think, f"[{ON}|{OFF}|EFFORT]", "show or change how much the model thinks: none, low, high or max"),
    "/save": _Command(_save, "FILE", "write the conversation, as --messages of generate reads it"),
    "/load": _Command(_load, "FILE", "go on with such a conversation"),
    "/tokens": _Command(_tokens, "", "how long the conversation is"),
    "/exit": _Command(_exit, "", "leave"),
}
_ALIASES = {"/?": "/help", "/clear": "/reset", "/regen": "/retry", "/quit": "/exit", "/bye": "/exit", "/q": "/exit"}


def _begin(talk, messages, rest=()) -> None:
    talk.dialogue = type(talk.dialogue)(talk.llm.tokenizer, [*messages, *rest])


def _system(talk) -> list[dict]:
    """The system message that the conversation begins with, alone in a list, or none."""
    return [m for m in talk.dialogue.messages[:1] if m.get("role") == "system"]


def _last_question(talk) -> int:
    last = talk.dialogue.last("user")
    if last is None:
        raise UsageError("there is no turn yet")
    return last


def _file(command: str, argument: str) -> str:
    if not argument:
        raise UsageError(f"{command}: no file", "give its name")
    return argument
