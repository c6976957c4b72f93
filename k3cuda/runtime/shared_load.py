"""One reading of a checkpoint for several processes of a host: one of them reads, every rank gets its slices through shared memory.

The memory of a unit is anonymous (memfd) and handed over as a descriptor: it has no name that could be left behind, and is gone with the
last process that has it, however that one ends. Both sides know from the load plan whose slices lie where in it.
"""
import contextlib
import hashlib
import json
import mmap
import os
import socket
import struct
import time
import weakref
from typing import Iterator

import numpy as np

from ..errors import RankDied
from ..weights import model_bytes
from . import wire
from .checkpoint import Checkpoint
from .load_plan import Unit, whole_layers
from .loading import Loading
from .slices import HostSlices, slices_bytes

MEET_S = 60.0   # that a process of the host may come later than another
_RETRY_S = 0.02
_MESSAGE = 1 << 16
_TAKEN = b"taken"
_CREDENTIALS = struct.Struct("3i")   # pid, uid, gid


class PeerLost(RankDied, wire.LinkLost):
    """A process of this host ended in the middle of a load. What ended it may still be told by the job."""


class SharedSlices(HostSlices):
    """Slices of one unit in memory that other processes can have too, by its `fd`, which closes with this object.

    Args:
        fd: of memory that another process made; None: it is made here.
    """

    def __init__(self, unit: Unit, dims: dict[str, int], tp: int, ranks: range, fd: int | None = None):
        size, is_mine = slices_bytes(unit, dims, tp, ranks), fd is None
        self.fd = os.memfd_create("k3cuda-load", os.MFD_CLOEXEC) if is_mine else fd
        weakref.finalize(self, os.close, self.fd)
        if is_mine:
            os.ftruncate(self.fd, size)
        memory = mmap.mmap(self.fd, size, prot=mmap.PROT_READ | (mmap.PROT_WRITE if is_mine else 0))
        super().__init__(unit, dims, tp, ranks, np.frombuffer(memory, np.uint8))


class SharedLoading(Loading):
    """A `Loading` of one rank beside other processes of its host, of which the first rank's reads for all.

    Args:
        rank: this process's. ranks: those of this host, neighbours.
        secret: the same for all of them and nobody else: where they meet follows from it.
    """

    reads_itself = False

    def __init__(self, mode: str, show: bool | None, rank: int, ranks: range, secret: bytes):
        super().__init__(mode, show)
        self._rank, self._all = rank, ranks
        self._address = f"\0k3cuda-{hashlib.sha256(b'shared load ' + secret).hexdigest()[:32]}"   # abstract: no file

    def slices(self, source, tp: int, ranks: range, units=None, **options) -> Iterator[tuple[Unit, dict[str, np.ndarray]]]:
        """As `Loading.slices`, of this rank. What is not a checkpoint (made in memory, or repacked: a file a rank) each process reads itself.

        Raises:
            RankDied: another process of the host ended. What made the one that reads fail is raised in all of them.
        """
        if not isinstance(source, Checkpoint):
            yield from super().slices(source, tp, ranks, units, **options)
            return
        assert ranks == range(self._rank, self._rank + 1), ranks
        units = list(whole_layers(source.cfg) if units is None else units)
        yield from (self._read if self._rank == self._all.start else self._receive)(source, tp, units)

    # ---- the process that reads ----

    def _read(self, source: Checkpoint, tp: int, units: list[Unit]):
        dims = source.cfg.dims()
        with self._peers() as peers:
            try:
                for unit, target in self.run(source, tp, self._all, units, lambda unit: SharedSlices(unit, dims, tp, self._all)):
                    arrays = source.slices_of(unit, target, self._all)
                    for rank, sock in peers.items():
                        self._tell(rank, sock, json.dumps({"layer": unit.layer}).encode(), [target.fd])
                    yield unit, _own(arrays, 0)
                    for rank, sock in peers.items():   # a slow one holds up all: what is read ahead stays bounded
                        if _heard(sock)[0] != _TAKEN:
                            raise self._lost(rank)
                for rank, sock in peers.items():
                    self._tell(rank, sock, json.dumps({"end": True}).encode())
            except BaseException as e:
                told = wire.told(self._lost(self._rank) if isinstance(e, GeneratorExit) else e)
                for rank, sock in peers.items():
                    with contextlib.suppress(RankDied):
                        self._tell(rank, sock, json.dumps({"error": told}).encode())
                raise

    @contextlib.contextmanager
    def _peers(self):
        """Connections of all other ranks."""
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            server.bind(self._address)
            server.listen(len(self._all))
            server.settimeout(MEET_S)
            peers = {}
            while missing := set(self._all[1:]) - peers.keys():
                try:
                    sock, _ = server.accept()
                except TimeoutError as e:
                    raise RankDied(f"rank {min(missing)} did not come to the rank of its host that reads within {MEET_S:g} s") from e
                stack.enter_context(sock)
                sock.settimeout(MEET_S)
                _, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
                said, _ = _heard(sock)
                sock.settimeout(None)   # a rank may take its time with a unit; one that ends is told by the kernel
                if uid == os.getuid() and said.isdigit() and int(said) in missing:
                    peers[int(said)] = sock
            yield peers

    def _tell(self, rank: int, sock: socket.socket, message: bytes, fds=()) -> None:
        try:
            socket.send_fds(sock, [message], fds)
        except OSError as e:
            raise self._lost(rank) from e

    def _lost(self, rank: int) -> PeerLost:
        return PeerLost(f"rank {rank} ended while the weights were loaded", "its own output may say why")

    # ---- the others ----

    def _receive(self, source: Checkpoint, tp: int, units: list[Unit]):
        start, dims, reader = time.perf_counter(), source.cfg.dims(), self._all.start
        self.why = f"rank {reader} reads for all of this host"
        with self._call(reader) as sock:
            for unit in units:
                said, fds = self._said(sock)
                arrays = SharedSlices(unit, dims, tp, self._all, fds[0]).arrays
                assert said["layer"] == unit.layer, (said, unit.layer)
                own = _own(arrays, self._rank - self._all.start)
                del arrays
                yield unit, own
                with contextlib.suppress(RankDied):   # what it says next tells why
                    self._tell(reader, sock, _TAKEN)
            self._said(sock)
        self.wall_s += time.perf_counter() - start
        self.kept_bytes += model_bytes(source.cfg, tp)

    def _said(self, sock: socket.socket) -> tuple[dict, list[int]]:
        """What the process that reads says next, and descriptors that come along. Raises its error."""
        message, fds = _heard(sock)
        if not message:
            raise self._lost(self._all.start)
        said = json.loads(message)
        if "error" in said:
            raise wire.raised(said["error"])
        return said, fds

    def _call(self, reader: int) -> socket.socket:
        end = time.monotonic() + MEET_S
        while True:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                sock.connect(self._address)
                sock.send(str(self._rank).encode())
                return sock
            except OSError as e:
                sock.close()
                if time.monotonic() > end:
                    raise RankDied(f"rank {reader}, which reads for this host, was not there within {MEET_S:g} s") from e
                time.sleep(_RETRY_S)


def _own(arrays: dict[str, np.ndarray], index: int) -> dict[str, np.ndarray]:
    """One rank's part, in memory of its own: the shared one is given back."""
    return {name: array[index:index + 1].copy() for name, array in arrays.items()}


def _heard(sock: socket.socket) -> tuple[bytes, list[int]]:
    """The next message, b"" where the other side has ended, and the descriptors in it."""
    for _ in range(2):   # an end that left something unread is told once as an error, before the last words
        try:
            message, fds, _, _ = socket.recv_fds(sock, _MESSAGE, 1)
            return message, fds
        except OSError:
            continue
    return b"", []
