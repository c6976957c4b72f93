"""NCCL by ctypes: it moves bytes between the GPUs of a job, and never adds.

The library comes with a wheel, and is loaded at its first use; making an id needs no GPU.
"""
import ctypes
import functools
import os

from ..errors import DeviceError

ID_BYTES = 128
_UINT8 = 1        # ncclUint8: whatever is moved is bytes
_SUCCESS, _IN_PROGRESS = 0, 7
# What lets NCCL take several ranks on one GPU: each says it is a machine of its own, and they talk by sockets. For tests: a collective of
# 16 ranks took 0.6 s so on an H200.
_SHARED_GPUS = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_CUMEM_ENABLE": "0", "NCCL_MAX_NCHANNELS": "1"}


class UniqueId(ctypes.Structure):
    """What all ranks of a communicator have in common. It holds an address of rank 0."""

    _fields_ = [("internal", ctypes.c_byte * ID_BYTES)]


_POINTER, _COUNT, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_SIGNATURES = {
    "ncclGetVersion": [ctypes.POINTER(_INT)], "ncclGetUniqueId": [ctypes.POINTER(UniqueId)],
    "ncclCommInitRank": [ctypes.POINTER(_POINTER), _INT, UniqueId, _INT], "ncclCommDestroy": [_POINTER], "ncclCommAbort": [_POINTER],
    "ncclCommGetAsyncError": [_POINTER, ctypes.POINTER(_INT)],
    "ncclAllGather": [_POINTER, _POINTER, _COUNT, _INT, _POINTER, _POINTER],
    "ncclSend": [_POINTER, _COUNT, _INT, _INT, _POINTER, _POINTER], "ncclRecv": [_POINTER, _COUNT, _INT, _INT, _POINTER, _POINTER],
    "ncclGroupStart": [], "ncclGroupEnd": [],
}


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded library. Raises DeviceError where there is none, or one without what we call."""
    try:
        from cuda import pathfinder

        lib = ctypes.CDLL(pathfinder.load_nvidia_dynamic_lib("nccl").abs_path)
        for name, arguments in _SIGNATURES.items():
            getattr(lib, name).argtypes = arguments
    except (ImportError, RuntimeError, OSError, AttributeError) as e:   # pathfinder's DynamicLibNotFoundError is a RuntimeError
        raise DeviceError(f"NCCL cannot be used: {e}", "pip install 'k3cuda[cu13]' or 'k3cuda[cu12]', which bring it") from e
    lib.ncclGetErrorString.restype = lib.ncclGetLastError.restype = ctypes.c_char_p
    lib.ncclGetErrorString.argtypes, lib.ncclGetLastError.argtypes = [_INT], [_POINTER]
    return lib


def call(lib, name: str, *arguments) -> None:
    """Raises DeviceError with NCCL's own words where it does not succeed."""
    code = getattr(lib, name)(*arguments)
    if code not in (_SUCCESS, _IN_PROGRESS):
        last = (lib.ncclGetLastError(None) or b"").decode(errors="replace").strip()
        raise DeviceError(f"{name}: {lib.ncclGetErrorString(code).decode()}" + (f": {last}" if last else ""), "NCCL_DEBUG=INFO has more")


def version() -> str:
    """Like "2.28.9". Raises DeviceError, as `library`."""
    number = _INT()
    call(library(), "ncclGetVersion", ctypes.byref(number))
    return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"


def unique_id() -> bytes:
    """For rank 0 to hand to all ranks: ID_BYTES bytes. From here on this process listens for them. Raises DeviceError."""
    made = UniqueId()
    call(library(), "ncclGetUniqueId", ctypes.byref(made))
    return bytes(made)


def share_gpus(rank: int) -> None:
    """Test switch: lets several ranks use one GPU. To be called before NCCL is first used in this process."""
    os.environ.update(_SHARED_GPUS, NCCL_HOSTID=f"k3cuda-test-rank-{rank}")


def device_index(local_rank: int, visible: int) -> int:
    """The GPU of a rank. Raises DeviceError where there are fewer GPUs than ranks on this machine.

    A launcher that shows every process one GPU has chosen it; that two have not been given the same one NCCL itself finds out.
    """
    if visible == 1 or local_rank < visible:
        return local_rank if visible > 1 else 0
    raise DeviceError(f"local rank {local_rank} has no GPU: {visible} are visible on this machine",
                      f"start at most {visible} ranks on it, or see CUDA_VISIBLE_DEVICES" if visible else "see CUDA_VISIBLE_DEVICES, and --gpus for containers")


class Communicator:
    """The ranks of a job, on the GPU that is current when it is made. Every rank makes its own at the same time.

    Args:
        made: of `unique_id`, the same everywhere.
        lib: another library than the installed one, for tests.
    Raises, here and in its methods:
        DeviceError: with NCCL's own words.
    """

    def __init__(self, made: bytes, rank: int, size: int, lib=None):
        self.rank, self.size, self._lib, self._comm = rank, size, lib or library(), _POINTER()
        call(self._lib, "ncclCommInitRank", ctypes.byref(self._comm), size, UniqueId.from_buffer_copy(made), rank)

    def all_gather(self, source: int, target: int, nbytes: int, stream: int) -> None:
        """`nbytes` at `source` of every rank to `target`, in order of rank. Addresses are of device memory; it runs in the stream's order."""
        call(self._lib, "ncclAllGather", source, target, nbytes, _UINT8, self._comm, stream)

    def gather(self, source: int, target: int, nbytes: int, ranks: range, stream: int) -> None:
        """`all_gather` between some `ranks`, of which this is one and which all call it."""
        if len(ranks) == self.size:
            self.all_gather(source, target, nbytes, stream)
        else:
            self._exchange([(rank, source, target + place * nbytes) for place, rank in enumerate(ranks)], nbytes, stream)

    def all_to_all(self, source: int, target: int, nbytes: int, ranks: range, stream: int) -> None:
        """Between `ranks`, as `gather`: part i of `source` to the i-th of them, where it is the part of this rank's place; parts have `nbytes`."""
        self._exchange([(rank, source + place * nbytes, target + place * nbytes) for place, rank in enumerate(ranks)], nbytes, stream)

    def _exchange(self, pairs: list[tuple[int, int, int]], nbytes: int, stream: int) -> None:
        """(rank, what it gets, where what it sends goes)."""
        call(self._lib, "ncclGroupStart")
        for rank, sent, received in pairs:
            call(self._lib, "ncclSend", sent, nbytes, _UINT8, rank, self._comm, stream)
            call(self._lib, "ncclRecv", received, nbytes, _UINT8, rank, self._comm, stream)
        call(self._lib, "ncclGroupEnd")

    def check(self) -> None:
        """Raises what went wrong in the background: a collective that lost a rank does not end by itself."""
        code = _INT()
        call(self._lib, "ncclCommGetAsyncError", self._comm, ctypes.byref(code))
        if code.value not in (_SUCCESS, _IN_PROGRESS):
            raise DeviceError(f"NCCL on rank {self.rank}: {self._lib.ncclGetErrorString(code.value).decode()}", "NCCL_DEBUG=INFO has more")

    def abort(self) -> None:
        """Ends collectives that wait for a lost rank; from any thread."""
        self._drop("ncclCommAbort")

    def close(self) -> None:
        """May be called twice."""
        self._drop("ncclCommDestroy")

    def _drop(self, name: str) -> None:
        comm, self._comm = self._comm, None
        if comm:
            call(self._lib, name, comm)
