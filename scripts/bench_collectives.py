"""Collectives between processes, one a GPU, as a step captures them: what arrives is compared, then each is timed at 1, 8 and 64 rows.

    python scripts/bench_collectives.py --ranks 4
    python scripts/bench_collectives.py --ranks 16 --share-gpu

By NCCL, with the kernels that pack and spread around it, and by the exchange inside a kernel, where the GPUs can map each other's memory. A graph
holds one collective between two notes of the device's clock; `empty` is a graph of the notes alone. The second form has the ranks share the GPUs that
there are, NCCL by sockets: it tests that bytes arrive, its times mean nothing. Says each time on stderr; prints one JSON document, or writes it to --output.
"""
import argparse
import ctypes
import sys

import rank_script

from k3cuda.config import DECODE_ROWS, RELEASED_FOLDER, K3Config
from k3cuda.emit import MoveLayout
from k3cuda.runtime.rank_moves import part_bytes

ROWS, HIDDEN = (1, 8, DECODE_ROWS), K3Config.from_json(RELEASED_FOLDER).hidden_size
TIMED, TIMED_SHARED, SKIPPED = 10_000, 4, 20   # replays; and those before them


def layouts(ranks: int) -> dict[tuple[str, int], MoveLayout]:
    """(name, rows) -> what a step of the released model moves: a rank's columns of a row, a whole row, a row of which each rank has a part. F32."""
    part, whole, out = HIDDEN // ranks * 4, HIDDEN * 4, {}
    for rows in ROWS:
        out["gather", rows] = MoveLayout(rows, part, part, whole, part, False, ranks, 0, 0)
        out["stack", rows] = MoveLayout(rows, whole, whole, whole, DECODE_ROWS * whole, False, ranks, 0, 0)
        out["scatter", rows] = MoveLayout(rows, part, whole, part, DECODE_ROWS * part, True, ranks, 0, 0)
    return out


def arguments():
    parser = rank_script.flags(argparse.ArgumentParser(description=__doc__.splitlines()[0]))
    parser.add_argument("--replays", type=int, help=f"of each graph  [default: {TIMED}; {TIMED_SHARED} with --share-gpu]")
    parser.add_argument("--fabric", action="store_true", help="map peers as those of other hosts, by fabric handles")
    given = parser.parse_args()
    given.replays = given.replays or (TIMED_SHARED if given.share_gpu else TIMED)
    return given


def measure(comm, device, stream, replays: int, fabric: bool) -> dict:
    """Times of an empty graph, of every collective and row count by each carrier once what arrives is right, and why there is no exchange, or ""."""
    from k3cuda.runtime.cuda_carry import Carrier

    carriers, moves = [Carrier(comm, device, stream) for _ in range(2)], layouts(comm.size)
    carriers[0].warm_up()
    no_peers = carriers[1].use_peers({comm.size: max(map(part_bytes, moves.values()))}, fabric)
    clock, found = Clock(device, stream, replays), []
    for (name, rows), layout in moves.items():
        for carrier in carriers[:1] if no_peers else carriers:
            launches, buffers = placed(carrier, name, layout)
            for _ in range(2):   # the second time in memory that the first has left
                check(comm, name, rows, launches, *buffers, stream)
            found.append({"collective": name, "rows": rows, "bytes": part_bytes(layout), "by": carrier.name} | clock.times(launches))
            if comm.rank == 0:
                print("{collective:8}{rows:3} rows {bytes:9,} bytes by {by}: {us:7.2f} us, 99th percentile {us_p99:7.2f}".format(**found[-1]), file=sys.stderr, flush=True)
            carrier.check()
    empty = clock.times([])
    for carrier in carriers:
        carrier.close()
    comm.close()
    return {"replays": replays, "fabric": fabric, "no_peers": no_peers, "empty": empty, "collectives": found}


def placed(carrier, name: str, layout: MoveLayout):
    """(what is launched, (source, target)): F32 arrays [row, column] and [rank, row, column], a gather's [row, column] with the ranks' columns side by side."""
    import cupy

    width = layout.slice // 4
    source = cupy.empty((layout.rows, layout.source_row // 4), cupy.float32)
    target = cupy.empty((layout.rows, layout.ranks * width) if name == "gather" else (layout.ranks, DECODE_ROWS, width), cupy.float32)
    return carrier.launches(f"{name} of {layout.rows} rows", [(layout, source.data.ptr, target.data.ptr)]), (source, target)


def check(comm, name, rows, launches, source, target, stream) -> None:
    """Every value says whose it is and where it was."""
    import cupy

    n, width = comm.size, target.shape[-1] if name != "gather" else target.shape[-1] // comm.size
    values = lambda rank: cupy.arange(source.size, dtype=cupy.float32).reshape(source.shape) + 1e6 * rank
    source[...], target[...] = values(comm.rank), -1
    for launch in launches:
        launch.launch()
    stream.synchronize()
    for r in range(n):
        got = target[:, r * width:(r + 1) * width] if name == "gather" else target[r, :rows]
        wanted = values(r)[:, comm.rank * width:(comm.rank + 1) * width] if name == "scatter" else values(r)
        if not bool((got == wanted).all()):
            raise SystemExit(f"rank {comm.rank}: {name} of {rows} rows: what came from rank {r} is wrong")


class Clock:
    """Notes when each of `replays` launches of a graph begins and ends, by the device's own clock."""

    def __init__(self, device, stream, replays: int):
        import cupy

        from k3cuda.runtime.cuda_driver import Launch, Module
        from k3cuda.runtime.cuda_jit import compile_cuda

        self.stream, self.replays = stream, replays
        self.stamps, self.count = cupy.zeros(2 * (replays + SKIPPED), cupy.uint64), cupy.zeros(1, cupy.uint32)
        self.module = Module(compile_cuda('#include "stamp.cuh"\n', device.arch, name="a clock").cubin)
        arguments = [ctypes.c_void_p(self.stamps.data.ptr), ctypes.c_void_p(self.count.data.ptr)]
        self.stamp = Launch(self.module.function("stamp"), 1, 1, arguments, stream=stream.ptr)

    def notes(self, launches):
        """int64 [replays, 2]: nanoseconds of the notes around `launches`, by the device's clock."""
        self.count[...] = 0
        self.stream.synchronize()
        self.stream.begin_capture()
        for launch in (self.stamp, *launches, self.stamp):
            launch.launch()
        graph = self.stream.end_capture()
        skipped = min(SKIPPED, self.replays)
        for _ in range(skipped + self.replays):
            graph.launch(self.stream)
        self.stream.synchronize()
        return self.stamps.get().reshape(-1, 2)[skipped:skipped + self.replays].astype("int64")

    def times(self, launches) -> dict:
        """Microseconds between the notes."""
        notes = self.notes(launches)
        us = sorted((notes[:, 1] - notes[:, 0]).tolist())
        return {"us": us[len(us) // 2] / 1e3, "us_p99": us[min(len(us) - 1, len(us) * 99 // 100)] / 1e3, "us_min": us[0] / 1e3}


if __name__ == "__main__":
    given = arguments()
    sys.exit(rank_script.main(given, lambda *place: measure(*place, given.replays, given.fabric)))
