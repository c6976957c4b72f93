"""NCCL between processes, one a GPU: what arrives is compared, then each collective is timed at 1, 8 and 64 rows.

    python scripts/bench_collectives.py --ranks 4
    python scripts/bench_collectives.py --ranks 16 --share-gpu

The second form puts all ranks on one GPU, by sockets: it tests that bytes arrive, its times mean nothing. Prints one JSON document.
"""
import argparse
import json
import os
import secrets
import statistics
import subprocess
import sys
import time

from k3cuda.errors import K3Error
from k3cuda.runtime import nccl
from k3cuda.runtime.rank_workers import tie_to_parent
from k3cuda.runtime.rendezvous import Server
from k3cuda.runtime.rendezvous_join import Told, join

ROWS, WIDTHS = (1, 8, 64), {"gather": 7168 // 16, "stack": 7168, "scatter": 7168}   # F32 values of a row that one rank has, as in a step over 16 ranks
TIMED, TIMED_SHARED = 50, 2


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--share-gpu", action="store_true", help="test switch: all ranks on one GPU")
    return parser.parse_args()


def main() -> int:
    given = arguments()
    place = os.environ.get("BENCH_COLLECTIVES")   # rank, port and token of a process that this script started
    if place:
        rank, port, token = place.split(",")
        tie_to_parent(os.getppid())
        return run(int(rank), int(port), token, given)
    token = secrets.token_hex(16)
    server = Server("127.0.0.1", 0, token)
    others = []
    try:
        for rank in range(1, given.ranks):
            env = os.environ | {"BENCH_COLLECTIVES": f"{rank},{server.port},{token}"}
            others.append(subprocess.Popen([sys.executable, *sys.argv], stdin=subprocess.PIPE, env=env))
        return run(0, server.port, token, given, server)
    finally:
        server.close()
        for other in others:
            other.stdin.close()
            other.wait(30)


def run(rank: int, port: int, token: str, given, server: Server | None = None) -> int:
    if given.share_gpu:
        nccl.share_gpus(rank)
    error = made = None
    try:
        import cupy

        try:
            visible = cupy.cuda.runtime.getDeviceCount()
        except cupy.cuda.runtime.CUDARuntimeError:
            visible = 0
        cupy.cuda.Device(nccl.device_index(0 if given.share_gpu else rank, visible)).use()
        made = nccl.unique_id() if rank == 0 else None
    except K3Error as e:
        error = e
    facts = {"ranks": given.ranks, "nccl": None if error else nccl.version(), "share_gpu": given.share_gpu}
    if rank:
        joined = join("127.0.0.1", port, token, rank, given.ranks, facts, error)
    else:
        joined = server.meet(given.ranks, facts, lambda: made, error)
    start = time.perf_counter()
    comm = nccl.Communicator(joined.payload, rank, given.ranks)
    started = time.perf_counter() - start
    times = measure(comm, cupy, TIMED_SHARED if given.share_gpu else TIMED)
    comm.close()
    if rank == 0:
        name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
        print(json.dumps({"ranks": given.ranks, "gpu": name, "nccl": nccl.version(), "share_gpu": given.share_gpu, "init_s": started, "collectives": times}, indent=1))
    return 0


def measure(comm, cupy, count: int) -> list[dict]:
    """Of every collective and row count the median time, once what arrives is right."""
    stream, found = cupy.cuda.Stream(non_blocking=True), []
    with stream:
        ranks = nccl.NcclRanks(comm, cupy, stream.ptr)
        for name, width in WIDTHS.items():
            carry = ranks.scatter if name == "scatter" else ranks.gather
            for rows in ROWS:
                values = cupy.arange(rows * width, dtype=cupy.float32).reshape(rows, width)
                own = [values + 1e6 * comm.rank]
                part, = carry(own, comm.size)
                size = width // comm.size
                at = slice(comm.rank * size, (comm.rank + 1) * size) if name == "scatter" else slice(None)
                for r, got in enumerate(part):
                    if not bool((got == (values + 1e6 * r)[:, at]).all()):
                        raise SystemExit(f"rank {comm.rank}: {name} of {rows} rows: what came from rank {r} is wrong")
                us = []
                for _ in range(count):
                    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
                    begin.record()
                    carry(own, comm.size)
                    end.record()
                    end.synchronize()
                    us.append(1e3 * cupy.cuda.get_elapsed_time(begin, end))
                found.append({"collective": name, "rows": rows, "bytes": rows * width * 4, "us": statistics.median(us), "us_min": min(us)})
    return found


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Told as e:
        sys.exit(e.error.code)
    except K3Error as e:
        print(f"Error: {e}", file=sys.stderr)
        sys.exit(e.code)
