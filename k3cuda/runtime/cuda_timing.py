"""How long the GPU takes for something, and how fast its memory reads at best: what every benchmark here measures with."""
import ctypes
import statistics

import cupy

from ..errors import DeviceError
from .cuda_driver import Launch, Module, check, driver
from .cuda_jit import compile_cuda

HOLD_MS = 2.0   # longer than a host takes to put a step's graph behind the first event
CEILING_BLOCKS, CEILING_THREADS = (264, 396, 528), 512
LEAST_CEILING = {"NVIDIA H200": 4.4e12}  # bytes a second; below it something else uses the memory and every ratio is flattered


class Timer:
    """A stream and two events on it.

    Args:
        arch: of the GPU whose context is current.
        stream: of CuPy; None: a new one.

    Attributes:
        raw: the stream's handle.
    """

    def __init__(self, arch: str, stream=None):
        self.stream = cupy.cuda.Stream(non_blocking=True) if stream is None else stream
        self.raw = self.stream.__cuda_stream__()[1]
        self._module = Module(compile_cuda('#include "ceiling.cuh"\n', arch, name="the read ceiling").cubin)
        cu = driver()
        self._events = [check(cu.cuEventCreate(0)) for _ in range(2)]
        khz = check(cu.cuDeviceGetAttribute(cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CLOCK_RATE, check(cu.cuCtxGetDevice())))
        self.cycles_a_us = khz / 1e3   # at the highest clock of a multiprocessor
        self._hold = Launch(self._module.function("spin"), 1, 1, [ctypes.c_longlong(int(HOLD_MS * khz))], stream=self.raw)

    def once(self, work) -> float:
        """Seconds that the GPU needs for what `work` puts on the stream; the host is not waited for."""
        cu = driver()
        self._hold.launch()
        check(cu.cuEventRecord(self._events[0], self.raw))
        work()
        check(cu.cuEventRecord(self._events[1], self.raw))
        check(cu.cuEventSynchronize(self._events[1]))
        return check(cu.cuEventElapsedTime(*self._events)) * 1e-3

    def median(self, work, repeats: int = 7, warm: int = 2) -> float:
        """The median of `repeats` times of `once`, behind `warm` more."""
        return statistics.median([self.once(work) for _ in range(warm + repeats)][warm:])

    def capture(self, launches):
        """A CUDA graph of the launches in order."""
        cupy.cuda.Device().synchronize()   # what their arguments were made with may run on another stream
        with self.stream:
            self.stream.begin_capture()
            for launch in launches:
                launch.launch()
            return self.stream.end_capture()

    def graph(self, launches, repeats: int = 7) -> float:
        """Seconds of a graph of all the launches together."""
        graph = self.capture(launches)
        return self.median(lambda: graph.launch(self.stream), repeats)

    def read_ceiling(self, pool, gpu: str = "") -> float:
        """Bytes a second of the best of several launch shapes that only read `pool`, random data of many times the L2 cache.

        Raises DeviceError where the GPU named `gpu` is known to read faster when it is free.
        """
        function, out, best = self._module.function("read_all"), cupy.zeros(4, cupy.uint32), 0.0
        cupy.cuda.Device().synchronize()
        for blocks in CEILING_BLOCKS:
            arguments = [ctypes.c_void_p(pool.data.ptr), ctypes.c_uint64(pool.nbytes // 16), ctypes.c_void_p(out.data.ptr)]
            launch = Launch(function, blocks, CEILING_THREADS, arguments, stream=self.raw)
            best = max(best, pool.nbytes / self.median(launch.launch))
        if best < LEAST_CEILING.get(gpu, 0):
            raise DeviceError(f"the memory reads at {best / 1e12:.2f} TB/s, wanted {LEAST_CEILING[gpu] / 1e12:.1f} on a free {gpu}",
                              "run it again while nothing else uses the GPU")
        return best
