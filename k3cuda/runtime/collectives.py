"""How the parts of a collective get from rank to rank. Whoever carries them moves bytes and adds nothing: the sums are stages of ours."""
import socket
from typing import Callable, Protocol

import numpy as np

from . import wire


class Collectives(Protocol):
    """Between the ranks of each group of `group` neighbours, which may be all of them.

    Attributes:
        name: how ranks are joined, as reports say it.
        tp: ranks in all. ranks: those that this process runs.
    """

    name: str
    tp: int
    ranks: range

    def gather(self, sources: list[np.ndarray], group: int) -> list[list[np.ndarray]]:
        """`sources`: of each rank here an array of one shape. For each rank here the arrays of all ranks of its group, in order."""

    def scatter(self, sources: list[np.ndarray], group: int) -> list[list[np.ndarray]]:
        """For each rank here its own of `group` equal slices along the last axis, of every array of its group, in order."""


class VirtualRanks:
    """All ranks in this process: nothing has to move."""

    name = "virtual"

    def __init__(self, tp: int):
        self.tp, self.ranks = tp, range(tp)

    def gather(self, sources, group):
        return [[sources[m] for m in members(r, group)] for r in self.ranks]

    def scatter(self, sources, group):
        return [[_slice(sources[m], r % group, group) for m in members(r, group)] for r in self.ranks]


class TcpRanks:
    """One rank a process, over the connections of the rendezvous, by way of rank 0. For tests: a step of `tiny-random` is mostly waiting then.

    Args:
        data: connections by rank: on rank 0 of every other one, elsewhere that of rank 0.
        alive: called where a collective begins and where it ends, so that a rank that hangs shows.
    Raises, in its methods:
        LinkLost: a rank is gone.
    """

    name = "processes"

    def __init__(self, rank: int, tp: int, data: dict[int, socket.socket], alive: Callable[[], None] = lambda: None):
        self.tp, self.ranks, self._data, self._alive = tp, range(rank, rank + 1), data, alive

    def gather(self, sources, group):
        part = np.ascontiguousarray(sources[0])
        mine = np.empty((group, *part.shape), part.dtype)
        self._alive()
        if self.ranks[0] == 0:
            whole = np.empty((self.tp, *part.shape), part.dtype)
            self._collect(whole, part)
            for rank, sock in self._data.items():
                _send(sock, whole[_slice_of(members(rank, group))])
            mine[...] = whole[:group]
        else:
            _send(self._data[0], part)
            wire.receive_into(self._data[0], _bytes(mine))
        self._alive()
        return [list(mine)]

    def scatter(self, sources, group):
        slices = np.stack([_slice(sources[0], place, group) for place in range(group)])
        mine = np.empty_like(slices)
        self._alive()
        if self.ranks[0] == 0:
            everyones = np.empty((self.tp, *slices.shape), slices.dtype)   # [sender, receiver's place, ..]
            self._collect(everyones, slices)
            for rank, sock in self._data.items():
                _send(sock, np.ascontiguousarray(everyones[_slice_of(members(rank, group)), rank % group]))
            mine[...] = everyones[:group, 0]
        else:
            _send(self._data[0], slices)
            wire.receive_into(self._data[0], _bytes(mine))
        self._alive()
        return [list(mine)]

    def _collect(self, whole: np.ndarray, own: np.ndarray) -> None:
        whole[0] = own
        for rank, sock in self._data.items():
            wire.receive_into(sock, _bytes(whole[rank]))


def members(rank: int, group: int) -> range:
    """Ranks of the group of a rank."""
    first = rank // group * group
    return range(first, first + group)


def _slice_of(ranks: range) -> slice:
    return slice(ranks.start, ranks.stop)


def _slice(array: np.ndarray, place: int, group: int) -> np.ndarray:
    size = array.shape[-1] // group
    return array[..., place * size:(place + 1) * size]


def _bytes(array: np.ndarray) -> memoryview:
    return memoryview(array).cast("B") if array.size else memoryview(b"")


def _send(sock: socket.socket, array: np.ndarray) -> None:
    try:
        sock.sendall(_bytes(array))
    except OSError as e:
        raise wire.LinkLost(str(e)) from e
