"""Times of requests as a client sees them, and the numbers made of them. docs/bench.md defines each."""
import time
from dataclasses import dataclass, field

import numpy as np

PERCENTILES = (50, 90, 99)


@dataclass
class Times:
    """One request, in seconds of one clock.

    Attributes:
        sent: when it was handed over. outputs: (when, tokens) of every step that gave it tokens, reasoning included.
        speculative: counts of its drafts, None without. error: why it failed, else None.
        ended: when the answer ended, None: with its last output. counted: its tokens, None: those of `outputs`.
        cached_tokens: of the prompt that were not run again, None where nobody said. token_ids: of the answer, as far as they are known.
    """

    prompt_tokens: int
    sent: float
    outputs: list[tuple[float, int]] = field(default_factory=list)
    speculative: object = None
    error: str | None = None
    ended: float | None = None
    counted: int | None = None
    cached_tokens: int | None = None
    token_ids: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(n for _, n in self.outputs) if self.counted is None else self.counted

    @property
    def ttft(self) -> float:
        return self.outputs[0][0] - self.sent

    @property
    def e2el(self) -> float:
        return (self.outputs[-1][0] if self.ended is None else self.ended) - self.sent

    @property
    def tpot(self) -> float | None:
        """None for a single token: there is no time after the first."""
        return (self.e2el - self.ttft) / (self.tokens - 1) if self.tokens > 1 else None

    @property
    def itl(self) -> list[float]:
        """Gaps between outputs. With drafts one output has several tokens: then it is a step's time, not a token's."""
        return [b - a for (a, _), (b, _) in zip(self.outputs, self.outputs[1:])]


def measure(llm, prompts, params, clock=time.perf_counter) -> tuple[list[Times], float]:
    """(times of each request, seconds for all). All are handed over at once; what has no slot waits, and its waiting counts.

    Args:
        prompts: int [prompts, tokens]. params: one SamplingParams a prompt. clock: seconds.
    """
    start = clock()
    found = [Times(len(prompt), start) for prompt in prompts]
    streams = [llm.stream(prompt, p) for prompt, p in zip(prompts, params)]
    under_way = list(zip(streams, found))
    try:
        while under_way:
            ended = advance(under_way, clock)
            under_way = [pair for pair in under_way if pair not in ended]
        return found, clock() - start
    finally:
        for stream in streams:
            stream.close()


def advance(under_way: list, clock) -> list:
    """A step of the model for all (stream, its Times) of `under_way`, unless a chunk waits already; those of them that have ended."""
    first, ended = under_way[0][0], []
    if not first.waiting:
        first.wait()
    now = clock()
    for stream, times in under_way:
        ids = [i for _ in range(stream.waiting) for i in next(stream).token_ids]
        if ids:
            times.outputs.append((now, len(ids)))
            times.token_ids += ids
        if stream.output is not None:
            ended.append((stream, times))
            stats = stream.output.stats
            times.speculative, times.cached_tokens = stats.speculative, stats.cached_tokens
            if stream.output.finish_reason in ("error", "abort") or not times.outputs:
                times.error = str(stream.output.error or "aborted")
    return ended


def summary(times: list[Times], duration: float, which=PERCENTILES) -> dict:
    """Counts, rates and percentiles `which` under the names that vLLM's benchmarks give them; None where there is nothing to count.

    Percentiles interpolate between the closest ranks. Rates a user sees are inverted percentiles of times, so p90 is the slow tail.
    """
    done = [t for t in times if t.error is None]
    inputs, outputs = sum(t.prompt_tokens for t in done), sum(t.tokens for t in done)
    cached = [t.cached_tokens for t in done if t.cached_tokens is not None]
    found = {"duration": duration, "completed": len(done), "failed": len(times) - len(done), "total_input_tokens": inputs,
             "total_cached_tokens": sum(cached) if cached else None, "total_output_tokens": outputs,
             "request_throughput": len(done) / duration, "output_throughput": outputs / duration, "total_token_throughput": (inputs + outputs) / duration}
    tpot = [t.tpot for t in done if t.tpot is not None]
    for name, seconds in (("ttft", [t.ttft for t in done]), ("tpot", tpot), ("itl", [gap for t in done for gap in t.itl]), ("e2el", [t.e2el for t in done])):
        found[f"mean_{name}_ms"] = 1e3 * sum(seconds) / len(seconds) if seconds else None
        found |= {("median" if p == 50 else f"p{p}") + f"_{name}_ms": s and 1e3 * s for p, s in percentiles(seconds, which).items()}
    for name, seconds in (("interactivity", tpot), ("e2e_normalized_interactivity", [t.e2el / t.tokens for t in done])):
        found |= {f"p{p}_{name}": 1 / s if s else None for p, s in percentiles(seconds, which).items()}
    return found | _drafts([t.speculative for t in done if t.speculative and t.speculative.steps])


def decoding(times: list[Times]) -> dict:
    """Requests that started together, from the step that gave the last of them its first token: nothing of any prompt is in it.

    Returns: `ms`, the median of the steps from there on; `decode_steps` and `decode_tokens`, how many they were and gave; `tokens_per_second` of all
        together. `ms` and the rate are None where no step followed.
    """
    done = [t for t in times if t.error is None]
    start = max((t.outputs[0][0] for t in done), default=0.0)
    ends = sorted({when for t in done for when, _ in t.outputs if when >= start})
    gaps = [b - a for a, b in zip(ends, ends[1:])]
    tokens = sum(n for t in done for when, n in t.outputs if when > start)
    return {"ms": 1e3 * float(np.median(gaps)) if gaps else None, "decode_steps": len(gaps), "decode_tokens": tokens,
            "tokens_per_second": tokens / (ends[-1] - start) if gaps else None}


def percentiles(values, which=PERCENTILES) -> dict[int, float | None]:
    return {p: float(np.percentile(values, p)) if len(values) else None for p in which}


def _drafts(counts) -> dict:
    steps, proposed, accepted = (sum(getattr(c, name) for c in counts) for name in ("steps", "proposed", "accepted"))
    places = range(max((len(c.per_position) for c in counts), default=0))
    return draft_numbers(steps, proposed, accepted, sum(c.acceptance_length * c.steps for c in counts), [sum(c.per_position[i] * c.steps for c in counts) for i in places])


def draft_numbers(steps, proposed, accepted, emitted, per_position) -> dict:
    """Counts of drafts under vLLM's names.

    Args:
        steps: verify steps. proposed, accepted: drafts that were verified, and that stood. emitted: tokens that came of the steps.
        per_position: for each place of a step how many drafts stood there. None for what nobody counted.
    """
    return {"spec_decode_num_drafts": steps, "spec_decode_draft_tokens": proposed, "spec_decode_accepted_tokens": accepted,
            "spec_decode_acceptance_rate": accepted / proposed if proposed else None, "spec_decode_acceptance_length": emitted / steps if steps else None,
            "spec_decode_per_position_acceptance_rates": [n / steps for n in per_position] if steps else []}
