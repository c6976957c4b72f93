"""Memory of other processes' GPUs, mapped into this one: what the exchange inside a kernel stores into.

All ranks ask at the same time, and either all of them map all others or none does; then they know why.
"""
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Protocol

from ..errors import DeviceError

EMPTY_BYTE = 0xff   # what memory holds before: kEmpty of kernels_cu/peer_exchange.cuh is four of them
HANDLE_BYTES = 64   # of cudaIpcMemHandle_t and of CUmemFabricHandle
_HOST_BYTES, _REASON_BYTES = 64, 256


class PeerDevice(Protocol):
    """What maps memory: cuda_peers.py's on a GPU, a test's in host memory. Everything raises DeviceError."""

    def allocate(self, nbytes: int) -> int:
        """An address of `nbytes` that are EMPTY_BYTE, to which `handle` can be asked for; none where it raises."""

    def handle(self, address: int) -> bytes:
        """HANDLE_BYTES that another process opens."""

    def open(self, handle: bytes, nbytes: int) -> int:
        """The address here of another process's memory, of which it has allocated `nbytes`."""

    def close(self, address: int) -> None: ...

    def free(self, address: int) -> None: ...


@dataclass
class Peers:
    """`addresses`: of every rank's memory here, this one's own in its place. `reason`: why there are none, else ""."""

    addresses: list[int]
    reason: str
    _rank: int
    _device: PeerDevice | None

    def close(self) -> None:
        """This rank stores nothing any more. Its own memory stays until the process ends, since others may still have it mapped. May be called twice."""
        addresses, self.addresses = self.addresses, []
        for rank, address in enumerate(addresses):
            if rank != self._rank:
                self._device.close(address)


def map_peers(rank: int, nbytes: int, device_of: Callable[[bool], PeerDevice], gather: Callable[[bytes], list[bytes]], host: str | None = None) -> Peers:
    """Takes `nbytes` of memory on every rank, and maps all of it on each.

    Args:
        device_of: what maps it, given whether all ranks are on one host.
        gather: what every rank gives it, in order of rank; of one length on all of them.
        host: of this process; None: asked for.
    """
    hosts = gather(_padded(host or host_identity(), _HOST_BYTES))
    own, opened, reason = None, {}, ""
    try:
        device = device_of(len(set(hosts)) == 1)
        own = device.allocate(nbytes)
        handle = device.handle(own)
    except DeviceError as e:
        handle, reason = bytes(HANDLE_BYTES), f"rank {rank} cannot give its memory away: {e}"
    handles = gather(handle)
    for other, theirs in enumerate(handles):
        if other != rank and any(theirs) and not reason:   # a rank that has none says so itself
            try:
                opened[other] = device.open(theirs, nbytes)
            except DeviceError as e:
                reason = f"rank {rank} cannot map the memory of rank {other}: {e}"
    reasons = [_text(r) for r in gather(_padded(reason, _REASON_BYTES))]
    if not any(reasons):
        return Peers([opened.get(r, own) for r in range(len(handles))], "", rank, device)
    for address in opened.values():
        device.close(address)
    gather(b"\1")   # by now nobody has this rank's memory mapped
    if own is not None:
        device.free(own)
    return Peers([], next(filter(None, reasons)), rank, None)


def host_identity() -> str:
    """The same for all processes of a running machine, in whatever container, and for no others."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _padded(text: str, size: int) -> bytes:
    return text.encode()[:size].ljust(size, b"\0")


def _text(data: bytes) -> str:
    return data.rstrip(b"\0").decode(errors="replace")
