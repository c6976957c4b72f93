"""The driver: a context, cubins loaded, kernels launched with everything prepared beforehand."""
import atexit
import contextlib
import ctypes
import functools
import os
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

from ..errors import DeviceError, K3Error
from .machine import architecture, gpu_problem, old_driver, probe_driver


@dataclass(frozen=True)
class Device:
    """One GPU with its primary context, which CuPy shares.

    Attributes:
        max_shared: bytes of dynamic shared memory a block may have at most.
    """

    index: int
    name: str
    arch: str
    sms: int
    max_shared: int


def driver():
    """`cuda.bindings.driver`, or a DeviceError that says what to install."""
    try:
        from cuda.bindings import driver as cu
    except ImportError as e:
        raise DeviceError("cuda-bindings isn't installed", "pip install 'k3cuda[cu13]'") from e
    return cu


_OUT_OF_MEMORY = 2   # the driver's number and the runtime's
_folders: list[str] = []   # made for CuPy, see _give_cupy_a_folder

# Each gives an error that says more of what failed on the GPU than the driver does, or None.
explanations: list[Callable[[], K3Error | None]] = []


def known_failure() -> K3Error | None:
    """What ended this process's work on the GPU, if one of `explanations` knows. Then the context is gone: no call will succeed any more, or may be made."""
    return next(filter(None, (ask() for ask in explanations)), None)


@contextlib.contextmanager
def explained():
    """Around calls of the GPU: none where the context is known to be gone, and whatever fails for that raises what is known in the place of its own words.

    Of what fails else, CuPy's errors of the GPU are a DeviceError, as those of `check` are.
    """
    if error := known_failure():
        raise error
    try:
        yield
    except Exception as failed:
        error = known_failure()
        if error is None and type(failed).__module__.startswith("cupy_backends.cuda.api.") and failed.status != _OUT_OF_MEMORY:
            error = DeviceError(str(failed), "start the process again; nvidia-smi says whether the GPU is still there")
        if error is None or isinstance(failed, type(error)):
            raise
        raise error from failed


def check(result):
    """The values of a driver call; if it failed, what one of `explanations` knows, or a DeviceError with the call's own words."""
    cu = driver()
    code, *values = result
    if code != cu.CUresult.CUDA_SUCCESS:
        if error := known_failure():
            raise error
        raise DeviceError(f"{code.name}: {cu.cuGetErrorString(code)[1].decode()}")
    return values[0] if len(values) == 1 else tuple(values)


def open_device(index: int = 0) -> Device:
    """Initialises GPU `index` of those visible and makes its primary context current in this thread.

    Raises DeviceError: no driver, driver too old for the installed CUDA packages, no such GPU, GPU too old; StepTimeout: this process's context is gone.
    """
    if error := known_failure():
        raise error
    device, context = _opened(index)
    check(driver().cuCtxSetCurrent(context))
    return device


@functools.cache
def _opened(index: int):
    """(the device, its primary context), asked for once a process: both answers take long."""
    found = probe_driver()
    if found.problem:
        raise DeviceError(found.problem)
    if not 0 <= index < len(found.gpus):
        raise DeviceError(f"GPU {index} doesn't exist: {len(found.gpus)} visible, counted from 0", "see CUDA_VISIBLE_DEVICES")
    gpu, cu = found.gpus[index], driver()
    if problem := gpu_problem(gpu):
        raise DeviceError(problem, "use --decode-backend reference")
    if problem := old_driver(found, _bindings_line()):
        raise DeviceError(*problem)
    try:
        check(cu.cuInit(0))
    except RuntimeError as e:   # the bindings didn't find libcuda, though it is there
        raise DeviceError(f"the driver can't be loaded ({e})") from e
    device = check(cu.cuDeviceGet(index))
    context = check(cu.cuDevicePrimaryCtxRetain(device))
    kinds = cu.CUdevice_attribute
    sms, shared = (check(cu.cuDeviceGetAttribute(kind, device)) for kind in (
        kinds.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, kinds.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN))
    return Device(index, gpu.name, architecture(gpu.compute_capability), sms, shared), context


def require_gpu(index: int = 0) -> Device:
    """`open_device`, and CuPy beside it: what every module that imports CuPy at its top needs first. Raises DeviceError."""
    with contextlib.suppress(DeviceError):
        driver()   # here, so that two threads do not import the same
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(_opened, index)   # most of its time is the driver's, outside Python's lock
        try:
            _give_cupy_a_folder()
            import cupy
            problem = None
        except (ImportError, OSError) as e:
            problem = e
        opening.result()
    if problem is not None:
        raise DeviceError(f"CuPy isn't installed or can't be loaded ({problem})", f"pip install 'k3cuda[cu{_bindings_line()}]'") from problem
    device = open_device(index)
    cupy.cuda.Device(index).use()   # the runtime that CuPy calls has a device of its own that is current
    return device


def _give_cupy_a_folder() -> None:
    """CuPy makes its cache folder when it is imported, and fails where it cannot: without a home it gets one for this process alone."""
    if "CUPY_CACHE_DIR" in os.environ:
        return
    try:
        folder = Path.home() / ".cupy" / "kernel_cache"   # CuPy's own choice
        folder.mkdir(parents=True, exist_ok=True)
        is_ours = os.access(folder, os.W_OK | os.X_OK)
    except (OSError, RuntimeError):   # RuntimeError: no HOME and no entry in the user database
        is_ours = False
    if not is_ours:
        folder = tempfile.mkdtemp(prefix="k3cuda-")
        _folders.append(folder)
        os.environ["CUPY_CACHE_DIR"] = folder


@atexit.register
def remove_folders() -> None:
    """Removes what CuPy has for this process alone."""
    while _folders:
        shutil.rmtree(_folders.pop(), ignore_errors=True)


def _bindings_line() -> int:
    import cuda.bindings
    return int(cuda.bindings.__version__.split(".")[0])


class Module:
    """A loaded cubin. Kernels are looked up by their extern "C" name."""

    def __init__(self, cubin: bytes):
        cu = driver()
        self._library = check(cu.cuLibraryLoadData(cubin, [], [], 0, [], [], 0))

    def function(self, name: str, shared: int = 0):
        """The kernel, allowed `shared` bytes of dynamic shared memory a block."""
        cu = driver()
        function = check(cu.cuKernelGetFunction(check(cu.cuLibraryGetKernel(self._library, name.encode()))))
        if shared:
            check(cu.cuFuncSetAttribute(function, cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared))
        return function

    def constants(self, name: str, count: int) -> tuple[int, ...]:
        """`count` 32-bit integers of the extern "C" __constant__ `name`."""
        cu = driver()
        pointer, _ = check(cu.cuLibraryGetGlobal(self._library, name.encode()))
        values = (ctypes.c_int32 * count)()
        check(cu.cuMemcpyDtoH(ctypes.addressof(values), pointer, 4 * count))
        return tuple(values)

    def close(self) -> None:
        if self._library is not None:
            check(driver().cuLibraryUnload(self._library))
            self._library = None


class Launch:
    """A kernel with its configuration and arguments built once: `launch()` allocates nothing in Python.

    Args:
        function: from `Module.function`.
        grid, block: blocks and threads, an int or up to three.
        arguments: ctypes values or structures, kept alive here; change them in place between launches.
        shared: bytes of dynamic shared memory.
        dependent: the launch may begin while the kernel before it still runs (programmatic dependent launch).
        cluster: blocks of a cluster along x.
        cooperative: all blocks resident at once.
        stream: raw handle.
    """

    def __init__(self, function, grid, block, arguments, *, shared: int = 0, stream: int = 0, dependent: bool = False, cluster: int = 1,
                 cooperative: bool = False):
        cu = driver()
        c = self.config = cu.CUlaunchConfig()
        c.gridDimX, c.gridDimY, c.gridDimZ = _three(grid)
        c.blockDimX, c.blockDimY, c.blockDimZ = _three(block)
        c.sharedMemBytes, c.hStream = shared, stream
        kinds = cu.CUlaunchAttributeID
        attributes = []
        if cooperative:
            attributes.append(_attribute(kinds.CU_LAUNCH_ATTRIBUTE_COOPERATIVE, "cooperative", 1))
        if dependent:
            attributes.append(_attribute(kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
                                         "programmaticStreamSerializationAllowed", 1))
        if cluster > 1:
            attributes.append(_attribute(kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, "clusterDim", (cluster, 1, 1)))
        c.attrs, c.numAttrs = attributes, len(attributes)
        self.function, self.arguments = function, list(arguments)
        self._pointers = (ctypes.c_void_p * len(self.arguments))(*(ctypes.addressof(a) for a in self.arguments))
        self._address = ctypes.addressof(self._pointers)
        self._launch = cu.cuLaunchKernelEx

    def launch(self) -> None:
        (code,) = self._launch(self.config, self.function, self._address, 0)
        if code:
            check((code,))


def _three(n) -> tuple[int, int, int]:
    return (n, 1, 1) if isinstance(n, int) else (*n, 1, 1)[:3]


def _attribute(kind, field: str, value):
    a = driver().CUlaunchAttribute()
    a.id = kind
    v = a.value
    if field == "clusterDim":
        v.clusterDim.x, v.clusterDim.y, v.clusterDim.z = value
    else:
        setattr(v, field, value)
    a.value = v
    return a
