"""Two models on the same load, in turns, so that what drifts in a machine hits both."""
import time
from dataclasses import dataclass, field

import numpy as np

from ..runtime.request_times import Times, decoding, measure

QUANTITIES = ("decode", "prefill", "ttft", "e2el")


@dataclass
class Side:
    """What one of the two did. `rounds`: (times of its requests, seconds for all of them)."""

    rounds: list[tuple[list[Times], float]] = field(default_factory=list)

    @property
    def times(self) -> list[Times]:
        return [t for times, _ in self.rounds for t in times]


def batches(rng: np.random.Generator, rounds: int, batch: int, input_len: int, vocab_size: int, params) -> list[tuple]:
    """[(prompts, parameters)] of every round, so that both sides get the same ones. `params`: seed -> SamplingParams."""
    return [(rng.integers(0, vocab_size, (batch, input_len)), [params(int(s)) for s in rng.integers(0, 1 << 63, batch)]) for _ in range(rounds)]


def in_turns(llms, load, warmup: int, heard=lambda side, number, seconds: None, clock=time.perf_counter) -> list[Side]:
    """Every round on each of `llms`, the order turned round each time: a b, b a, a b. `warmup` rounds are not kept."""
    sides = [Side() for _ in llms]
    for number, (prompts, params) in enumerate(load):
        order = range(len(llms)) if number % 2 == 0 else reversed(range(len(llms)))
        for i in order:
            found = measure(llms[i], prompts, params, clock)
            heard(i, number, found[1])
            if number >= warmup:
                sides[i].rounds.append(found)
    return sides


def seconds(times: list[Times]) -> dict[str, float | None]:
    """What one round took, None where it cannot be said.

    decode: a token of all requests together, from the step that gave the last of them its first token. prefill: a token of the prompts, up to that step.
    ttft, e2el: the median of the requests.
    """
    done = [t for t in times if t.error is None]
    if not done:
        return dict.fromkeys(QUANTITIES)
    rate = decoding(done)["tokens_per_second"]
    return {"decode": 1 / rate if rate else None, "prefill": max(t.ttft for t in done) / sum(t.prompt_tokens for t in done),
            "ttft": float(np.median([t.ttft for t in done])), "e2el": float(np.median([t.e2el for t in done]))}


def ratios(a: Side, b: Side) -> dict[str, dict | None]:
    """How many times as fast b is as a: of the rounds, each against the same round of the other, the median, the smallest and the largest."""
    pairs = [(seconds(one), seconds(other)) for (one, _), (other, _) in zip(a.rounds, b.rounds)]
    found = {}
    for name in QUANTITIES:
        of = [one[name] / other[name] for one, other in pairs if one[name] and other[name]]
        found[name] = {"median": float(np.median(of)), "low": min(of), "high": max(of)} if of else None
    return found


def differences(a: Side, b: Side) -> dict:
    """Answers of both that have the same tokens, and where the others part: round, request, and place in the answer, all counted from 0."""
    pairs = [(number, i, one, other) for number, (r, s) in enumerate(zip(a.rounds, b.rounds)) for i, (one, other) in enumerate(zip(r[0], s[0]))
             if one.error is None and other.error is None]
    differ = [{"round": number, "request": i, "at": _first_difference(one.token_ids, other.token_ids)}
              for number, i, one, other in pairs if one.token_ids != other.token_ids]
    return {"answers": len(pairs), "equal": len(pairs) - len(differ), "differ": differ}


def _first_difference(one: list[int], other: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(one, other)) if x != y), min(len(one), len(other)))
