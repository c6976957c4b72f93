"""Streamed answers of OpenAI-style servers: server-sent events read into outputs with their times."""
import json
from dataclasses import dataclass, field
from typing import AsyncIterator

from ..runtime.request_times import Times
from .http_client import Failed

LONGEST_LINE = 16 << 20   # bytes
_ENDED_BADLY = ("error", "abort")


@dataclass
class Answer:
    """What a stream said.

    Attributes:
        outputs: (when, events) of every arrival that had text, reasoning, a tool call or token ids; what arrives together is one output.
        ended: when the event with the finish reason came, or the end of a stream without one.
        usage: the last one that was sent, None without.
        text, reasoning: joined.
    """

    outputs: list[tuple[float, int]] = field(default_factory=list)
    ended: float | None = None
    usage: dict | None = None
    text: str = ""
    reasoning: str = ""

    def take(self, when: float, document) -> None:
        """One event. Raises Failed where it says that the request failed, or is nothing that a stream may say."""
        if not isinstance(document, dict):
            raise Failed("an event is no JSON object")
        if document.get("error") or document.get("object") == "error":
            raise Failed(f"the stream ended with an error: {error_of(document)}")
        usage, choices = document.get("usage"), document.get("choices")
        if isinstance(usage, dict):
            self.usage = usage
        if not isinstance(choices, list) or not choices:
            return
        choice = choices[0]
        delta = (choice if choice.get("delta") is None else choice["delta"]) if isinstance(choice, dict) else None
        if not isinstance(delta, dict):
            raise Failed("an event has a choice that is no object")
        text, reasoning = (next((v for name in names if isinstance(v := delta.get(name), str) and v), "")
                           for names in (("content", "text"), ("reasoning_content", "reasoning")))
        if text or reasoning or delta.get("tool_calls") or choice.get("token_ids"):
            self.text, self.reasoning = self.text + text, self.reasoning + reasoning
            events = self.outputs.pop()[1] if self.outputs and self.outputs[-1][0] == when else 0
            self.outputs.append((when, events + 1))
        if (reason := choice.get("finish_reason")) is not None:
            if reason in _ENDED_BADLY:
                raise Failed(f"the answer ended with {reason!r}")
            self.ended = when


async def read_answer(pieces: AsyncIterator[bytes], clock) -> Answer:
    """The whole answer. Raises Failed for one that breaks off, and for events that are none."""
    answer = Answer()
    async for when, data in _events(pieces, clock):
        if data.strip() == "[DONE]":
            answer.ended = when if answer.ended is None else answer.ended   # some servers give no finish reason
            break
        try:
            document = json.loads(data)
        except (ValueError, RecursionError):
            raise Failed("an event is no JSON") from None
        answer.take(when, document)
    if answer.ended is None:
        raise Failed("the stream ended before the answer did")
    return answer


async def _events(pieces: AsyncIterator[bytes], clock):
    """(when its last byte arrived, data) of every event."""
    data, when = [], 0.0
    async for when, line in _lines(pieces, clock):
        if line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
        elif not line and data:
            yield when, _decoded(data)
            data = []
    if data:   # whole lines, of a server that leaves out the last empty one
        yield when, _decoded(data)


def _decoded(lines: list[bytes]) -> str:
    try:
        return b"\n".join(lines).decode()
    except UnicodeDecodeError:
        raise Failed("an event is no UTF-8") from None


async def _lines(pieces: AsyncIterator[bytes], clock):
    rest = bytearray()
    async for piece in pieces:
        when = clock()
        rest += piece
        *lines, tail = rest.split(b"\n")
        for line in lines:
            yield when, bytes(line).removesuffix(b"\r")
        rest = bytearray(tail)
        if len(rest) > LONGEST_LINE:
            raise Failed(f"an event has more than {LONGEST_LINE} bytes")


def times_of(answer: Answer, sent: float, prompt_tokens: int) -> Times:
    """The times of one request; tokens are those of the server's usage, of the prompt too, else an event counts as one.

    Args:
        prompt_tokens: how many were sent, for a server that does not say.
    """
    usage = answer.usage or {}
    cached = usage.get("prompt_tokens_details")
    found = Times(_count(usage, "prompt_tokens") or prompt_tokens, sent, answer.outputs or [(answer.ended, 1)], ended=answer.ended,
                  counted=_count(usage, "completion_tokens"), cached_tokens=_count(cached, "cached_tokens") if isinstance(cached, dict) else None)
    if not found.tokens:
        raise Failed("the answer has no token")
    return found


def _count(usage: dict, name: str) -> int | None:
    value = usage.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def error_of(document) -> str:
    """The message in an error of a server, shortened; "" without one."""
    found = document.get("error", document) if isinstance(document, dict) else ""
    for name in ("message", "detail"):
        if isinstance(found, dict) and found.get(name):
            found = found[name]
    return str(found)[:160] if found else ""
