"""What carries the collectives of one rank of several processes, in the order of its stream: NCCL, or the exchange inside a kernel.

NCCL moves contiguous bytes, so what is cut by columns is packed before and spread behind it by kernels. The exchange is one kernel for all moves of
a collective, and needs peers whose memory can be mapped. Either can be captured in a graph, and both bring the same bytes.
"""
import ctypes
from typing import Callable

import cupy
import numpy as np

from ..emit import MoveLayout
from .collectives import members
from .cuda_driver import Device, Launch, Module
from .cuda_kernels import compile_moves
from .cuda_peers import peers_of
from .machine import NCCL, PEER
from .nccl import Communicator
from .peer_exchange import STATE_WORDS, TROUBLE_WORDS, PeerExchange, memory_bytes
from .peer_memory import Peers, map_peers
from .rank_moves import PACK, SPREAD, THREADS, VECTOR, blocks_for, part_bytes, rank_move


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


class Carrier:
    """By NCCL, until `use_peers`.

    Args:
        comm: of all ranks; not closed with it. device: this rank's GPU, which is current. stream: that all of it runs on.

    Attributes:
        name: NCCL or PEER.
    """

    name = NCCL

    def __init__(self, comm: Communicator, device: Device, stream):
        self._comm, self._device, self._stream, self._raw_stream = comm, device, stream, stream.__cuda_stream__()[1]
        self._staging, self._exchange, self._shared, self._fabric = {}, None, [], False
        self._module = Module(compile_moves(device.arch).cubin)

    def warm_up(self) -> None:
        """NCCL sets connections up when they are first used, which must not be while a graph is captured."""
        size = self._comm.size
        room = cupy.zeros(2 * size, cupy.uint8)
        cupy.cuda.get_current_stream().synchronize()
        self._comm.all_gather(room.data.ptr, room.data.ptr + size, 1, self._raw_stream)
        self._comm.all_to_all(room.data.ptr, room.data.ptr + size, 1, range(size), self._raw_stream)
        self._stream.synchronize()
        self._comm.check()

    def meet(self) -> None:
        """All ranks at the same time: behind it none is ahead of another. NCCL waits for them without a limit."""
        self._gather_bytes(b"\1")

    def use_peers(self, capacity: dict[int, int], fabric: bool = False) -> str:
        """All ranks at the same time: from here on collectives are exchanges, of `capacity` (peer_exchange.capacities). Else why not: NCCL goes on.

        `fabric`: handles that reach other hosts also where all ranks are on one.
        """
        self._fabric = fabric
        peers = self._map(memory_bytes(capacity))
        if not peers.reason:
            self._state = cupy.zeros(STATE_WORDS * len(capacity), cupy.uint32)
            cupy.cuda.get_current_stream().synchronize()
            self._trouble = np.frombuffer(cupy.cuda.alloc_pinned_memory(4 * TROUBLE_WORDS), np.uint32, TROUBLE_WORDS)
            self._trouble[:] = 0
            self._exchange, self.name = PeerExchange(self._comm.rank, peers, capacity, self._state.data.ptr, self._trouble, self._kernel), PEER
        return peers.reason

    def share(self, nbytes: int) -> Peers:
        """All ranks at the same time, where collectives are exchanges: at least so much memory of each, mapped on all, until `close`. That of the last call
        where it is large enough."""
        if not self._shared or self._shared[-1][0] < nbytes:
            self._shared.append((nbytes, self._map(nbytes)))
        return self._shared[-1][1]

    def gather(self, mine: bytes) -> list[bytes]:
        """What all ranks give at the same time, as long on each, in order of rank."""
        return self._gather_bytes(mine)

    def _map(self, nbytes: int) -> Peers:
        return map_peers(self._comm.rank, nbytes, lambda one_host: peers_of(self._device, one_host and not self._fabric), self._gather_bytes)

    def launches(self, name: str, places: list[tuple[MoveLayout, int, int]], overlap: bool = False) -> list:
        """What is launched for one collective, which messages call `name`: of each of its moves the layout, and addresses of source and target.

        `overlap`: an exchange may begin under the launch before it; what NCCL launches never may.
        """
        if self._exchange:
            return [self._exchange.launch(name, [rank_move(*place) for place in places], dependent=overlap)]
        return [NcclMove(layout, self._comm, source, target, self._room(layout), self._raw_stream, self._kernel) for layout, source, target in places]

    def check(self) -> None:
        """Behind what is read, which has come this way. Raises ExchangeTimeout."""
        if self._exchange:
            self._exchange.check()

    def close(self) -> None:
        """Behind the last launch."""
        if self._exchange:
            self._exchange.close()
        for _, peers in self._shared:
            peers.close()
        self._exchange, self._shared = None, []
        self._staging.clear()
        self._module.close()

    def _room(self, layout: MoveLayout) -> int:
        """Staging by size: moves follow one another in the stream, so those of one size share theirs."""
        size = NcclMove.staging_bytes(layout)
        if size not in self._staging:
            self._staging[size] = cupy.empty(size, cupy.uint8)
        return self._staging[size].data.ptr

    def _kernel(self, name: str, arguments: list, vectors: int, dependent: bool = False) -> Launch:
        launch = Launch(self._module.function(name), blocks_for(vectors, self._device.sms), THREADS, arguments, stream=self._raw_stream, dependent=dependent)
        launch.kernel = name
        return launch

    def _gather_bytes(self, mine: bytes) -> list[bytes]:
        """Of all ranks, as long as they."""
        own, all_of_them = cupy.asarray(np.frombuffer(mine, np.uint8)), cupy.empty((self._comm.size, len(mine)), cupy.uint8)
        cupy.cuda.get_current_stream().synchronize()
        self._comm.all_gather(own.data.ptr, all_of_them.data.ptr, len(mine), self._raw_stream)
        return [row.tobytes() for row in all_of_them.get(stream=self._stream)]
