"""device_load.Device on the host: NumPy memory, and the device's own kernels under g++."""
import ctypes
import weakref

import numpy as np
from shim import host

from k3cuda.runtime.loader import page_buffer
from k3cuda.runtime.repack import NIBBLE_TABLES
from k3cuda.runtime.repack_calls import MXFP4


def build(folder):
    return host.build('#include "repack.cuh"\n', ["repack_bf16", "repack_mxfp4"], folder)


class HostDevice:
    """Counts what is alive, so that a test sees what a failed load left behind."""

    def __init__(self, library, free=1 << 40):
        self._library = library
        self._free, self._worst, self.copied, self.alive = free, np.zeros(1, np.uint32), 0, []

    def free_bytes(self):
        return self._free

    def array(self, nbytes):
        return self._kept(np.full(nbytes, 7, np.uint8))

    def staging(self, nbytes):
        return Staging(np.full(nbytes, 7, np.uint8))

    def buffer(self, nbytes):
        return page_buffer(nbytes)

    def bounce(self, nbytes):
        return np.empty(nbytes, np.uint8)

    def copy(self, address, view):
        self.copied += view.nbytes
        ctypes.memmove(address, view.ctypes.data, view.nbytes)

    def flush(self):
        pass

    def clear(self, address, nbytes):
        ctypes.memset(address, 0, nbytes)

    def upload(self, out, values):
        assert out.nbytes == values.nbytes
        out[:] = values

    def copy_within(self, out, address):
        ctypes.memmove(out.ctypes.data, address, out.nbytes)

    def launch(self, call, source, scales, out, offset):
        pointers = [source]
        pointers += [scales, out.ctypes.data + offset, NIBBLE_TABLES.ctypes.data, self._worst.ctypes.data] if call.kernel == MXFP4 else [out.ctypes.data + offset]
        ints, longs = [ctypes.c_int(n) for n in call.ints], [ctypes.c_uint64(n) for n in call.longs]
        host.launch(self._library, call.kernel, 4, 64, [*map(ctypes.c_void_p, pointers), *ints[:4], *longs, *ints[4:]])

    def finish(self):
        return int(self._worst[0])

    def _kept(self, array):
        self.alive.append(weakref.ref(array))
        return array

    @property
    def arrays_left(self):
        return sum(ref() is not None for ref in self.alive)


class Staging:
    def __init__(self, memory):
        self.memory, self.address = memory, memory.ctypes.data
