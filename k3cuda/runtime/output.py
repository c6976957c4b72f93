"""What a caller gets: whole answers, and the chunks of a stream."""
from collections import deque
from dataclasses import dataclass, field

from ..errors import K3Error
from .request import Event, Stats
from .sampling import Drawn, SamplingParams
from .text_stream import Delta, ToolCall


@dataclass(frozen=True)
class Output:
    """One answer.

    Attributes:
        text: the answer; "" where there is none.
        reasoning: what the model thought before it, None where there is none or the prompt was no chat.
        tool_calls: calls that were closed.
        token_ids: all tokens generated, the one that ended the answer included.
        prompt_token_ids: the prompt as the model saw it.
        finish_reason: "stop", "length", "tool_calls" (a stop behind at least one call), "abort" or "error".
        stop_reason: the stop string, or the id out of `stop_token_ids`; None for the model's own end token and for other ends.
        logprobs: of each token of `token_ids`; None unless asked for.
        sampling: what was used: no value open, the seed drawn, `max_tokens` the limit that held.
        stats: counts and times.
        error: why it ended, with "error": NumericalError where no token could be drawn.
    """

    text: str
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: str | int | None
    logprobs: tuple[Drawn, ...] | None
    sampling: SamplingParams
    stats: Stats
    error: K3Error | None = None


@dataclass(frozen=True)
class Chunk:
    """What one step added to a streamed answer. Joined, the texts of all chunks are those of the `Output`.

    Attributes:
        text, reasoning: to append; both may be "" while half a character or half a stop string waits.
        tool_calls: calls closed by these tokens.
        token_ids: new tokens.
        from_draft: whether a draft model proposed any of them.
        finish_reason: set in the last chunk, else None.
        stats, output: counts and times, and the whole answer; in the last chunk.
    """

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    token_ids: tuple[int, ...] = ()
    from_draft: bool = False
    finish_reason: str | None = None
    stats: Stats | None = None
    output: Output | None = None


@dataclass
class Collector:
    """Puts the events of one request together.

    Attributes:
        prompt_ids: of the request.
        deltas, drawn: everything so far.
        chunks: what a stream has not handed out yet; filled only where `is_stream`.
        output: set by the last event.
    """

    prompt_ids: list[int]
    is_stream: bool = False
    deltas: list[Delta] = field(default_factory=list)
    drawn: list[Drawn] = field(default_factory=list)
    chunks: deque[Chunk] = field(default_factory=deque)
    output: Output | None = None

    def take(self, event: Event) -> None:
        self.deltas.append(event.delta)
        self.drawn += event.drawn
        if event.finish_reason is not None:
            self.output = self._finished(event)
        if self.is_stream:
            finish_reason = self.output.finish_reason if self.output else None
            self.chunks.append(Chunk(*event.delta, token_ids=event.token_ids, from_draft=any(d.from_draft for d in event.drawn), finish_reason=finish_reason, stats=event.stats, output=self.output))

    def _finished(self, event: Event) -> Output:
        calls = tuple(c for d in self.deltas for c in d.tool_calls)
        return Output(
            text="".join(d.content for d in self.deltas), reasoning="".join(d.reasoning for d in self.deltas) or None, tool_calls=calls,
            token_ids=tuple(d.token_id for d in self.drawn), prompt_token_ids=tuple(self.prompt_ids),
            finish_reason="tool_calls" if calls and event.finish_reason == "stop" else event.finish_reason, stop_reason=event.stop_reason,
            logprobs=None if event.sampling.logprobs is None else tuple(self.drawn),
            sampling=event.sampling, stats=event.stats, error=event.error)
