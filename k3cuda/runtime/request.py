"""What goes into the engine and what comes out of it."""
from dataclasses import dataclass

from ..errors import K3Error
from .sampling import Drawn, SamplingParams
from .scheduler import Sequence
from .text_stream import Delta, TokenStream


_NOTHING = Delta()


@dataclass(frozen=True)
class Request:
    """What to generate.

    Attributes:
        request_id: unique among the requests of an engine that have not ended.
        prompt_ids: int [tokens], at least one, each inside the vocabulary.
        params: sampling; what it leaves open counts as off, a missing seed is drawn.
        eos_ids: the model's own end tokens, obeyed unless `params.ignore_eos`.
        text: reads the output and finds stop strings; None: ids only, stop strings are not looked for.
        keeps_end: a prompt will follow that goes on where this answer ends: its state is kept there (prefix_cache.py).
    """

    request_id: str
    prompt_ids: object
    params: SamplingParams = SamplingParams()
    eos_ids: tuple[int, ...] = ()
    text: TokenStream | None = None
    keeps_end: bool = False


@dataclass(frozen=True)
class Speculative:
    """How a draft model did for one request.

    Attributes:
        k: drafts asked for a step; one row more was verified.
        steps: verify steps. proposed: drafts that were verified. accepted: those that stood, also behind a stop.
        acceptance_rate: accepted of proposed. acceptance_length: tokens a verify step, the one behind the drafts counted, at most k + 1.
        per_position: for each of k places the share of steps whose draft there stood. None where nothing was verified.
    """

    k: int
    steps: int
    proposed: int
    accepted: int
    acceptance_rate: float | None
    acceptance_length: float | None
    per_position: tuple[float, ...] | None


@dataclass(frozen=True)
class Stats:
    """Counts and times of one request, in tokens and seconds; None where there was nothing to time.

    `ttft_s` runs from arrival to the first token, waiting included; `decode_s` from the first token to the last one; `tpot_ms` is
    decode time a token after the first; `prefill_tok_per_s` counts what was run from the time the request got its slot. `cached_tokens` of
    the prompt were not: a stored prefix had them. `speculative` is None without drafts.
    """

    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    ttft_s: float | None
    decode_s: float | None
    tpot_ms: float | None
    tok_per_s: float | None
    prefill_tok_per_s: float | None
    speculative: Speculative | None = None
    cached_tokens: int = 0


@dataclass(frozen=True)
class Event:
    """What one step did for one request. Every request ends with exactly one event that has a `finish_reason`.

    Attributes:
        drawn: new tokens, in order; a stop token is among them, what a verify step drew behind the end is not.
        delta: what became final in the text.
        finish_reason: None, "stop", "length", "abort" or "error".
        stop_reason: the stop string or the id of `stop_token_ids`; None for the model's own end token and for other ends.
        error: set with "error".
        stats, sampling: set at the end; `sampling` is what was used, with the seed.
    """

    request_id: str
    drawn: tuple[Drawn, ...] = ()
    delta: Delta = Delta()
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: K3Error | None = None
    stats: Stats | None = None
    sampling: SamplingParams | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(d.token_id for d in self.drawn)


def joined(deltas) -> Delta:
    if not deltas:
        return _NOTHING
    return Delta("".join(d.content for d in deltas), "".join(d.reasoning for d in deltas), tuple(c for d in deltas for c in d.tool_calls))


def stats_of(s: Sequence) -> Stats:
    ttft = decode = tpot = rate = prefill = None
    if s.first is not None:
        ttft, decode = s.first - s.arrived, s.last - s.first
        prefill = (s.num_prompt - s.reused) / (s.first - s.admitted) if s.first > s.admitted else None
        if decode > 0:
            tpot, rate = 1e3 * decode / (s.num_output - 1), (s.num_output - 1) / decode
    return Stats(s.num_prompt, s.num_output, getattr(s.request.text, "num_reasoning_tokens", 0), ttft, decode, tpot, rate, prefill,
                 s.speculation and _speculative(s.speculation), s.reused)


def _speculative(c) -> Speculative:
    return Speculative(c.num_drafts, c.steps, c.proposed, c.accepted, c.accepted / c.proposed if c.proposed else None,
                       c.emitted / c.steps if c.steps else None, tuple(n / c.steps for n in c.per_position) if c.steps else None)
