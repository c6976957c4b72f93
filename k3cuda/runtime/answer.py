"""Reads a generated chat answer: reasoning, content and tool calls out of token ids, while they arrive.

The grammar, after a prompt that ends inside `think` (or `response`, with thinking off):

    reasoning </think> <response> content </response> [ <tools> calls </tools> ] </message> end_of_msg
    call:     <call tool= index=> ( <argument key= type=> value </argument> | <json> raw </json> )* </call>

where `<x>` stands for the ids open, the text `x`, sep, and `</x>` for close, the text, sep. The parser works on ids:
text comes from ordinary ids only, so a marker never reaches the user, and a marker spelled out by ordinary ids is text.

What the model gets wrong: a missing close is implied by the next tag of the message; a tag that has no meaning where
it stands is dropped; markers around text that is no tag are dropped and the text stays. Inside an argument only the
nearest `</argument>` ends it. A call that was begun but not left when the ids end is dropped.
"""

import json
import re
import secrets

from .text_stream import Delta, StopStrings, TokenStream, ToolCall, utf8_decoder

THINK, RESPONSE, TOOLS, CALL, ARGUMENT, JSON, BETWEEN, ENDED = (
    "think",
    "response",
    "tools",
    "call",
    "argument",
    "json",
    "between",
    "ended",
)
_CHANNELS = {THINK, RESPONSE, TOOLS}
_TAGS = {tag.encode() for tag in (THINK, RESPONSE, TOOLS, CALL, ARGUMENT, JSON, "message")}
_TAGS_WITH_ATTRIBUTES = {b"call", b"argument", b"json"}
_ATTRIBUTE = re.compile(rb' ([a-z_]+)="([^"]*)"')
_ATTRIBUTES = re.compile(rb'(?: [a-z_]+="[^"]*")*')
_ATTRIBUTES_BEGUN = re.compile(rb'(?: [a-z_]+="[^"]*")*(?: (?:[a-z_]+(?:=(?:"[^"]*)?)?)?)?')
# A tool name and an index fit many times over; a runaway header becomes text again instead of eating the answer.
_MAX_HEADER_BYTES = 4096


def random_call_id() -> str:
    """`call_` and 24 hexadecimal digits: the model names no calls, clients want them named."""
    return f"call_{secrets.token_hex(12)}"


class AnswerParser(TokenStream):
    """Reads one answer; `TokenStream` says how it is driven. What follows the end of the message shows nothing.

    Args:
        tokenizer: gives the bytes of an id and the ids of the four markers.
        thinking: whether the prompt ended inside `think` (else inside `response`).
        stop: stop strings, looked for in content only, see `StopStrings`.
        make_call_id: gives the id of each call.
    """

    def __init__(self, tokenizer, thinking: bool = True, stop=(), make_call_id=random_call_id):
        super().__init__()
        self._token_bytes, self._make_call_id, self._stops = tokenizer.token_bytes, make_call_id, StopStrings(stop)
        self._open, self._close, self._sep = tokenizer.open_id, tokenizer.close_id, tokenizer.sep_id
        self._end_of_msg = tokenizer.end_of_msg_id
        self._state = THINK if thinking else RESPONSE
        self._decoder = utf8_decoder()  # of the text of the current state; flushed whenever the state is left
        self._marker: int | None = None  # open or close while a tag is being read
        self._header, self._header_tokens = b"", 0  # what followed that marker so far
        self._call: _Call | None = None
        self._delta = Delta()  # of the token being fed

    @property
    def open_channel(self) -> str | None:
        """`think` or `response` where the next id would go on with its text; None inside a tag, between channels, in a call, at the end."""
        return self._state if self._marker is None and self._state in (THINK, RESPONSE) else None

    def feed(self, token_id: int) -> Delta:
        if self._state == ENDED:
            return Delta()
        self._delta = Delta()
        if token_id in (self._open, self._close):
            self._marker, self._header, self._header_tokens = token_id, b"", 0
        elif token_id == self._sep:
            self._end_tag()
        elif token_id == self._end_of_msg:
            self._enter(ENDED)
        elif self._marker is None:
            self._text(self._token_bytes(token_id), 1)
        else:
            self._header += self._token_bytes(token_id)
            self._header_tokens += 1
            if not self._may_be_tag():
                self._drop_marker()
        return self._show(self._delta)

    def finish(self) -> Delta:
        if self._state == ENDED:
            return Delta()
        self._delta = Delta()
        if self._state in (CALL, ARGUMENT, JSON):
            self._state = ENDED
        else:
            self._enter(ENDED)
        return self._show(self._delta)

    # Tags

    def _may_be_tag(self) -> bool:
        name, _, _ = self._header.partition(b" ")
        if name == self._header:
            return any(tag.startswith(name) for tag in _TAGS)
        attributes = self._header[len(name) :]
        return (
            self._marker == self._open
            and name in _TAGS_WITH_ATTRIBUTES
            and len(self._header) <= _MAX_HEADER_BYTES
            and _ATTRIBUTES_BEGUN.fullmatch(attributes) is not None
        )

    def _drop_marker(self) -> None:
        """What followed the marker was no tag: it is text of the current state."""
        self._marker = None
        self._text(self._header, self._header_tokens)

    def _end_tag(self) -> None:
        if self._marker is None:
            return
        name, _, _ = self._header.partition(b" ")
        attributes = self._header[len(name) :]
        if name not in _TAGS or not _ATTRIBUTES.fullmatch(attributes):
            self._drop_marker()
            return
        is_open, self._marker = self._marker == self._open, None
        if is_open:
            pairs = _ATTRIBUTE.findall(attributes)
            self._open_tag(name.decode(), {key.decode(): _unescape(value) for key, value in pairs})
        else:
            self._close_tag(name.decode())

    def _open_tag(self, tag: str, attributes: dict[str, str]) -> None:
        if self._state in (ARGUMENT, JSON):
            return
        if tag in _CHANNELS:
            if tag != self._state:
                self._enter(tag)
        elif tag == CALL and "tool" in attributes:
            self._enter(CALL)
            if self._state == CALL:
                self._call = _Call(attributes["tool"])
        elif self._state == CALL and (tag == JSON or tag == ARGUMENT and "key" in attributes):
            self._call.begin(tag, attributes)
            self._state = tag

    def _close_tag(self, tag: str) -> None:
        if self._state in (ARGUMENT, JSON):
            if tag == self._state:
                self._text(b"", 0, final=True)
                self._call.end()
                self._state = CALL
        elif tag == "message":
            self._enter(ENDED)
        elif tag == self._state:
            self._enter(TOOLS if tag == CALL else BETWEEN)
        elif tag == TOOLS and self._state == CALL:
            self._enter(BETWEEN)

    # States

    def _enter(self, state: str) -> None:
        """Leave the current state, which makes its text and its call final, unless a stop string ends it all."""
        if self._state == CALL and self._call is not None:
            self._delta = self._delta._replace(tool_calls=(self._call.finished(self._make_call_id()),))
            self._call = None
        self._text(b"", 0, final=True)
        if self.stop_reason is not None:
            return
        if self._state == RESPONSE:
            self._add_content(self._stops.flush())
        self._state = state

    def _text(self, data: bytes, num_tokens: int, final: bool = False) -> None:
        if self._state not in (THINK, RESPONSE, ARGUMENT, JSON):
            return
        text = self._decoder.decode(data, final)
        if self._state == THINK:
            self.num_reasoning_tokens += num_tokens
            self._delta = self._delta._replace(reasoning=self._delta.reasoning + text)
        elif self._state == RESPONSE:
            text, self.stop_reason = self._stops.feed(text)
            self._add_content(text)
            if self.stop_reason is not None:
                self._state = ENDED
        else:
            self._call.value.append(text)

    def _add_content(self, text: str) -> None:
        self._delta = self._delta._replace(content=self._delta.content + text)


class _Call:
    """A tool call while it is being read. `value` collects the text of the argument or json element that is open."""

    def __init__(self, name: str):
        self.name, self.arguments, self.raw, self.value = name, {}, None, []
        self.texts = {}  # JSON of each argument: made one by one, so that a deeply nested one can fail alone

    def begin(self, tag: str, attributes: dict[str, str]) -> None:
        self.key = attributes["key"] if tag == ARGUMENT else None
        self.type, self.value = attributes.get("type", "string"), []

    def end(self) -> None:
        text = "".join(self.value)
        value = text if self.key is not None and self.type == "string" else _value(text)
        if self.key is None and not isinstance(value, dict):
            self.raw = text
            return
        given = value if self.key is None else {self.key: value}
        self.arguments.update(given)
        self.texts.update({key: _json(value) for key, value in given.items()})

    def finished(self, call_id: str) -> ToolCall:
        if self.raw is not None and not self.arguments:
            return ToolCall(call_id, self.name, {}, self.raw)
        pairs = ", ".join(f"{_json(key)}: {text}" for key, text in self.texts.items())
        return ToolCall(call_id, self.name, self.arguments, f"{{{pairs}}}")


def _value(text: str):
    """JSON value of an argument that is no string; the text itself where that is no JSON, or none others can read."""
    try:
        value = json.loads(text)
        _json(value)
        return value
    except (ValueError, RecursionError):
        return text


def _json(value) -> str:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)  # "1e999" is JSON, the infinity it becomes is not
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate came out of an escape; only as an escape can it be sent on
        return json.dumps(value)
    return text


def _unescape(value: bytes) -> str:
    return value.decode("utf-8", "replace").replace("&quot;", '"').replace("&amp;", "&")
