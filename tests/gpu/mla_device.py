"""Latent attention's kernels with device memory of their own, for tests and scripts/bench_mla.py."""
import ctypes
import functools
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import cupy as cp
import numpy as np

from k3cuda.cache_layout import in_order
from k3cuda.emit import MAX_SHARED
from k3cuda.runtime.cuda_driver import Launch, Module, open_device
from k3cuda.runtime.cuda_jit import compile_cuda

PAGE = 64
LATENT, ROPE, QUERY = 512, 64, 1536
DIM = LATENT + ROPE
SCALE = np.float32((128 + 64) ** -0.5 * np.log2(np.e))
COMBINE_THREADS, COMBINE_BLOCKS = 256, 4   # blocks: an SM
COMBINE_SLABS = {8: 32, 2: 4, 1: 0}         # slabs side by side for more rows than that: mla_combine_slabs


class Rows(ctypes.Structure):
    _fields_ = [("row_slot", ctypes.c_void_p), ("row_position", ctypes.c_void_p), ("page_table", ctypes.c_void_p),
                ("slot_pages", ctypes.c_int), ("rows", ctypes.c_int)]


class Attend(ctypes.Structure):
    _fields_ = [("rows", Rows), ("query", ctypes.c_void_p), ("cache", ctypes.c_void_p), ("score_scale", ctypes.c_float),
                ("cache_scale", ctypes.c_float), ("partial", ctypes.c_void_p), ("top_sum", ctypes.c_void_p), ("next", ctypes.c_void_p),
                ("out", ctypes.c_void_p)]


class Combine(ctypes.Structure):
    _fields_ = [("rows", Rows), ("partial", ctypes.c_void_p), ("top_sum", ctypes.c_void_p), ("cache_scale", ctypes.c_float),
                ("next", ctypes.c_void_p), ("out", ctypes.c_void_p)]


class Write(ctypes.Structure):
    _fields_ = [("rows", Rows), ("query", ctypes.c_void_p), ("latent", ctypes.c_void_p), ("query_norm", ctypes.c_void_p),
                ("latent_norm", ctypes.c_void_p), ("query_out", ctypes.c_void_p), ("cache", ctypes.c_void_p), ("cache_scale", ctypes.c_float),
                ("eps", ctypes.c_float)]


@functools.cache
def device():
    return open_device(0)


def source(bytes_: int, heads: int, tiles: int) -> str:
    cache, stored = {1: ("MlaE4m3", "u8"), 2: ("MlaBf16", "bf16")}[bytes_]
    return (f'#include "bench_mla.cuh"\nK3_BENCH_MLA(mla, {cache}, {stored}, {heads}, {LATENT}, {ROPE}, {QUERY}, {tiles}, '
            f'{MAX_SHARED})\n')


def compiled(shape, arch: str | None = None):
    return compile_cuda(source(*shape), arch or device().arch, name=f"mla {shape}")


def build(shapes) -> None:
    """Fills the cache of cubins, several compilations at a time."""
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(functools.partial(compiled, arch=device().arch), shapes))


@functools.cache
def module(bytes_: int, heads: int, tiles: int) -> Module:
    return Module(compiled((bytes_, heads, tiles)).cubin)


@functools.cache
def e4m3_values():
    import ml_dtypes
    return cp.asarray(np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64))


def values(cache):
    """Stored cache rows as float64."""
    if cache.dtype == cp.uint8:
        return e4m3_values()[cache]
    return (cache.astype(cp.uint32) << 16).view(cp.float32).astype(cp.float64)


def bf16_bits(x):
    u = cp.ascontiguousarray(x, cp.float32).view(cp.uint32)
    return ((u + 0x7fff + (u >> 16 & 1)) >> 16).astype(cp.uint16)


def random_cache(rng, bytes_: int, pages: int):
    """Values of magnitude 1/8 to 4, every bit pattern of a mantissa."""
    shape = (pages, PAGE, DIM)
    if bytes_ == 1:
        r = rng.integers(0, 256, shape, dtype=cp.uint8)
        return (r & 0x87) | ((4 + (r >> 3 & 15) % 5) << 3).astype(cp.uint8)
    r = rng.integers(0, 65536, shape, dtype=cp.uint16)
    return (r & 0x807f) | ((124 + (r >> 7 & 255) % 5) << 7).astype(cp.uint16)


class Mla:
    """Kernels of one shape; `tiles` tiles of 8 queries a group, `blocks` blocks."""

    def __init__(self, bytes_: int, heads: int, tiles: int, blocks: int | None = None, partials: int = 1 << 16):
        self.bytes, self.heads, self.tiles, self.blocks = bytes_, heads, tiles, blocks or device().sms
        self.module = module(bytes_, heads, tiles)
        self.shared, self.threads = (self.module.constants(f"mla_{n}", 1)[0] for n in ("shared", "threads"))
        self.attend = self.module.function("mla_attend", self.shared)
        self.combine, self.write = {n: self.module.function(f"mla_combine_{n}") for n in (1, 2, 8)}, self.module.function("mla_write")
        self.partials = partials
        self.partial = cp.empty((partials, LATENT), cp.float32)
        self.top_sum = cp.empty((partials, 2), cp.float32)
        self.next = cp.zeros(1, cp.int32)

    def rows(self, slot, position, table):
        return Rows(slot.data.ptr, position.data.ptr, table.data.ptr, table.shape[1], len(slot))

    def launches(self, query, cache, slot, position, table, out, *, cache_scale: float = 1.0, stream: int = 0, dependent: bool = False):
        """The two launches of one layer, over a cache as the kernels have it; every array stays alive with them."""
        work = (self.partial.data.ptr, self.top_sum.data.ptr)
        a = Attend(self.rows(slot, position, table), query.data.ptr, cache.data.ptr, SCALE, cache_scale, *work, self.next.data.ptr, out.data.ptr)
        c = Combine(self.rows(slot, position, table), *work, cache_scale, self.next.data.ptr, out.data.ptr)
        together = next(n for n, rows in COMBINE_SLABS.items() if len(slot) > rows)
        blocks = min(COMBINE_BLOCKS * device().sms, len(slot) * self.heads * LATENT // (32 * together))
        both = [Launch(self.attend, self.blocks, self.threads, [a], shared=self.shared, stream=stream, dependent=dependent),
                Launch(self.combine[together], blocks, COMBINE_THREADS, [c], stream=stream, dependent=dependent)]
        both[0].kept = (query, cache, slot, position, table, out)
        return both

    def run(self, query, cache, slot, position, table, **more):
        """query BF16 bits [rows][heads][dim], a cache whose values are in order -> BF16 bits [rows][heads][latent]; everything that is written is poisoned first."""
        slot, position, table = (cp.asarray(x, cp.int32) for x in (slot, position, table))
        out = cp.full((len(slot), self.heads, LATENT), 0xffff, cp.uint16)
        for x in (self.partial, self.top_sum):
            x.view(cp.uint32)[...] = 0xffffffff
        cp.cuda.Device().synchronize()
        for launch in self.launches(query, in_order(cache, cp), slot, position, table, out, **more):
            launch.launch()
        cp.cuda.Device().synchronize()
        assert int(self.next[0]) == 0
        return out


def reference(query, cache, slot, position, table, cache_scale: float = 1.0):
    """float64 [rows][heads][latent]; zeros in padding rows."""
    out = cp.zeros((len(slot), query.shape[1], LATENT), cp.float64)
    q = values(query)
    for r, (s, p) in enumerate(zip(slot, position)):
        if s < 0:
            continue
        pages = cp.asarray(np.asarray(table)[s, :p // PAGE + 1])
        seen = values(cache[pages]).reshape(-1, DIM)[:p + 1] * cache_scale
        scores = q[r] @ seen.T * (128 + 64) ** -0.5
        w = cp.exp(scores - scores.max(-1, keepdims=True))
        out[r] = (w / w.sum(-1, keepdims=True)) @ seen[:, :LATENT]
    return out


def error(out, want) -> float:
    got = values(out)
    return float(cp.linalg.norm(got - want) / cp.linalg.norm(want))
