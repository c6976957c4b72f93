"""The GPU side of loading: staging memory, pinned buffers, copies on a stream a thread, and the kernels of repack.cuh."""
import contextlib
import ctypes
import logging
import threading

import cupy
import numpy as np

from ..errors import OutOfMemory
from .cuda_driver import Device, Launch, Module
from .cuda_jit import compile_cuda
from .loader import page_buffer
from .repack import NIBBLE_TABLES
from .repack_calls import MXFP4, Call

log = logging.getLogger("k3cuda")

_ALREADY_REGISTERED = 712   # cudaErrorHostMemoryAlreadyRegistered
_BLOCKS, _THREADS = 1056, 256   # eight blocks a multiprocessor


class CudaLoadDevice:
    """device_load.Device on one GPU. A context manager: what only loading needs is given back at its end.

    Args:
        device: from cuda_driver.open_device.
        bounce_bytes: gathered columns of one block.
    """

    def __init__(self, device: Device, bounce_bytes: int):
        self._device, self._bounce_bytes, self._local = device, bounce_bytes, threading.local()
        self._pool = cupy.cuda.MemoryPool()
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._module = Module(compile_cuda('#include "repack.cuh"\n', device.arch, name="repack").cubin)
        self._tables, self._worst = cupy.asarray(NIBBLE_TABLES), cupy.zeros(1, cupy.uint32)
        self._launches: list[Launch] = []   # alive until they have run
        self._locked: list[np.ndarray] = []   # page-locked, all of them until the end: an address that the driver still knew could come back as other memory
        self._avoided: list[np.ndarray] = []
        cupy.cuda.runtime.deviceSynchronize()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        cupy.cuda.runtime.deviceSynchronize()
        self._launches.clear()
        while self._locked:
            cupy.cuda.runtime.hostUnregister(_address(self._locked.pop()))
        self._pool.free_all_blocks()
        self._module.close()

    # ---- memory ----

    def free_bytes(self) -> int:
        return cupy.cuda.runtime.memGetInfo()[0]

    def array(self, nbytes: int) -> cupy.ndarray:
        with _told(nbytes):
            return cupy.empty(nbytes, cupy.uint8)

    def staging(self, nbytes: int) -> "_Staging":
        self._mine()
        with _told(nbytes):
            return _Staging(self._pool.malloc(nbytes))

    def buffer(self, nbytes: int) -> np.ndarray:
        """Ordinary pages that are registered, which direct reads can fill. They are locked until the loader is closed."""
        buffer, runtime = page_buffer(nbytes), cupy.cuda.runtime
        try:
            runtime.hostRegister(_address(buffer), nbytes, 0)
            self._locked.append(buffer)
        except runtime.CUDARuntimeError as e:
            if e.status == _ALREADY_REGISTERED:   # the driver still has other pages for this address, and would copy those
                log.warning("the driver still knows freed memory at %#x as page-locked: that address is left alone", _address(buffer))
                self._avoided.append(buffer)
                return self.buffer(nbytes)
            log.warning("a buffer of %d MB can't be page-locked (%s): copies to the GPU are slower; see ulimit -l", nbytes >> 20, e)
        return buffer

    def bounce(self, nbytes: int) -> np.ndarray:
        mine = self._mine()
        if mine.buffer is None:
            mine.buffer = self.buffer(self._bounce_bytes)
        mine.used += nbytes
        return mine.buffer[mine.used - nbytes:mine.used]

    # ---- copies and kernels ----

    def copy(self, address: int, view: np.ndarray) -> None:
        runtime = cupy.cuda.runtime
        runtime.memcpyAsync(address, view.__array_interface__["data"][0], view.nbytes, runtime.memcpyHostToDevice, self._mine().stream.ptr)

    def flush(self) -> None:
        mine = self._mine()
        mine.stream.synchronize()
        mine.used = 0

    def clear(self, address: int, nbytes: int) -> None:
        cupy.cuda.runtime.memsetAsync(address, 0, nbytes, self._stream.ptr)

    def upload(self, out: cupy.ndarray, values: np.ndarray) -> None:
        out.set(values)

    def copy_within(self, out: cupy.ndarray, address: int) -> None:
        runtime = cupy.cuda.runtime
        runtime.memcpyAsync(out.data.ptr, address, out.nbytes, runtime.memcpyDeviceToDevice, self._stream.ptr)

    def launch(self, call: Call, source: int, scales: int, out: cupy.ndarray, offset: int) -> None:
        pointers, ints, longs = [source], [ctypes.c_int(n) for n in call.ints], [ctypes.c_uint64(n) for n in call.longs]
        pointers += [scales, out.data.ptr + offset, self._tables.data.ptr, self._worst.data.ptr] if call.kernel == MXFP4 else [out.data.ptr + offset]
        arguments = [*map(ctypes.c_void_p, pointers), *ints[:4], *longs, *ints[4:]]
        launch = Launch(self._module.function(call.kernel), _BLOCKS, _THREADS, arguments, stream=self._stream.__cuda_stream__()[1])
        launch.launch()
        self._launches.append(launch)

    def finish(self) -> int:
        self._stream.synchronize()
        self._launches.clear()
        return int(self._worst.get()[0])

    def _mine(self):
        """The calling thread's stream and bounce buffer."""
        local = self._local
        if not hasattr(local, "stream"):
            cupy.cuda.Device(self._device.index).use()
            local.stream, local.buffer, local.used = cupy.cuda.Stream(non_blocking=True), None, 0
        return local


class _Staging:
    def __init__(self, memory):
        self._memory, self.address = memory, memory.ptr


@contextlib.contextmanager
def _told(nbytes: int):
    try:
        yield
    except cupy.cuda.memory.OutOfMemoryError as e:
        raise OutOfMemory(f"{nbytes / 1e9:.2f} GB of GPU memory could not be had while weights were loaded", "free memory on the GPU, or cut the model over more") from e


def _address(buffer: np.ndarray) -> int:
    return buffer.__array_interface__["data"][0]
