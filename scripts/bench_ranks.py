"""Steps of real ranks, one a GPU: stage by stage by NCCL, by the exchange inside a kernel, and looped back; in one launch, between ranks and looped back.

    python scripts/bench_ranks.py --ranks 2 --layers 8

A rank's part of the first layers of the released model, cut over as many ranks as there are, with weights made on the device: the text means nothing.
Each way begins with the same caches and states, and the first step's logits must have the same bytes in all of them, on every rank. `looped_back` is the rank
alone, every collective a kernel that writes to itself, with tokens of its own part of the vocabulary: what the others take longer is lost to communication.
`latency_specialized` and `latency_specialized_looped_back` are whole steps in one launch (docs/megakernel.md), whose logits must be those of `peer` and of
`looped_back`; numbers of rows that one launch cannot take stand in `declined`, with the reason. The floor is the time of the bytes that a rank must read at the
read ceiling of the same run; of experts it counts those of the last layer for every layer. One rank has nothing to exchange: `--ranks 1 --layers 4` and more
ranks with as many layers show how a step of one size scales. `--trace` writes two layers of a step of one row, with exchanges, of all ranks on one axis of time:
a Chrome trace beside `--output`, FILE-trace.json beside FILE.json.
"""
import argparse
import hashlib
import statistics
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import rank_script
import rank_trace
from first_layers import first_layers

from k3cuda.errors import BenchmarkError, CompileError, PlanError
from k3cuda.runtime.machine import COLLECTIVES, LATENCY_SPECIALIZED, NCCL, PEER

LOOPED_BACK, ONE_LOOPED_BACK = "looped_back", f"{LATENCY_SPECIALIZED}_looped_back"
CONTEXT, REPEATS, WARM = 256, 10, 2   # tokens a slot has room for; times, and those before them
POOL_BYTES = 2 << 30
STEPS = 20   # a time, since ranks begin it up to some tenths of a millisecond apart


class Way(NamedTuple):
    """How steps run. single: in one launch. like: the way whose bytes its logits must have, if any, which comes before it."""

    backend: object
    single: bool = False
    like: str | None = None


def measure(comm, device, stream, layers: int, rows: list[int], trace: Path | None) -> dict:
    from k3cuda.plan import build_plan
    from k3cuda.runtime.cuda_driver import explained

    plan = build_plan(first_layers(layers), comm.size)
    if comm.rank == 0:   # the others find them
        compile_all(plan, device, rows, bool(trace))
    meet(comm, stream)
    with explained():   # a launch that waited too long for another rank says for whom
        return measured(comm, device, stream, plan, rows, trace)


def compile_all(plan, device, rows: list[int], is_traced: bool) -> None:
    """The kernels of all ways, side by side."""
    from k3cuda.emit import Probes
    from k3cuda.runtime.cuda_kernels import bucket_of, compile_bucket, side_by_side
    from k3cuda.runtime.launch_program import BUCKETS, CLUSTER, compiled_launch, launched

    def one_launch(bucket: int, ranks: int) -> None:
        with suppress(PlanError, CompileError):   # which the way that wants it gives as its reason
            compiled_launch(plan, launched(plan, bucket, device.sms // CLUSTER * CLUSTER, "bf16", ranks), device.arch)

    buckets = [bucket_of(n) for n in rows]
    wanted = [(b, {}) for b in buckets] + [(1, {"probes": Probes(trace=True)})] * is_traced
    side_by_side([partial(one_launch, b, ranks) for b in {*buckets} & {*BUCKETS} for ranks in {1, plan.tp}]
                 + [partial(compile_bucket, plan, b, "bf16", device.arch, sms=device.sms, ride=False, **probes) for b, probes in wanted])


def measured(comm, device, stream, plan, rows: list[int], trace: Path | None) -> dict:
    from k3cuda.emit import Probes
    from k3cuda.runtime.cuda_backend import CudaBackend
    from k3cuda.runtime.cuda_kernels import bucket_of
    from k3cuda.runtime.cuda_rank import CudaRank
    from k3cuda.runtime.cuda_synthetic import synthetic_weights
    from k3cuda.runtime.step_bytes import StepBytes

    source, tp, layers = SimpleNamespace(cfg=plan.cfg), comm.size, plan.cfg.num_hidden_layers
    held = synthetic_weights(plan, source, tp, comm.rank, arch=device.arch)
    options = dict(max_batch=max(rows), max_model_len=CONTEXT, weights=lambda *_: held)
    ranks = {how: CudaRank(source, comm, device.index, collectives=how, specialized=how == PEER, **options) for how in COLLECTIVES} if tp > 1 else {}
    check_ways(ranks)
    here = type("LoopedBack", (CudaBackend,), {"device_index": device.index})
    alone = here(source, tp, only_rank=comm.rank if tp > 1 else None, ride=False, specialized=True, **options)
    ways = {NCCL: Way(ranks[NCCL]), PEER: Way(ranks[PEER], like=NCCL), LATENCY_SPECIALIZED: Way(ranks[PEER], True, PEER)} if tp > 1 else {}
    ways |= {LOOPED_BACK: Way(alone), ONE_LOOPED_BACK: Way(alone, True, LOOPED_BACK)}
    ceiling, found, declined = read_ceiling(device), [], []
    for n in rows:
        logits, experts = {}, {}
        for how, way in ways.items():
            be, bucket = way.backend, bucket_of(n)
            if way.single and (reason := be.step_launches.declines(bucket)):
                declined.append({"how": how, "rows": n, "reason": reason})
                continue
            logits[how] = first_step(way, n, bucket, plan.cfg.vocab_size // tp if be is alone else 0, comm.rank)
            check_logits(comm, stream, n, how, logits[how], logits.get(way.like), be is alone)
            # One launch keeps its choices to itself; they are those of the same step stage by stage.
            experts[how] = experts[way.like] if way.single else len(np.unique(be.memories[0].buffer("expert_ids")[:n].get()))
            nbytes = StepBytes(plan, "bf16", n, n, dict.fromkeys(range(layers), experts[how])).floor()
            found.append({"how": how, "ranks": be.ranks, "rows": n, "experts": experts[how], "floor_ms": round(nbytes / ceiling * 1e3, 4)} | times(way, bucket, device))
            if comm.rank == 0:
                print("{how}, {rows} rows: {ms} ms, floor {floor_ms}".format(**found[-1]), file=sys.stderr, flush=True)
    clocks, backends = {}, [*ranks.values(), alone]
    if trace:
        traced = CudaRank(source, comm, device.index, collectives=PEER, probes=Probes(trace=True), **options)
        backends.append(traced)
        check_ways({PEER: traced})
        first_step(Way(traced), 1, 1)
        clocks = rank_trace.trace(comm, device, stream, traced, 1, trace)
    for backend in backends:   # NCCL's first: its graphs must be gone before the communicator, which goes with any of them
        backend.close()
    hops = sum(bool(op.stage.moves) for op in plan.ops)
    return {"layers": layers, "ceiling_tb_s": round(ceiling / 1e12, 3), "hops": hops, "steps": found, "declined": declined} | clocks


def check_ways(ways: dict) -> None:
    """Raises BenchmarkError where something else carries the collectives than was asked: its times would stand under a false name."""
    for how, backend in ways.items():
        if backend.ranks != how:
            raise BenchmarkError(f"collectives by {how}: {backend.ranks} carries them", "its log says why")


def meet(comm, stream) -> None:
    """Until all ranks are here."""
    stream.synchronize()
    rank_script.gathered(comm, stream, np.zeros(1, np.uint8))


def check_logits(comm, stream, rows: int, how: str, logits: np.ndarray, wanted: np.ndarray | None, is_alone: bool) -> None:
    """All ranks at the same time, which it also brings together. Raises BenchmarkError where logits are no numbers, not those `wanted`, or, of ranks that
    exchange them, not the same everywhere."""
    digests = rank_script.gathered(comm, stream, np.frombuffer(hashlib.sha256(logits.tobytes()).digest(), np.uint8))
    where = f"rank {comm.rank}, {rows} rows, {how}"
    if not np.isfinite(logits).all():
        raise BenchmarkError(f"{where}: logits are not finite")
    if wanted is not None and logits.tobytes() != wanted.tobytes():
        raise BenchmarkError(f"{where}: logits have other bytes than those of the way before")
    if not is_alone and len(np.unique(digests, axis=0)) > 1:
        raise BenchmarkError(f"{where}: the ranks' logits have different bytes")


def first_step(way: Way, rows: int, bucket: int, own: int = 0, rank: int = 0) -> np.ndarray:
    """Logits of `rows` sequences' first tokens, in slots as new. `own`: tokens that a rank alone has rows of, `rank` after `rank`; 0: all of them."""
    backend = way.backend
    pages = backend.num_pages // backend.num_slots
    for slot in range(rows):
        backend.open_slot(slot, range(slot * pages, (slot + 1) * pages))
    ids = np.random.default_rng(rows).integers(0, own or backend.cfg.vocab_size, rows) + own * rank
    backend.write(token_ids=ids, row_slot=np.arange(rows), row_position=np.zeros(rows), logit_rows=np.arange(rows), row_accepted=np.ones(rows))
    backend.replay("step", bucket, single=way.single)
    backend.stream.synchronize()
    return backend.memories[0].buffer("logits")[:rows].get()


def read_ceiling(device) -> float:
    """Bytes a second."""
    import ctypes

    import cupy

    from k3cuda.runtime.cuda_synthetic import Filler
    from k3cuda.runtime.cuda_timing import Timer

    pool = cupy.empty(POOL_BYTES, cupy.uint8)
    Filler(device.arch).run("fill_bf16", pool, pool.nbytes // 2, ctypes.c_uint(1), ctypes.c_float(-1), ctypes.c_float(1))
    cupy.cuda.Device().synchronize()
    return Timer(device.arch).read_ceiling(pool, device.name)


def times(way: Way, bucket: int, device) -> dict:
    """Milliseconds of a step with its commit."""
    from k3cuda.runtime.cuda_timing import Timer

    backend = way.backend
    timer = Timer(device.arch, backend.stream)

    def steps():
        for _ in range(STEPS):
            backend.replay("step", bucket, single=way.single)
            backend.replay("commit", bucket)

    ms = [timer.once(steps) / STEPS * 1e3 for _ in range(WARM + REPEATS)][WARM:]
    return {"ms": round(statistics.median(ms), 4), "ms_min": round(min(ms), 4), "ms_max": round(max(ms), 4)}


if __name__ == "__main__":
    parser = rank_script.flags(argparse.ArgumentParser(description=__doc__.splitlines()[0]))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2, 8], metavar="LIST")
    parser.add_argument("--trace", action="store_true", help="also a Chrome trace of a step of all ranks, beside --output")
    given = parser.parse_args()
    if given.trace and (given.ranks == 1 or not given.output):
        parser.error(f"--trace: found --ranks {given.ranks} and --output {given.output}, wanted two or more and a file")
    if given.trace and given.layers <= max(rank_trace.LAYERS):
        parser.error(f"--trace: found --layers {given.layers}, wanted {max(rank_trace.LAYERS) + 1} or more, which have the layers that it shows")
    path = given.output.with_name(f"{given.output.stem}-trace.json") if given.trace else None
    sys.exit(rank_script.main(given, lambda *place: measure(*place, given.layers, given.rows, path)))
