"""The step of `standard` as real ranks, one a GPU: by NCCL, by the exchange inside a kernel, and looped back.

    python scripts/bench_ranks.py --ranks 2 --layers 8

A rank's part of the first layers of the released model, cut over as many ranks as there are, with weights made on the device: the text means nothing.
Each way has the same tokens, caches and states to begin with; the first step's logits of NCCL and the exchange must have the same bytes on every
rank. `looped_back` is the rank alone, every collective a kernel that writes to itself: what the others take longer is lost to communication. The floor is the
time of the bytes that a rank must read at the read ceiling of the same run; of experts it counts those of the last layer for every layer. One rank has
nothing to exchange: `--ranks 1 --layers 4` and more ranks with as many layers show how a step of one size scales. `--trace` writes two layers of a step of
one row, with exchanges, of all ranks on one axis of time: a Chrome trace beside `--output`, FILE-trace.json beside FILE.json.
"""
import argparse
import statistics
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import rank_script
import rank_trace
from first_layers import first_layers

from k3cuda.errors import BenchmarkError
from k3cuda.runtime.machine import COLLECTIVES, PEER

LOOPED_BACK, CONTEXT, REPEATS, WARM = "looped_back", 256, 10, 2   # tokens a slot has room for; times, and those before them
POOL_BYTES = 2 << 30
STEPS = 20   # a time, since ranks begin it up to some tenths of a millisecond apart


def measure(comm, device, stream, layers: int, rows: list[int], trace: Path | None) -> dict:
    from k3cuda.emit import Probes
    from k3cuda.plan import build_plan
    from k3cuda.runtime.cuda_backend import CudaBackend
    from k3cuda.runtime.cuda_kernels import bucket_of, compile_bucket, side_by_side
    from k3cuda.runtime.cuda_rank import CudaRank
    from k3cuda.runtime.cuda_synthetic import synthetic_weights
    from k3cuda.runtime.step_bytes import StepBytes

    source = SimpleNamespace(cfg=first_layers(layers))
    plan, tp = build_plan(source.cfg, comm.size), comm.size
    buckets = [bucket_of(n) for n in rows]
    if comm.rank == 0:   # the others find them
        wanted = [(b, {}) for b in buckets] + [(1, {"probes": Probes(trace=True)})] * bool(trace)
        side_by_side([partial(compile_bucket, plan, b, "bf16", device.arch, sms=device.sms, ride=False, **probes) for b, probes in wanted])
    meet(comm, stream)
    held = synthetic_weights(plan, source, tp, comm.rank, arch=device.arch)
    options = dict(max_batch=max(rows), max_model_len=CONTEXT, weights=lambda *_: held)
    ways = {how: CudaRank(source, comm, device.index, collectives=how, **options) for how in COLLECTIVES} if tp > 1 else {}
    check_ways(ways)
    here = type("LoopedBack", (CudaBackend,), {"device_index": device.index})
    ways[LOOPED_BACK] = here(source, tp, only_rank=comm.rank if tp > 1 else None, ride=False, **options)
    ceiling, found, logits = read_ceiling(device), [], {}
    for n in rows:
        for how, backend in ways.items():
            logits[how] = first_step(backend, n, bucket_of(n))
            meet(comm, stream)
            experts = len(np.unique(backend.memories[0].buffer("expert_ids")[:n].get()))
            nbytes = StepBytes(plan, "bf16", n, n, dict.fromkeys(range(layers), experts)).floor()
            took = times(backend, bucket_of(n), device)
            found.append({"how": how, "ranks": backend.ranks, "rows": n, "experts": experts, "floor_ms": round(nbytes / ceiling * 1e3, 4)} | took)
        if tp > 1 and logits["nccl"].tobytes() != logits["peer"].tobytes():
            raise BenchmarkError(f"rank {comm.rank}, {n} rows: logits by NCCL and by the exchange differ")
        if not all(np.isfinite(logits[how]).all() for how in ways if how != LOOPED_BACK):
            raise BenchmarkError(f"rank {comm.rank}, {n} rows: logits are not finite")
    clocks = {}
    if trace:
        traced = ways["traced"] = CudaRank(source, comm, device.index, collectives=PEER, probes=Probes(trace=True), **options)
        check_ways({PEER: traced})
        first_step(traced, 1, 1)
        clocks = rank_trace.trace(comm, device, stream, traced, 1, trace)
    for backend in ways.values():   # NCCL's first: its graphs must be gone before the communicator, which goes with any of them
        backend.close()
    return {"layers": layers, "ceiling_tb_s": round(ceiling / 1e12, 3), "hops": sum(bool(op.stage.moves) for op in plan.ops), "steps": found} | clocks


def check_ways(ways: dict) -> None:
    """Raises BenchmarkError where something else carries the collectives than was asked: its times would stand under a false name."""
    for how, backend in ways.items():
        if backend.ranks != how:
            raise BenchmarkError(f"collectives by {how}: {backend.ranks} carries them", "its log says why")


def meet(comm, stream) -> None:
    """Until all ranks are here."""
    import cupy

    room = cupy.zeros(1 + comm.size, cupy.uint8)
    stream.synchronize()
    comm.all_gather(room.data.ptr, room.data.ptr + 1, 1, stream.ptr)
    stream.synchronize()


def first_step(backend, rows: int, bucket: int) -> np.ndarray:
    """Logits of `rows` sequences' first tokens, in slots as new."""
    pages = backend.num_pages // backend.num_slots
    for slot in range(rows):
        backend.open_slot(slot, range(slot * pages, (slot + 1) * pages))
    ids = np.random.default_rng(rows).integers(0, backend.cfg.vocab_size, rows)
    backend.write(token_ids=ids, row_slot=np.arange(rows), row_position=np.zeros(rows), logit_rows=np.arange(rows), row_accepted=np.ones(rows))
    backend.replay("step", bucket)
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


def times(backend, bucket: int, device) -> dict:
    """Milliseconds of a step with its commit."""
    from k3cuda.runtime.cuda_timing import Timer

    timer = Timer(device.arch, backend.stream)

    def steps():
        for _ in range(STEPS):
            backend.replay("step", bucket)
            backend.replay("commit", bucket)

    ms = [timer.once(steps) / STEPS * 1e3 for _ in range(WARM + REPEATS)][WARM:]
    return {"ms": round(statistics.median(ms), 4), "ms_min": round(min(ms), 4), "ms_max": round(max(ms), 4)}


if __name__ == "__main__":
    parser = rank_script.flags(argparse.ArgumentParser(description=__doc__.splitlines()[0]))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8], metavar="LIST")
    parser.add_argument("--trace", action="store_true", help="also a Chrome trace of a step of all ranks, beside --output")
    given = parser.parse_args()
    if given.trace and (given.ranks == 1 or not given.output):
        parser.error(f"--trace: found --ranks {given.ranks} and --output {given.output}, wanted two or more and a file")
    if given.trace and given.layers <= max(rank_trace.LAYERS):
        parser.error(f"--trace: found --layers {given.layers}, wanted {max(rank_trace.LAYERS) + 1} or more, which have the layers that it shows")
    path = given.output.with_name(f"{given.output.stem}-trace.json") if given.trace else None
    sys.exit(rank_script.main(given, lambda *place: measure(*place, given.layers, given.rows, path)))
