"""CUDA's handles to memory of other processes: peer_memory.PeerDevice on the GPU that is current."""
from cupy.cuda import runtime

from ..errors import DeviceError
from .cuda_driver import Device, check, driver
from .peer_memory import EMPTY_BYTE, HANDLE_BYTES, PeerDevice


def peers_of(device: Device, are_on_one_host: bool) -> PeerDevice:
    return HostPeers() if are_on_one_host else FabricPeers(device)


class HostPeers:
    """Of one host, by CUDA's interprocess handles. A handle names a whole allocation, so memory comes from CUDA itself and not from CuPy's pool."""

    def allocate(self, nbytes: int) -> int:
        address = _asked(runtime.malloc, nbytes)
        try:
            _asked(runtime.memset, address, EMPTY_BYTE, nbytes)
            _asked(runtime.deviceSynchronize)
        except DeviceError:
            runtime.free(address)
            raise
        return address

    def handle(self, address: int) -> bytes:
        return _asked(runtime.ipcGetMemHandle, address)

    def open(self, handle: bytes, nbytes: int) -> int:
        return _asked(runtime.ipcOpenMemHandle, handle)

    def close(self, address: int) -> None:
        _asked(runtime.ipcCloseMemHandle, address)

    def free(self, address: int) -> None:
        _asked(runtime.free, address)


class FabricPeers:
    """Of the hosts of one NVLink domain, by fabric handles. Raises DeviceError also where a host has no IMEX channel (/dev/nvidia-caps-imex-channels)."""

    def __init__(self, device: Device):
        cu = driver()
        self._kind = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
        p = self._properties = cu.CUmemAllocationProp()
        p.type, p.requestedHandleTypes = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED, self._kind
        p.location.type, p.location.id = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, device.index
        self._access = cu.CUmemAccessDesc()
        self._access.location, self._access.flags = p.location, cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._held: dict[int, tuple] = {}   # address -> what stands behind it, bytes

    def allocate(self, nbytes: int) -> int:
        cu, size = driver(), self._whole(nbytes)
        address = self._mapped(check(cu.cuMemCreate(size, self._properties, 0)), size)
        try:
            check(cu.cuMemsetD8(address, EMPTY_BYTE, size))
            check(cu.cuCtxSynchronize())
        except DeviceError:
            self.close(address)
            raise
        return address

    def handle(self, address: int) -> bytes:
        return bytes(check(driver().cuMemExportToShareableHandle(self._held[address][0], self._kind, 0)).data)[:HANDLE_BYTES]

    def open(self, handle: bytes, nbytes: int) -> int:
        cu = driver()
        theirs = cu.CUmemFabricHandle()
        theirs.data = handle
        return self._mapped(check(cu.cuMemImportFromShareableHandle(theirs.getPtr(), self._kind)), self._whole(nbytes))

    def close(self, address: int) -> None:
        cu, (memory, size) = driver(), self._held.pop(address)
        check(cu.cuMemUnmap(address, size))
        check(cu.cuMemAddressFree(address, size))
        check(cu.cuMemRelease(memory))

    free = close

    def _whole(self, nbytes: int) -> int:
        cu = driver()
        unit = check(cu.cuMemGetAllocationGranularity(self._properties, cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED))
        return -(-nbytes // unit) * unit

    def _mapped(self, memory, size: int) -> int:
        """The address of `memory`, which is released where there is none."""
        cu, undo = driver(), [lambda: cu.cuMemRelease(memory)]
        try:
            address = int(check(cu.cuMemAddressReserve(size, 0, 0, 0)))
            undo.append(lambda: cu.cuMemAddressFree(address, size))
            check(cu.cuMemMap(address, size, 0, memory, 0))
            undo.append(lambda: cu.cuMemUnmap(address, size))
            check(cu.cuMemSetAccess(address, size, [self._access], 1))
        except DeviceError:
            for step in reversed(undo):
                step()
            raise
        self._held[address] = memory, size
        return address


def _asked(call, *arguments):
    try:
        return call(*arguments)
    except runtime.CUDARuntimeError as e:
        raise DeviceError(str(e)) from e
