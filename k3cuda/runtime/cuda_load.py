"""The GPU side of loading: staging memory, pinned buffers, copies on a stream a thread, and the kernels of repack.cuh."""
import contextlib
import ctypes
import logging
import threading
import weakref

import cupy
import numpy as np

from ..errors import OutOfMemory
from .cuda_driver import Device, Launch, Module
from .cuda_jit import compile_cuda
from .loader import page_buffer
from .repack import NIBBLE_TABLES
from .repack_calls import MXFP4, Call

log = logging.getLogger("k3cuda")

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
        cupy.cuda.runtime.deviceSynchronize()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        cupy.cuda.runtime.deviceSynchronize()
        self._launches.clear()
        self._pool.free_all_blocks()
        self._module.close()

    # ---- memory ----

    def free_bytes(self) -> int:
        return cupy.cuda.runtime.memGetInfo()[0]

    def array(self, nbytes: int) -> cupy.ndarray:
        with _told(nbytes):
            return cupy.empty(nbytes, cupy.uint8)

    def staged_bytes(self) -> int:
        """Staging memory in use."""
        return self._pool.used_bytes()

    def staging(self, nbytes: int) -> "_Staging":
        self._mine()
        with _told(nbytes):
            return _Staging(self._pool.malloc(nbytes))

    def buffer(self, nbytes: int) -> np.ndarray:
        return _pinned(nbytes)

    def bounce(self, nbytes: int) -> np.ndarray:
        mine = self._mine()
        if mine.buffer is None:
            mine.buffer = _pinned(self._bounce_bytes)
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


def _pinned(nbytes: int) -> np.ndarray:
    """Page-locked host memory, uint8 [nbytes], from a page on: ordinary pages that are registered, which direct reads can fill."""
    buffer, runtime = page_buffer(nbytes), cupy.cuda.runtime
    address = buffer.__array_interface__["data"][0]
    try:
        runtime.hostRegister(address, nbytes, 0)
    except runtime.CUDARuntimeError as e:   # copies work from any memory, only slower
        log.warning("a buffer of %d MB can't be page-locked (%s): copies to the GPU are slower; see ulimit -l", nbytes >> 20, e)
        return buffer
    weakref.finalize(buffer, _unregister, address)
    return buffer


def _unregister(address: int) -> None:
    with contextlib.suppress(cupy.cuda.runtime.CUDARuntimeError):
        cupy.cuda.runtime.hostUnregister(address)
