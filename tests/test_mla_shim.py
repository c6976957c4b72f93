"""Latent attention's kernels on the CPU, with scalar bodies for the machine's instructions: the protocol of the warps, masks, edges."""
import ctypes
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent / "shim"))
import host  # noqa: E402

from k3cuda.cache_layout import in_order  # noqa: E402

pytestmark = pytest.mark.skipif(host.COMPILER is None, reason="no C++ compiler")
PAGE, LATENT, ROPE, HEADS, RING = 64, 128, 64, 6, 8
DIM = LATENT + ROPE
QUERY, QUERY_LEAVES, LATENT_LEAVES = 144, 2, 4   # leaves of 72, not whole warps, and of 32
TYPES = {1: ("MlaE4m3", ml_dtypes.float8_e4m3fn), 2: ("MlaBf16", ml_dtypes.bfloat16)}
TOGETHER = (1, 2, 8)
SHAPES = [(1, 1), (1, 3), (1, 6), (2, 2), (2, 6)]


class Rows(ctypes.Structure):
    _fields_ = [(n, ctypes.c_void_p) for n in ("row_slot", "row_position", "page_table")] + [("slot_pages", ctypes.c_int), ("rows", ctypes.c_int)]


class Attend(ctypes.Structure):
    _fields_ = [("rows", Rows), ("query", ctypes.c_void_p), ("cache", ctypes.c_void_p), ("score_scale", ctypes.c_float),
                ("cache_scale", ctypes.c_float)] + [(n, ctypes.c_void_p) for n in ("partial", "top_sum", "next", "out")]


class Combine(ctypes.Structure):
    _fields_ = [("rows", Rows), ("partial", ctypes.c_void_p), ("top_sum", ctypes.c_void_p), ("cache_scale", ctypes.c_float),
                ("next", ctypes.c_void_p), ("out", ctypes.c_void_p)]


class Write(ctypes.Structure):
    _fields_ = [("rows", Rows)] + [(n, ctypes.c_void_p) for n in ("query", "latent", "query_norm", "latent_norm", "query_out", "cache")] + [
        ("cache_scale", ctypes.c_float), ("eps", ctypes.c_float)]


@pytest.fixture(scope="module", params=["mma.sync", "wgmma"])
def library(request, tmp_path_factory):
    """Once with the products of any machine, once with those of sm_90a, whose columns are found by descriptors."""
    lines = ['#define K3_SHIM_WGMMA'] * (request.param == "wgmma") + ['#include "mla_attend.cuh"', '#include "mla_combine.cuh"']
    for size, tiles in SHAPES:
        n, shape = f"a{size}_{tiles}", f"MlaShape<{TYPES[size][0]}, {HEADS}, {LATENT}, {ROPE}, {tiles}, {RING}>"
        lines += [f"using S_{n} = {shape}; extern \"C\" int {n}_shared, {n}_threads; int {n}_shared = sizeof(MlaSmem<S_{n}>), {n}_threads = S_{n}::kThreads;",
                  f"void {n}(MlaAttend a) {{ K3_DYN_SMEM(u8, raw); mla_attend<S_{n}>(a, *(MlaSmem<S_{n}>*)raw, [] {{}}); }}",
                  *(f"void c{size}_{tiles}_{n}(MlaCombine a) {{ __shared__ MlaCombineSmem<{n}> m; mla_combine<{HEADS}, {LATENT}, {n}>(a, m, [] {{}}); }}" for n in TOGETHER)]
    for size, stored in ((1, "u8"), (2, "bf16")):
        lines.append(f"void w{size}(MlaWrite a, int row) {{ __shared__ float leaf[2][16]; "
                     f"mla_write<{stored}, {QUERY}, {QUERY_LEAVES}, {LATENT}, {LATENT_LEAVES}, {ROPE}>(a, leaf, row, [] {{}}); }}")
    names = [n for s, t in SHAPES for n in (f"a{s}_{t}", *(f"c{s}_{t}_{n}" for n in TOGETHER))] + ["w1", "w2"]
    lines.append('extern "C" int chunks(int length) { return mla_chunks(length); }')
    lines += [f'extern "C" size_t at{size}(int page, int position, int i) {{ return mla_cache_at<{stored}, 576>(page, position, i); }}\n'
              for size, stored in ((1, "u8"), (2, "bf16"))]
    return host.build("\n".join(lines) + "\n", names, tmp_path_factory.mktemp("mla"))


def run(library, size, tiles, query, cache, slot, position, table, blocks=2, seed=0, together=TOGETHER[:1]):
    arrays = [np.asarray(x, np.int32) for x in (slot, position, table)]
    rows, total = len(slot), 1024
    partial, top_sum = np.full((total, LATENT), np.nan, np.float32), np.full((total, 2), np.nan, np.float32)
    count, out = np.zeros(1, np.int32), np.full((rows, HEADS, LATENT), 0xffff, np.uint16)
    stored = in_order(cache)
    pointers = [a.ctypes.data for a in arrays]
    a = Attend(Rows(*pointers, table.shape[1], rows), query.ctypes.data, stored.ctypes.data, np.float32(192 ** -0.5 * np.log2(np.e)), 1.0,
               partial.ctypes.data, top_sum.ctypes.data, count.ctypes.data, out.ctypes.data)
    shared, threads = (host.constants(library, f"a{size}_{tiles}_{n}", 1)[0] for n in ("shared", "threads"))
    host.launch(library, f"a{size}_{tiles}", blocks, threads, [a], shared, seed)
    c = Combine(a.rows, partial.ctypes.data, top_sum.ctypes.data, 1.0, count.ctypes.data, out.ctypes.data)
    alone, outs = out.copy(), []
    for n in together:
        out[...] = alone
        host.launch(library, f"c{size}_{tiles}_{n}", blocks, 256, [c], seed=seed)
        outs.append(out.copy())
    assert count[0] == 0 and all((o == outs[0]).all() for o in outs)
    return out


@pytest.fixture
def case():
    """Two sequences, the first over a chunk's edge, rows in the middle of a page, padding, NaN wherever nothing was written."""
    rng = np.random.default_rng(3)
    table = rng.permutation(12).reshape(2, 6)
    slot, position = [0, 0, 0, -1, 1], [255, 256, 257, 0, 69]
    query = rng.standard_normal((5, HEADS, DIM)).astype(ml_dtypes.bfloat16)
    query[3] = np.nan
    values = rng.standard_normal((12, PAGE, DIM)).astype(np.float32)
    for s, length in ((0, 258), (1, 70)):
        for p in range(6):
            values[table[s, p], max(0, length - p * PAGE):] = np.nan
    return query, values, slot, position, table


@pytest.mark.parametrize("size", [1, 2])
def test_attention(library, case, size):
    query, values, slot, position, table = case
    cache = np.ascontiguousarray(values.astype(TYPES[size][1]))
    base = None
    for tiles in [t for s, t in SHAPES if s == size]:
        for blocks, seed in ((1, 0), (3, 7)):
            out = run(library, size, tiles, query, cache, slot, position, table, blocks, seed, TOGETHER)
            base = out if base is None else base
            assert (out == base).all(), (tiles, blocks)
    assert (base[3] == 0xffff).all()
    got = base.view(ml_dtypes.bfloat16).astype(np.float64)
    for r, (s, p) in enumerate(zip(slot, position)):
        if s < 0:
            continue
        seen = cache[table[s]].reshape(-1, DIM)[:p + 1].astype(np.float64)
        scores = query[r].astype(np.float64) @ seen.T * 192 ** -0.5
        w = np.exp(scores - scores.max(-1, keepdims=True))
        want = (w / w.sum(-1, keepdims=True)) @ seen[:, :LATENT]
        assert np.linalg.norm(got[r] - want) < 4e-3 * np.linalg.norm(want), r


def test_wide_and_narrow_groups_in_one_block(library):
    """Groups that fill the room for queries and groups that share it, in turn; more blocks have narrower groups; the bytes are those of one
    tile a group."""
    rng = np.random.default_rng(4)
    table, counts, ends = rng.permutation(20).reshape(4, 5), [5, 1, 6, 2], [270, 20, 40, 300]
    slot = [s for s, n in enumerate(counts) for _ in range(n)]
    position = [ends[s] - counts[s] + i for s in range(4) for i in range(counts[s])]
    query, cache = (rng.standard_normal(n).astype(t) for n, t in (((len(slot), HEADS, DIM), ml_dtypes.bfloat16), ((20, PAGE, DIM), TYPES[1][1])))
    base = run(library, 1, 1, query, cache, slot, position, table)
    for blocks in (1, 10, 18):   # 6 items of up to 48 queries, 10 of 16, 18 of 8
        assert (run(library, 1, 6, query, cache, slot, position, table, blocks, 3) == base).all(), blocks


def test_nan_row_reaches_later_rows_only(library, case):
    query, values, slot, position, table = case
    clean = run(library, 1, 6, query, np.ascontiguousarray(values.astype(TYPES[1][1])), slot, position, table)
    values[table[0, 4], 0, 5] = np.nan      # position 256: row 1
    out = run(library, 1, 6, query, np.ascontiguousarray(values.astype(TYPES[1][1])), slot, position, table)
    assert (out[[0, 4]] == clean[[0, 4]]).all()
    assert np.isnan(out[1:3].view(ml_dtypes.bfloat16).astype(np.float32)).all()


@pytest.mark.parametrize("size", [1, 2])
def test_new_cache_rows(library, size):
    """Norms and rounding of the reference; a padding row and everything beside the new rows stay as they are."""
    from k3cuda.reference.numerics import Numerics, rms_norm
    rng, num = np.random.default_rng(5), Numerics("bf16", {1: "fp8_e4m3", 2: "bf16"}[size])
    slot, position, table = (np.asarray(x, np.int32) for x in ([1, -1, 0], [65, 0, 3], [[2, 0], [1, 3]]))
    query, latent = (rng.standard_normal((3, n)).astype(np.float32) * 40 for n in (QUERY, DIM))
    latent[0, -1], latent[0, -2] = 1e4, 1e-3                    # saturates, and falls below the smallest e4m3
    query[1] = latent[1] = np.nan
    norms = [rng.standard_normal(n).astype(ml_dtypes.bfloat16) for n in (QUERY, LATENT)]
    out, cache = np.full((3, QUERY), 0x5555, np.uint16), np.full((4, PAGE, DIM), 0x55, {1: np.uint8, 2: np.uint16}[size])
    a = Write(Rows(slot.ctypes.data, position.ctypes.data, table.ctypes.data, 2, 3), query.ctypes.data, latent.ctypes.data, *(n.ctypes.data for n in norms),
              out.ctypes.data, cache.ctypes.data, 1.0, 1e-6)
    for row in range(3):
        host.launch(library, f"w{size}", 1, 512, [a, ctypes.c_int(row)], seed=row)
    want = rms_norm(query, norms[0].astype(np.float32), 1e-6, num)
    got = out.view(ml_dtypes.bfloat16).astype(np.float32)
    assert (got == want)[[0, 2]].mean() > 0.99 and np.abs(got - want)[[0, 2]].max() <= 2**-7 * np.abs(want[[0, 2]]).max()
    assert (out[1] == 0x5555).all()
    want = num.round_cache(np.concatenate([rms_norm(latent[:, :LATENT], norms[1].astype(np.float32), 1e-6, num), latent[:, LATENT:]], axis=1))
    cache = in_order(cache)
    for row, (page, at) in ((0, (3, 1)), (2, (2, 3))):
        got = cache[page, at].view(TYPES[size][1]).astype(np.float32)
        assert (got == want[row]).mean() > 0.99 and np.abs(got - want[row]).max() < 0.13 * np.abs(want[row, :-1]).max(), row
        cache[page, at] = 0x55
    assert (cache == 0x55).all()


def test_work_space_counts_chunks_as_the_kernel_does(library):
    pytest.importorskip("cupy", reason="no CUDA line installed; install k3cuda[cu13] or k3cuda[cu12]")
    from k3cuda.runtime.step_room import mla_chunks
    edges = {n + d for n in (1, 256, 8192, 8448, 65536, 66048, 66560, 131072, 1 << 20) for d in (-1, 0, 1)}
    assert {n: mla_chunks(n) for n in edges} == {n: library.chunks(n) for n in edges}


@pytest.mark.parametrize("size", [1, 2])
def test_values_lie_where_the_host_looks_for_them(library, size):
    """In their own row, every 16 bytes together; addresses pass 2^31."""
    where, far = library[f"at{size}"], 200_000
    where.restype = ctypes.c_size_t
    found = np.array([[where(far, 1_000_000 * 64 + row, i) for i in range(576)] for row in range(PAGE)]) - far * PAGE * 576
    inside = np.arange(PAGE * 576).reshape(1, PAGE, 576)
    pages = [(inside >> 8 * byte & 0xff).astype(np.uint8) for byte in range(2)] if size == 1 else [inside.astype(np.uint16)]
    assert (sum(in_order(p)[0].astype(int) << 8 * n for n, p in enumerate(pages)) == found).all()
    assert (found // 576 == np.arange(PAGE)[:, None]).all() and (np.diff(found.reshape(-1, 16 // size)) == 1).all()
