"""Copies of slots on a GPU, without one: the addresses and sizes that the runtime is asked for, carried out on host memory."""
import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

cupy = pytest.importorskip("cupy", reason="CuPy holds the device's memory; install k3cuda[cu13] or k3cuda[cu12]")

from k3cuda.buffers import BY_NAME, buffer_shape  # noqa: E402
from k3cuda.plan import build_plan  # noqa: E402
from k3cuda.runtime import cuda_memory  # noqa: E402
from k3cuda.runtime.cuda_memory import VIEW_DTYPES, RankMemory  # noqa: E402
from k3cuda.runtime.made_config import made_config  # noqa: E402
from k3cuda.tables import tables_of  # noqa: E402

STREAM = SimpleNamespace(ptr=0x5EED)
NAMES = ("kda_state", "conv_state", "mla_cache")


def copy_2d(target, target_pitch, source, source_pitch, width, height, kind, stream):
    assert kind == cupy.cuda.runtime.memcpyDeviceToDevice and stream == STREAM.ptr
    for row in range(height):
        ctypes.memmove(target + row * target_pitch, source + row * source_pitch, width)


def set_2d(target, pitch, value, width, height, stream):
    assert stream == STREAM.ptr
    for row in range(height):
        ctypes.memset(target + row * pitch, value, width)


@pytest.fixture(params=["bf16", "fp8_e4m3"])
def memory(request, monkeypatch):
    """(a RankMemory whose session buffers lie on the host, the same memory as NumPy arrays)"""
    tables = tables_of(build_plan(made_config(num_hidden_layers=8), 2), slots=3, pages=7, slot_pages=2)
    dims = tables.dims
    dtypes = {n: np.dtype(np.uint8 if n == "mla_cache" and request.param == "fp8_e4m3" else VIEW_DTYPES[BY_NAME[n].dtype]) for n in NAMES}
    rng, made = np.random.default_rng(1), RankMemory.__new__(RankMemory)
    host = {n: rng.integers(0, 255, buffer_shape(BY_NAME[n], dims)).astype(dtypes[n]) for n in NAMES}
    made.tables, made.dims, made.kv_cache_dtype = tables, dims, request.param
    made.session = {}
    for name, array in host.items():
        owner = cupy.cuda.UnownedMemory(array.ctypes.data, array.nbytes, array, device_id=0)
        made.session[name] = cupy.ndarray(array.nbytes, np.uint8, cupy.cuda.MemoryPointer(owner, 0))
    runtime = SimpleNamespace(memcpyDeviceToDevice=cupy.cuda.runtime.memcpyDeviceToDevice, memcpy2DAsync=copy_2d,
                              memcpyAsync=lambda target, source, size, kind, stream: copy_2d(target, 0, source, 0, size, 1, kind, stream))
    monkeypatch.setattr(cuda_memory, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    monkeypatch.setattr(cuda_memory, "driver", lambda: SimpleNamespace(cuMemsetD2D8Async=set_2d))
    monkeypatch.setattr(cuda_memory, "check", lambda result: result)
    return made, host


def test_a_copied_slot(memory):
    made, host = memory
    want = {n: x.copy() for n, x in host.items()}
    for name in ("kda_state", "conv_state"):
        want[name][:, 2] = want[name][:, 0]
    want["mla_cache"][:, [6, 1]] = want["mla_cache"][:, [3, 4]]
    made.copy_slot(0, 2, [(3, 6), (4, 1)], STREAM)
    for name in NAMES:
        np.testing.assert_array_equal(host[name], want[name], name)


def test_a_cleared_slot(memory):
    made, host = memory
    want = {n: x.copy() for n, x in host.items()}
    for name in ("kda_state", "conv_state"):
        want[name][:, 1] = 0
    made.clear_slot(1, STREAM)
    for name in NAMES:
        np.testing.assert_array_equal(host[name], want[name], name)
