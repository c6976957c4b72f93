"""What joins the launches of ranks that have one each: memory that all have mapped, and that all of them build the same."""
import ctypes
import hashlib
from contextlib import contextmanager
from typing import Callable, ContextManager

import cupy
import numpy as np

from .. import launch_source as ls
from ..block_program import BlockProgram
from ..errors import CompileError, PlanError
from ..launch_kinds import VECTOR_BYTES
from .launch_program import BUCKETS, NOT_THERE
from .peer_memory import Peers

_REASON, _DIGEST = 240, 16   # bytes that a rank says of a launch


class LaunchPeers:
    """Of one rank. All ranks build launches of the same rows at the same time: first `agreed`, then `peers`.

    Args:
        rank: this one. vocab: values of a row of logits.
        share: given a number of bytes, at least as many of each rank's memory, mapped on all (Carrier.share).
        gather: what every rank gives it, in order of rank; of one length on all of them.
        building: a context around what takes seconds in the middle of a step: the others wait, and it is no hang.
    """

    def __init__(self, rank: int, vocab: int, share: Callable[[int], Peers], gather: Callable[[bytes], list[bytes]], building: Callable[[], ContextManager]):
        self.rank, self._vocab, self._share, self._gather, self._building = rank, vocab, share, gather, building
        self._prepared: set[int] = set()   # addresses of own memory that launches may use

    def logit_bytes(self, rows: int) -> int:
        return rows * self._vocab * 4

    @contextmanager
    def agreed(self):
        """Around what compiles a launch and says in the dict that it gets which "program" it is of.

        Raises PlanError on every rank where one of them fails with PlanError or CompileError, or has another program.
        """
        said, reason = {}, ""
        try:
            with self._building():
                yield said
        except (PlanError, CompileError) as e:
            reason = e.message
        digest = bytes(_DIGEST) if reason else _digest(said["program"])
        heard = self._gather(reason.encode()[:_REASON].ljust(_REASON, b"\0") + digest)
        for rank, one in enumerate(heard):
            if any(one[:_REASON]):
                raise PlanError(f"rank {rank}: {one[:_REASON].rstrip(bytes(1)).decode(errors='replace')}")
        for rank, one in enumerate(heard):
            if one[_REASON:] != heard[0][_REASON:]:
                raise PlanError(f"ranks 0 and {rank} have launches of different blocks")

    def peers(self, program: BlockProgram) -> ctypes.Array:
        """A LaunchPeer for each rank, whose memory is as launches must find it. Raises PlanError on every rank where one's memory cannot be mapped."""
        counts, logits = len(BUCKETS) * ls.COUNT_BYTES, self.logit_bytes(BUCKETS[-1])
        exchange = program.slots * program.slot_vectors * VECTOR_BYTES // program.rows * BUCKETS[-1]
        shared = self._share(counts + logits + exchange)
        if shared.reason:
            raise PlanError(shared.reason)
        own = shared.addresses[self.rank]
        if own not in self._prepared:
            _view(own, counts)[:] = 0
            _view(own + counts + logits, exchange).view(np.uint32)[:] = NOT_THERE
            cupy.cuda.get_current_stream().synchronize()
            self._prepared.add(own)
        self._gather(bytes([1]))   # from here on others write there
        at = BUCKETS.index(program.rows) * ls.COUNT_BYTES
        return (ls.LaunchPeer * len(shared.addresses))(*(ls.LaunchPeer(a + counts + logits, a + counts, a + at) for a in shared.addresses))


def _digest(program: BlockProgram) -> bytes:
    """Of all that ranks must have alike: what their blocks do, and where results lie."""
    return hashlib.sha256(program.words.tobytes() + repr((program.links, program.slot_vectors, program.most)).encode()).digest()[:_DIGEST]


def _view(address: int, nbytes: int) -> cupy.ndarray:
    return cupy.ndarray((nbytes,), np.uint8, cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(address, nbytes, None), 0))
