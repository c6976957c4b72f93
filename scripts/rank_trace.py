"""Steps of several ranks on one axis of time: how far the GPUs' clocks are apart, and a Chrome trace (chrome://tracing, Perfetto)."""
import json
from pathlib import Path

import numpy as np
from bench_collectives import Clock
from rank_script import gathered

from k3cuda.chrome_trace import bar

EXCHANGES, PART = 2_000, 1024   # whose notes tell the clocks apart; bytes that a rank sends in one of them
WARM = 3                        # steps before the one that is traced: the first captures
LAYERS = 2, 3                   # of the release: KDA with experts, and the first of latent attention


def apart(notes: np.ndarray) -> tuple[list[float], list[float]]:
    """Nanoseconds that each rank's clock is ahead of rank 0's, and that it may be off.

    No exchange ends on a rank before it has begun on another, plus the way between them. That is as long there and back, so what ends and begins are apart
    at least, in both directions, has the clocks' difference once with each sign.

    Args:
        notes: int64 [ranks, exchanges, 2], when an exchange began and ended by each rank's own clock.
    """
    there = [int((own[:, 1] - notes[0, :, 0]).min()) for own in notes]
    back = [int((notes[0, :, 1] - own[:, 0]).min()) for own in notes]
    return [(a - b) / 2 for a, b in zip(there, back)], [(a + b) / 2 for a, b in zip(there, back)]


def launches(times: np.ndarray, is_carried: list[bool]) -> np.ndarray:
    """int64 [launches, 2]: begin and end of each launch of a step. What carries a collective notes nothing: it is there from the end of the kernel before
    it until the last block of the one behind it has found it complete; the last one, with none behind it, ends where it begins.

    Args:
        times: int64 [launches, 5], as cuda_trace.Traced has them. is_carried: which of them carry a collective.
    """
    out = times[:, [0, 4]].copy()
    for i in np.flatnonzero(is_carried):   # the first launch is none, and no two are neighbours
        out[i] = times[i - 1, 4], times[min(i + 1, len(times) - 1), 2]
    if is_carried[-1]:
        out[-1, 1] = out[-1, 0]
    return out


def events(names: list[tuple[str, int | None]], spans: np.ndarray, layers=LAYERS) -> list[dict]:
    """Of Chrome's format: a bar a launch of `layers`, a process a rank, two lines for kernels in turn since neighbours overlap.

    Args:
        names: (kernel, layer) of each launch. spans: [ranks, launches, 2], nanoseconds on one axis.
    """
    wanted = [i for i, (_, layer) in enumerate(names) if layer in layers]
    start = spans[:, wanted].min()
    return [bar(names[i][0], rank, i % 2, float(own[i, 0] - start), float(own[i, 1] - start), layer=names[i][1]) for rank, own in enumerate(spans) for i in wanted]


def trace(comm, device, stream, backend, bucket: int, path: Path) -> dict:
    """Writes the trace of one step of a backend whose launches note their times and whose collectives are exchanges; returns what is to be said of its clocks."""
    for _ in range(WARM):
        backend.replay("step", bucket)
    backend.stream.synchronize()
    before = apart(gathered(comm, stream, _notes(comm, device, stream)))
    backend.trace.clear()
    backend.replay("step", bucket)
    backend.stream.synchronize()
    after = apart(gathered(comm, stream, _notes(comm, device, stream)))
    ahead = np.mean([before[0], after[0]], axis=0)
    ops = backend.graph("step", bucket)[1]
    names = [(op.stage.name if op.stage.moves else launch.kernel, op.layer) for op, group in ops for launch in group]
    carried = [bool(op.stage.moves) for op, group in ops for _ in group]
    own = launches(backend.trace.words.get()[:len(names), :5].astype(np.int64), carried)
    if comm.rank == 0:
        path.write_text(json.dumps(events(names, gathered(comm, stream, own) - ahead[:, None, None])))
    else:
        gathered(comm, stream, own)
    return {"clocks_ahead_ns": before[0], "clocks_ahead_after_ns": after[0], "clocks_off_by_ns": after[1]}


def _notes(comm, device, stream) -> np.ndarray:
    import cupy

    from k3cuda.emit import MoveLayout
    from k3cuda.errors import BenchmarkError
    from k3cuda.runtime.cuda_carry import Carrier

    carrier = Carrier(comm, device, stream)
    try:
        if reason := carrier.use_peers({comm.size: PART}):
            raise BenchmarkError(f"no exchange tells the clocks apart: {reason}")
        source, target = cupy.zeros(PART, cupy.uint8), cupy.zeros(PART * comm.size, cupy.uint8)
        move = MoveLayout(1, PART, PART, PART * comm.size, PART, False, comm.size, 0, 0)
        return Clock(device, stream, EXCHANGES).notes(carrier.launches("a note", [(move, source.data.ptr, target.data.ptr)]))
    finally:
        carrier.close()
