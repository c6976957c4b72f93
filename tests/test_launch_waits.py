"""How long a launch waits, under g++: inside a step for its limit alone, before one as long as a rank's host may take."""
import ctypes
import multiprocessing
import threading
import time

import numpy as np
import pytest
from shim import host

from k3cuda import launch_source as ls
from k3cuda.launch_kinds import VECTOR_BYTES
from k3cuda.runtime.launch_program import RANK, WAITS

shim = pytest.mark.skipif(host.COMPILER is None, reason="needs g++")
RANKS, BLOCKS = 2, 3
# What launches of their own begin and end with, and nothing between.
MEETINGS = """#define K3_RECEIVE_BATCH 1
#define K3_POLL 0
#define K3_PROBED 0
#define K3_STAMPED 0
#define K3_PRODUCER_LIMITS 1
#define K3_RANKS 2
#define K3_RANKS_HERE 1
#define K3_SCOPE "sys"
#include "launch_ranks.cuh"
struct Shape { static constexpr int kPeersAt = 0; };
extern "C" __global__ void meetings(const __grid_constant__ LaunchArgs a) {
  K3_DYN_SMEM(u8, smem);
  const LaunchRanks<Shape> ranks{a, smem};
  ranks.find_peers();
  __syncthreads();
  ranks.enter();
  ranks.leave();
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return host.build(MEETINGS, ["meetings"], tmp_path_factory.mktemp("meetings"))


def launches(library, trouble, limit_s: float, meet_s: float, late_s: float, comes=range(RANKS)):
    """Of each rank of `comes`, of which the last is late."""
    counts, lates, peers, threads = np.zeros((RANKS, ls.COUNT_BYTES), np.uint8), np.zeros((RANKS, 4), np.uint32), (ls.LaunchPeer * RANKS)(), []
    for rank in range(RANKS):
        peers[rank] = ls.LaunchPeer(0, 0, counts[rank].ctypes.data)
    three = ctypes.c_uint * 3

    def launch(rank):
        time.sleep(late_s if rank == comes[-1] else 0)
        own = counts[rank].ctypes.data
        args = ls.LaunchArgs(limit=int(limit_s * 1e9) >> 10, meet=int(meet_s * 1e9) >> 10, rank=rank, phases=9, counts=own, peers=ctypes.addressof(peers),
                             failed=own + ls.FAILED_AT, trouble=trouble.ctypes.data, late=lates[rank].ctypes.data)
        library.k3_shim_meetings(three(BLOCKS, 1, 1), three(64, 1, 1), ctypes.c_size_t(VECTOR_BYTES * 16), 1, ctypes.c_uint(1), (ctypes.c_void_p * 1)(ctypes.addressof(args)))

    for rank in comes:
        threads.append(threading.Thread(target=launch, args=(rank,)))
        threads[-1].start()
    for thread in threads:
        thread.join()


def ended(library, **how) -> tuple[int, list[int]]:
    """(exit code, record) of a process with such launches: a trap ends all of it."""
    trouble = multiprocessing.RawArray(ctypes.c_uint32, 8)
    child = multiprocessing.get_context("fork").Process(target=launches, args=(library, np.frombuffer(trouble, np.uint32)), kwargs=how)
    child.start()
    child.join(60)
    return child.exitcode, list(trouble)


@shim
def test_a_rank_that_its_host_keeps_is_waited_for_longer_than_anything_inside_a_step(library):
    """Its launch comes when that of the other has waited for longer than a wait inside a step may take."""
    assert ended(library, limit_s=1.5, meet_s=60, late_s=3) == (0, [0] * 8)


@shim
def test_a_rank_that_never_comes_has_its_name(library):
    code, (what, _, _, *where) = ended(library, limit_s=60, meet_s=0.3, late_s=0, comes=[0])
    assert code == 86 and WAITS[what] == RANK and where[:2] == [0, 1]   # the shim's trap; before the first phase, for rank 1
