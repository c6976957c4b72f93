"""CUDA's handles to memory of another process on the same host: peer_memory.PeerDevice on the GPU that is current."""
from cupy.cuda import runtime

from ..errors import DeviceError


class CudaPeers:
    """A handle names a whole allocation, so memory comes from the driver itself and not from CuPy's pool."""

    def allocate(self, nbytes: int) -> int:
        address = _asked(runtime.malloc, nbytes)
        _asked(runtime.memset, address, 0xff, nbytes)
        _asked(runtime.deviceSynchronize)
        return address

    def handle(self, address: int) -> bytes:
        return _asked(runtime.ipcGetMemHandle, address)

    def open(self, handle: bytes) -> int:
        return _asked(runtime.ipcOpenMemHandle, handle)

    def close(self, address: int) -> None:
        _asked(runtime.ipcCloseMemHandle, address)

    def free(self, address: int) -> None:
        _asked(runtime.free, address)


def _asked(call, *arguments):
    try:
        return call(*arguments)
    except runtime.CUDARuntimeError as e:
        raise DeviceError(str(e)) from e
