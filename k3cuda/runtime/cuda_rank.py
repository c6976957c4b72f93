"""The standard decode backend as one rank of several processes, a GPU each: what crosses ranks goes by NCCL or by the exchange inside a kernel.

NCCL moves contiguous bytes, so what is cut by columns is packed before and spread behind it by kernels. The exchange is one kernel for all moves of
a collective, and needs peers whose memory can be mapped. Either is captured in the step's graph, and both bring the same bytes.
"""
import ctypes
import logging
from contextlib import nullcontext
from typing import Callable

import cupy
import numpy as np

from ..config import DECODE_ROWS
from ..emit import MoveLayout, layout_of
from ..errors import UsageError
from ..plan import Op
from .collectives import members
from .cuda_backend import CudaBackend
from .cuda_driver import Launch, Module
from .cuda_jit import compile_cuda
from .cuda_memory import RankMemory
from .cuda_peers import CudaPeers
from .machine import NCCL, PEER
from .nccl import Communicator
from .peer_exchange import STATE_WORDS, TROUBLE_WORDS, PeerExchange, capacities, memory_bytes
from .peer_memory import map_peers
from .rank_moves import PACK, SPREAD, THREADS, VECTOR, blocks_for, part_bytes, rank_move

log = logging.getLogger("k3cuda")


class NcclMove:
    """One move of a collective, to be launched where a kernel would be: packed, moved by NCCL, spread.

    Args:
        source, target: addresses.
        staging: address of room for `staging_bytes`.
        kernel: (its name, arguments, vectors that it handles) -> what launches it, in the stream's order.
    """

    def __init__(self, layout: MoveLayout, comm: Communicator, source: int, target: int, staging: int, stream: int, kernel: Callable):
        self.kernel, self._comm, self._stream, self._at = "nccl", comm, stream, layout
        self._ranks, self._part = members(comm.rank, layout.ranks), part_bytes(layout)
        move, parts = rank_move(layout, source, target), layout.ranks if layout.is_cut else 1
        # Rows of whole vectors that stand behind one another are sent from where they are.
        is_packed = not layout.is_cut and move.unit == VECTOR and (layout.source_row == layout.slice or layout.rows == 1)
        self._sent, self._got = source if is_packed else staging, staging + layout.ranks * self._part
        self._pack = None if is_packed else kernel(PACK, [move, ctypes.c_void_p(staging)], parts * self._part // VECTOR)
        self._spread = kernel(SPREAD, [move, ctypes.c_void_p(self._got)], layout.ranks * self._part // VECTOR)

    @staticmethod
    def staging_bytes(layout: MoveLayout) -> int:
        """What is sent, to each rank where that differs, and what is received."""
        return 2 * layout.ranks * part_bytes(layout)

    def launch(self) -> None:
        if self._pack:
            self._pack.launch()
        move = self._comm.all_to_all if self._at.is_cut else self._comm.gather
        move(self._sent, self._got, self._part, self._ranks, self._stream)
        self._spread.launch()


class CudaRank(CudaBackend):
    """One rank of `comm.size`. A step has at most DECODE_ROWS rows, and its draws are read before the next one begins.

    Args:
        comm: of all ranks; closed with the backend. device: index of this rank's GPU. options: as CudaBackend.
        building: a context around what takes seconds in the middle of a step: the others wait, and it is no hang.
        collectives: NCCL or PEER; where peers cannot be mapped NCCL takes over, and says so.
    Raises, where something is read, besides what CudaBackend raises:
        ExchangeTimeout: a rank has not sent its part in time.
    """

    overlaps, most_rows = False, DECODE_ROWS

    def __init__(self, source, comm: Communicator, device: int, building=nullcontext, collectives: str = NCCL, **options):
        self._comm, self.device_index, self._building, self._staging, self._movers = comm, device, building, {}, None
        self._exchange, self._asks_for_peers = None, collectives == PEER
        super().__init__(source, comm.size, only_rank=comm.rank, ride=False, carry=self._moves, building=building, **options)
        self._warm_up()

    def bind_cache(self, max_model_len: int | None) -> None:
        if self._asks_for_peers:   # once, and before the cache takes what memory there is
            self._asks_for_peers, self._exchange = False, self._map_peers()
        self.ranks = PEER if self._exchange else NCCL   # no loopback: a rank embeds its own tokens, and what the others have comes from them
        super().bind_cache(max_model_len)

    def _map_peers(self) -> PeerExchange | None:
        capacity = capacities(self.plan, *([self.draft.plan] if self.draft else []))
        peers = map_peers(self._comm.rank, memory_bytes(capacity), CudaPeers(), self._gather_bytes)
        if peers.reason:
            log.warning("collectives by NCCL: %s", peers.reason)
            return None
        self._state = cupy.zeros(STATE_WORDS * len(capacity), cupy.uint32)
        pinned = cupy.cuda.alloc_pinned_memory(4 * TROUBLE_WORDS)
        trouble = np.frombuffer(pinned, np.uint32, TROUBLE_WORDS)
        trouble[:] = 0
        return PeerExchange(self._comm.rank, peers, capacity, self._state.data.ptr, trouble, self._kernel)

    def _gather_bytes(self, mine: bytes) -> list[bytes]:
        """Of all ranks, as long as they."""
        own, all_of_them = cupy.asarray(np.frombuffer(mine, np.uint8)), cupy.empty((self.tp, len(mine)), cupy.uint8)
        cupy.cuda.get_current_stream().synchronize()
        self._comm.all_gather(own.data.ptr, all_of_them.data.ptr, len(mine), self._raw_stream)
        return [row.tobytes() for row in all_of_them.get(stream=self.stream)]

    def _warm_up(self) -> None:
        """NCCL sets connections up when they are first used, which must not be while a graph is captured."""
        room = cupy.zeros(2 * self.tp, cupy.uint8)
        cupy.cuda.get_current_stream().synchronize()
        self._comm.all_gather(room.data.ptr, room.data.ptr + self.tp, 1, self._raw_stream)
        self._comm.all_to_all(room.data.ptr, room.data.ptr + self.tp, 1, range(self.tp), self._raw_stream)
        self.stream.synchronize()
        self._comm.check()

    def kernels(self, bucket: int):
        with self._building():
            return super().kernels(bucket)

    def launches(self, what: str, bucket: int, overlap: bool = True, follows: bool = False):
        """As CudaBackend, with NCCL or an exchange in the place of collectives. Nothing begins under a launch before it, which may be NCCL's."""
        out = super().launches(what, bucket, overlap=False, follows=follows)
        return [(op, self._moves(op, self.memories[0], bucket) if op.stage.moves else group) for op, group in out]

    def _moves(self, op: Op, memory: RankMemory, rows: int) -> list:
        """What takes the place of a collective on the memory of the target or of its draft, in a step of up to `rows` rows."""
        places, arena, at = [], memory.arena.data.ptr, memory.offsets
        for m in op.stage.moves:
            layout = layout_of(m, memory.plan, memory.tables, rows)
            source, target = arena + at[m.source] + op.kind_index * layout.source_layer, arena + at[m.target] + op.kind_index * layout.target_layer
            places.append((layout, source, target))
        if self._exchange:
            return [self._exchange.launch(str(op), [rank_move(*place) for place in places])]
        return [NcclMove(layout, self._comm, source, target, self._room(layout), self._raw_stream, self._kernel) for layout, source, target in places]

    def _room(self, layout: MoveLayout) -> int:
        """Staging by size: moves follow one another in the stream, so those of one size share theirs."""
        size = NcclMove.staging_bytes(layout)
        if size not in self._staging:
            self._staging[size] = cupy.empty(size, cupy.uint8)
        return self._staging[size].data.ptr

    def _kernel(self, name: str, arguments: list, vectors: int) -> Launch:
        if self._movers is None:
            self._movers = Module(compile_cuda('#include "peer_exchange.cuh"\n', self.device.arch, name="moves between ranks").cubin)
        launch = Launch(self._movers.function(name), blocks_for(vectors, self.device.sms), THREADS, arguments, stream=self._raw_stream)
        launch.kernel = name
        return launch

    # What is read has come through exchanges, if they have not failed.

    def logits(self):
        return self._sound(super().logits())

    def sample(self, draws):
        return self._sound(super().sample(draws))

    def propose(self, asks):
        return self._sound(super().propose(asks))

    def accept(self, judges):
        return self._sound(super().accept(judges))

    def _sound(self, read):
        if self._exchange:
            self._exchange.check()
        return read

    def buffer(self, name: str, rank: int = 0):
        if rank != self._comm.rank and rank in range(self.tp):
            raise UsageError(f"buffer {name}: rank {rank} is another process", f"ask for rank {self._comm.rank}")
        return super().buffer(name, 0 if rank == self._comm.rank else rank)

    def close(self) -> None:
        super().close()
        if self._exchange:
            self._exchange.close()
            self._exchange = None
        self._staging.clear()
        if self._movers is not None:
            self._movers.close()
            self._movers = None
        self._comm.abort()   # the others may be gone already, and a gentle end would wait for them
