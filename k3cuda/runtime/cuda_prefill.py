"""Times a whole prompt on one true rank: the steps and commits that an engine would run, one behind the other."""
import statistics
from dataclasses import replace
from collections.abc import Iterable

import numpy as np

from ..config import MAX_ROWS
from ..errors import BenchmarkError
from .backend import StepRows
from .cuda_bench import STATES, StepBench
from .cuda_bench_checks import SPREAD, WAY_OUT, check_experts, check_time

WARM, REPEATS = 1, 3


def prefill(bench: StepBench, tokens: int) -> dict:
    """Milliseconds of a prompt of `tokens` random tokens in slot 0, empty before it, its last row's logits included (median).

    Beside it the floor: what every step must read, one behind the other. Raises BenchmarkError: the results are not a model's, or other
    bytes where the prompt is cut in other places, which is not looked at where the routing is forced: it follows a row's place in its step.
    """
    be, rng = bench.backend, np.random.default_rng(5)
    own = bench.cfg.vocab_size // bench.tp   # the part of the vocabulary whose rows are here
    ids = (bench.rank * own + rng.integers(0, own, tokens)).astype(np.int32)
    checked = {"same_bytes_when_cut_elsewhere": None} if be.probes.forced_experts else _check(bench, ids[:2 * MAX_ROWS])   # forced choices follow a row's place
    sizes = [MAX_ROWS] * (tokens // MAX_ROWS) + [tokens % MAX_ROWS] * (tokens % MAX_ROWS > 0)
    seconds = [_timed(bench, ids, sizes) for _ in range(WARM + REPEATS)][WARM:]
    logits = be.logits()
    if not np.isfinite(logits).all() or logits.std() < SPREAD:
        raise BenchmarkError(f"the prompt's logits are not numbers of a model (standard deviation {logits.std():.3g})", WAY_OUT)
    bench.place(1, min(MAX_ROWS, tokens), max(tokens // 2, min(MAX_ROWS, tokens)))
    experts = bench.count_experts()
    check_experts(bench, experts)
    ms, floor = statistics.median(seconds) * 1e3, 0.0
    for end in np.cumsum(sizes):
        floor += replace(bench.bytes(experts), cache_tokens=int(end)).floor() / bench.ceiling * 1e3
    check_time(ms, floor)
    return {"decode_backend": be.name, "rows": MAX_ROWS, "sequences": 1, "tp": bench.tp, "rank": bench.rank, "context": tokens,
            "kv_cache_dtype": be.kv_cache_dtype, "steps": len(sizes), "ms": round(ms, 3), "ms_min": round(min(seconds) * 1e3, 3),
            "ms_a_step": round(ms / len(sizes), 3), "rows_a_second": round(tokens / ms * 1e3, 1), "floor_ms": round(floor, 3),
            "ratio_to_floor": round(ms / floor, 3), "us_a_layer": round(ms * 1e3 / len(sizes) / bench.cfg.num_hidden_layers, 2),
            "ceiling_tb_s": round(bench.ceiling / 1e12, 3), "distinct_experts": round(float(np.mean(list(experts.values()))), 2) if experts else None,
            "forced_experts": be.probes.forced_experts, "ranks": be.ranks, "checks": checked}


def _run(bench: StepBench, ids: np.ndarray, sizes: Iterable[int]) -> None:
    be, done = bench.backend, 0
    for n in sizes:
        last = [n - 1] if done + n == len(ids) else []
        be.step(StepRows(ids[done:done + n], np.zeros(n, np.int32), np.arange(done, done + n, dtype=np.int32), np.array(last, np.int32), stand=True))
        be.commit(np.ones(n, bool))
        done += n


def _timed(bench: StepBench, ids: np.ndarray, sizes: list[int]) -> float:
    bench.backend.open_slot(0, range(bench.pages_a_slot))
    return bench.timer.once(lambda: _run(bench, ids, sizes))


def _check(bench: StepBench, ids: np.ndarray) -> dict:
    """The same logits and states however the prompt is cut into wide steps."""
    found = []
    half = len(ids) // 2
    fourth, eighth = half // 4, half // 8   # of a full prompt in buckets whose experts take fewer items together
    for sizes in ([half, len(ids) - half], [fourth, eighth, half - fourth - eighth, len(ids) - half]):
        sizes = [n for n in sizes if n]
        bench.backend.open_slot(0, range(bench.pages_a_slot))
        _run(bench, ids, sizes)
        bench.backend.stream.synchronize()
        found.append([bench.backend.logits(), *(bench.memory.buffer(name)[:, 0].get() for name in STATES)])
    for a, b, name in zip(*found, ("logits", *STATES)):
        if a.tobytes() != b.tobytes():
            raise BenchmarkError(f"{name} are other bytes when the prompt is cut in other places", WAY_OUT)
    return {"same_bytes_when_cut_elsewhere": True, "finite": True}
