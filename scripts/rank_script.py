"""Scripts whose ranks are processes, one a GPU: starts them, has them meet, and gives each its GPU and a communicator."""
import argparse
import json
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path
from typing import Callable

from k3cuda.errors import K3Error
from k3cuda.runtime import nccl
from k3cuda.runtime.rank_workers import tie_to_parent
from k3cuda.runtime.rendezvous import Server
from k3cuda.runtime.rendezvous_join import Told, join

PLACE = "K3CUDA_SCRIPT_RANK"   # rank, port and token of a process that the script started
_LAST_S = 30   # that other ranks have to end behind rank 0


def flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--share-gpu", action="store_true", help="test switch: ranks share the GPUs that there are")
    parser.add_argument("--output", type=Path, help="where the document goes  [default: stdout]")
    return parser


def main(given, work: Callable) -> int:
    """Exit code. `work`: (communicator, device, stream) -> what rank 0 says beside what all scripts say, JSON-ready."""
    try:
        return _main(given, work)
    except Told as e:
        return e.error.code
    except K3Error as e:
        print(f"Error: {e}", file=sys.stderr)
        return e.code


def _main(given, work) -> int:
    if place := os.environ.get(PLACE):
        rank, port, token = place.split(",")
        tie_to_parent(os.getppid())
        return _run(int(rank), int(port), token, given, work)
    token = secrets.token_hex(16)
    server, others = Server("127.0.0.1", 0, token), []
    try:
        for rank in range(1, given.ranks):
            env = os.environ | {PLACE: f"{rank},{server.port},{token}"}
            others.append(subprocess.Popen([sys.executable, *sys.argv], stdin=subprocess.PIPE, env=env))
        return _run(0, server.port, token, given, work, server)
    finally:
        server.close()
        for other in others:
            other.stdin.close()
            other.wait(_LAST_S)


def _run(rank: int, port: int, token: str, given, work, server: Server | None = None) -> int:
    if given.share_gpu:
        nccl.share_gpus(rank)
    error = made = None
    try:
        device = _open(rank, given.share_gpu)
        made = nccl.unique_id() if rank == 0 else None
    except K3Error as e:
        error = e
    facts = {"ranks": given.ranks, "nccl": None if error else nccl.version(), "share_gpu": given.share_gpu}
    if rank:
        joined = join("127.0.0.1", port, token, rank, given.ranks, facts, error)
    else:
        joined = server.meet(given.ranks, facts, lambda: made, error)
    import cupy

    from k3cuda.runtime.surroundings import surroundings

    start = time.perf_counter()
    comm = nccl.Communicator(joined.payload, rank, given.ranks)
    started, stream = time.perf_counter() - start, cupy.cuda.Stream(non_blocking=True)
    with stream:
        found = work(comm, device, stream)
    if rank == 0:
        document = json.dumps({**surroundings(device, Path(sys.argv[0]).name), **facts, "init_s": started, **found}, indent=1) + "\n"
        given.output.write_text(document) if given.output else print(document, end="")
    return 0


def _open(rank: int, is_shared: bool):
    import cupy

    from k3cuda.runtime.cuda_driver import open_device

    try:
        visible = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError:
        visible = 0
    device = open_device(rank % max(visible, 1) if is_shared else nccl.device_index(rank, visible))
    cupy.cuda.Device(device.index).use()
    return device
