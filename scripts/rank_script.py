"""Scripts whose ranks are processes, one a GPU: starts them, has them meet, and gives each its GPU and a communicator."""
import argparse
import json
import os
import secrets
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Callable

import numpy as np

from k3cuda.errors import K3Error, RankDied
from k3cuda.runtime import nccl
from k3cuda.runtime.rank_workers import tie_to_parent
from k3cuda.runtime.rendezvous import Server
from k3cuda.runtime.rendezvous_join import Told, join

PLACE = "K3CUDA_SCRIPT_RANK"   # rank, port and token of a process that the script started
_LAST_S, _WORDS_S = 30, 1   # that other ranks have to end behind rank 0, and rank 0 behind another that has failed


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
        _run(int(rank), int(port), token, given, work)
        return 0
    token = secrets.token_hex(16)
    server, others, codes = Server("127.0.0.1", 0, token), [], []
    try:
        for rank in range(1, given.ranks):
            env = os.environ | {PLACE: f"{rank},{server.port},{token}"}
            others.append(subprocess.Popen([sys.executable, *sys.argv], stdin=subprocess.PIPE, env=env))
        threading.Thread(target=_end_with, args=(others,), daemon=True).start()
        _run(0, server.port, token, given, work, server)
        codes = [other.wait(_LAST_S) for other in others]
    finally:
        server.close()
        for other in others:
            other.stdin.close()   # which ends it, if it has not ended
            other.wait(_LAST_S)
    return next((_said(rank, code) for rank, code in enumerate(codes, 1) if code), 0)


def _end_with(others: list[subprocess.Popen]) -> None:
    """Ends this process, which may be waiting for it inside a kernel, once another rank has ended with an error."""
    while True:
        time.sleep(0.2)
        for rank, other in enumerate(others, 1):
            if code := other.poll():
                time.sleep(_WORDS_S)   # that rank 0 has to say the same error by itself, as where all ranks are refused
                os._exit(_said(rank, code))   # the others end with their pipe


def _said(rank: int, code: int) -> int:
    """The exit code of a script whose `rank` ended with `code`, or by a signal where that is negative."""
    print(f"rank {rank} ended with code {code}", file=sys.stderr, flush=True)
    return code if code > 0 else RankDied.code


def _run(rank: int, port: int, token: str, given, work, server: Server | None = None) -> None:
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
        # NCCL_VERSION is an image's, and may be of another NCCL than the one that is used.
        nccl_settings = {name: value for name, value in os.environ.items() if name.startswith("NCCL_") and name != "NCCL_VERSION"}
        document = {**surroundings(device, Path(sys.argv[0]).name), **facts, "nccl_settings": nccl_settings, "init_s": started, **found}
        text = json.dumps(document, indent=1) + "\n"
        given.output.write_text(text) if given.output else print(text, end="")


def gathered(comm, stream, own: np.ndarray) -> np.ndarray:
    """[ranks, ..] of arrays of one shape, all ranks at the same time."""
    import cupy

    part, whole = cupy.asarray(own), cupy.empty((comm.size, *own.shape), own.dtype)
    cupy.cuda.get_current_stream().synchronize()
    comm.all_gather(part.data.ptr, whole.data.ptr, part.nbytes, stream.ptr)
    stream.synchronize()
    return whole.get(stream=stream)


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
