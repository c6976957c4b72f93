"""Token ids to text while they arrive: the protocol the engine speaks, raw text, and stop strings.

`TextStream` shows everything that was generated; `answer.AnswerParser` reads it as a chat answer. The engine treats
both alike, see `TokenStream`.
"""

import codecs
from typing import NamedTuple

from ..errors import RequestError


class ToolCall(NamedTuple):
    """One call the model made. `arguments_json` is the text for clients: JSON, unless the model wrote none."""

    id: str
    name: str
    arguments: dict
    arguments_json: str

    @property
    def document(self) -> dict:
        """The call in OpenAI's form."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments_json}}


class Delta(NamedTuple):
    """What became final with one token: text to append to each channel, and the calls that were completed."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


class Answer(NamedTuple):
    """Everything a stream has shown. A chat answer has None for a channel without text; raw text is always content."""

    reasoning: str | None
    content: str | None
    tool_calls: tuple[ToolCall, ...] = ()
    num_reasoning_tokens: int = 0


class TokenStream:
    """The protocol between the engine and whatever reads its tokens.

    - `feed(token_id)` takes one generated token and returns the `Delta` that became final with it. What is shown is
      never taken back: half a character, and text that may yet turn out to be a stop string, wait for later tokens.
    - `stop_reason` is None until a stop string is complete, then that string. The engine asks after every `feed`: the
      token just fed belongs to the answer, those behind it in the same verify step do not (not to text, ids or
      counts). Feeding more is harmless and shows nothing.
    - `finish()` says that no token follows and returns what was still held back. It may complete a stop string (one
      that ends in U+FFFD), so ask once more. A second call returns an empty `Delta`.
    - `result()` is the `Answer` of all deltas so far.

    Every way of grouping the tokens shows the same text, because nothing depends on more than the ids fed so far.
    """

    num_reasoning_tokens = 0  # ids that went into reasoning, tags not counted

    def __init__(self):
        self.stop_reason: str | None = None
        self._content, self._reasoning, self._tool_calls = [], [], []

    def feed(self, token_id: int) -> Delta:
        raise NotImplementedError

    def finish(self) -> Delta:
        raise NotImplementedError

    def feed_ids(self, token_ids) -> list[Delta]:
        """`feed` for several ids, up to the one that completes a stop string; deltas that show nothing are left out."""
        deltas = []
        for token_id in token_ids:
            if self.stop_reason is not None:
                break
            delta = self.feed(token_id)
            if any(delta):
                deltas.append(delta)
        return deltas

    def result(self) -> Answer:
        reasoning, content = "".join(self._reasoning), "".join(self._content)
        return Answer(reasoning or None, content or None, tuple(self._tool_calls), self.num_reasoning_tokens)

    def _show(self, delta: Delta) -> Delta:
        self._content.append(delta.content)
        self._reasoning.append(delta.reasoning)
        self._tool_calls += delta.tool_calls
        return delta


class TextStream(TokenStream):
    """All text of a generation as `content`; special ids show nothing.

    Args:
        tokenizer: gives the bytes of an id.
        stop: stop strings, see `StopStrings`.
    """

    def __init__(self, tokenizer, stop=()):
        super().__init__()
        self._token_bytes, self._stops, self._decoder = tokenizer.token_bytes, StopStrings(stop), utf8_decoder()

    def feed(self, token_id: int) -> Delta:
        if self.stop_reason is not None:
            return Delta()
        return self._show(Delta(self._visible(self._decoder.decode(self._token_bytes(token_id)))))

    def finish(self) -> Delta:
        if self.stop_reason is not None:
            return Delta()
        text = self._visible(self._decoder.decode(b"", True))
        return self._show(Delta(text if self.stop_reason is not None else text + self._stops.flush()))

    def result(self) -> Answer:
        return Answer(None, "".join(self._content))

    def _visible(self, text: str) -> str:
        text, self.stop_reason = self._stops.feed(text)
        return text


def utf8_decoder():
    """A decoder that holds back half a character and turns what is no UTF-8 into U+FFFD."""
    return codecs.getincrementaldecoder("utf-8")("replace")


class StopStrings:
    """Finds the first stop string in text that arrives in pieces.

    The match that *ends* first wins, and of those that end together the longest: a stream cannot know whether a longer
    one would still have come. Held back is the longest suffix that is a proper prefix of a stop string, nothing more.

    Args:
        stops: a list of at most 16 non-empty strings, one string, or None.

    Raises:
        RequestError: `stop_malformed` for anything else.
    """

    MAX_STOPS = 16

    def __init__(self, stops=()):
        stops = [stops] if isinstance(stops, str) else () if stops is None else stops
        if not isinstance(stops, (list, tuple)):
            raise RequestError("stop_malformed", f"found {type(stops).__name__}, wanted a list of stop strings")
        if len(stops) > self.MAX_STOPS:
            raise RequestError("stop_malformed", f"found {len(stops)} stop strings, wanted at most {self.MAX_STOPS}")
        for stop in stops:
            if not isinstance(stop, str) or not stop:
                raise RequestError("stop_malformed", f"found stop string {stop!r}, wanted text that is not empty")
        # Longest first, so that the first one found complete at a character is the one to report. The automaton of
        # Knuth, Morris and Pratt: how long a prefix of each stop string the text now ends in, and where to fall back.
        self._stops = sorted(set(stops), key=lambda stop: (-len(stop), stop))
        self._fallbacks = [_fallbacks(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        self._held, self._hit = "", None

    def feed(self, text: str) -> tuple[str, str | None]:
        """Text that can be shown now, and the stop string once one is complete. After that: `("", stop)`."""
        if self._hit is not None or not self._stops:
            return ("" if self._hit is not None else text), self._hit
        matched = self._matched
        for position, char in enumerate(text, 1):
            for i, stop in enumerate(self._stops):
                length = matched[i]
                while length and stop[length] != char:
                    length = self._fallbacks[i][length]
                matched[i] = length = length + (stop[length] == char)
                if length == len(stop):
                    self._hit = stop
                    visible = (self._held + text[:position])[:-length]
                    self._held = ""
                    return visible, stop
        text = self._held + text
        cut = len(text) - max(matched)
        self._held = text[cut:]
        return text[:cut], None

    def flush(self) -> str:
        """What is held back, when no text follows. Text after this starts a new search."""
        held, self._held, self._matched = self._held, "", [0] * len(self._stops)
        return held


def _fallbacks(stop: str) -> list[int]:
    """`[n]`: length of the longest proper prefix of `stop` that `stop[:n]` ends in."""
    lengths, length = [0, 0], 0
    for char in stop[1:]:
        while length and stop[length] != char:
            length = lengths[length]
        length += stop[length] == char
        lengths.append(length)
    return lengths
