"""Where a prompt comes from: a flag, a file, a pipe, or a conversation in JSON."""
import json
import sys
from dataclasses import dataclass

from ..errors import PromptTooLong, UsageError

STDIN = "-"


@dataclass(frozen=True)
class Prompt:
    """What to answer: `text` where it is to be sent as it is, else a conversation. One of `text` and `messages` is None."""

    text: str | None = None
    messages: list | None = None
    tools: list | None = None


def read_prompt(prompt, file, *, raw=False, system=None, messages=None, tools=None) -> Prompt:
    """One prompt from the flags of the same names.

    Raises UsageError where they contradict each other or a file can't be read, PromptTooLong for an empty prompt.
    """
    given = [flag for flag, value in (("--prompt", prompt), ("--file", file), ("--messages", messages)) if value is not None]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} exclude each other", "give one prompt")
    if raw and (extra := [f for f, v in (("--system", system), ("--messages", messages), ("--tools", tools)) if v is not None]):
        raise UsageError(f"--raw sends text as it is, without {', '.join(extra)}", "leave out one or the other")
    readers = [flag for flag, value in (("--prompt", prompt), ("--file", file), ("--messages", messages), ("--tools", tools)) if value == STDIN]
    if len(readers) > bool(given):   # where no prompt is given, stdin is the prompt
        raise UsageError(f"{' and '.join(readers if given else ['the prompt', *readers])} would both read stdin", "give one of them a file")
    if messages is None:
        text = read_text(prompt, file, whole=raw)
        if not text:
            raise PromptTooLong("the prompt is empty", "give text with -p, -f or a pipe")
        if raw:
            return Prompt(text=text)
        conversation = [{"role": "user", "content": text}]
        if system is not None:
            conversation.insert(0, {"role": "system", "content": system})
        return Prompt(messages=conversation, tools=tools and _listed(tools, "tools"))
    if system is not None:
        raise UsageError("--system and --messages exclude each other", f"put the system message into {messages}")
    found = read_json(messages)
    if isinstance(found, dict):
        if unknown := sorted(set(found) - {"messages", "tools"}):
            raise UsageError(f"{messages}: unknown keys {', '.join(unknown)}, wanted messages and tools", "give the rest as flags")
        if tools is not None and "tools" in found:
            raise UsageError(f"--tools and the tools in {messages} exclude each other", "leave out one of them")
        return Prompt(messages=found.get("messages"), tools=found.get("tools") if tools is None else _listed(tools, "tools"))
    return Prompt(messages=found, tools=tools and _listed(tools, "tools"))


def read_text(prompt, file, *, whole: bool) -> str:
    """Text of --prompt, of --file, or of stdin if it is no terminal. One final line break of a file is left out unless `whole`."""
    if prompt not in (None, STDIN):
        return prompt
    if prompt is None and file is None and (sys.stdin is None or sys.stdin.isatty()):
        raise UsageError("no prompt", "give text with -p, a file with -f, or a pipe")
    source = STDIN if prompt == STDIN or file is None else file
    text = read_file(source)
    return text if whole else text.removesuffix("\n").removesuffix("\r")


def read_file(source: str) -> str:
    """The text of a file, or of stdin for "-". UsageError where it can't be read or is no UTF-8."""
    name = "stdin" if source == STDIN else source
    try:
        if source == STDIN:
            data = sys.stdin.buffer.read() if sys.stdin else b""
        else:
            with open(source, "rb") as file:
                data = file.read()
    except (OSError, ValueError) as e:   # ValueError: a NUL in the path
        raise UsageError(f"{name}: cannot be read ({getattr(e, 'strerror', None) or e})") from e
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise UsageError(f"{name}: byte {e.start} is no UTF-8", "convert the text to UTF-8") from e


def read_json(source: str):
    """What a file, or stdin for "-", holds. UsageError where it is no JSON, and as read_file."""
    name = "stdin" if source == STDIN else source
    try:
        return json.loads(read_file(source))
    except (ValueError, RecursionError) as e:
        raise UsageError(f"{name}: no JSON ({e})") from e


def _listed(source: str, key: str):
    """A list, bare or as the only key of an object."""
    found = read_json(source)
    return found[key] if isinstance(found, dict) and set(found) == {key} else found
