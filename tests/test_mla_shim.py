"""Latent attention's kernels on the CPU, with scalar bodies for the machine's instructions: the protocol of the warps, masks, edges."""
import ctypes
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent / "shim"))
import host  # noqa: E402

pytestmark = pytest.mark.skipif(host.COMPILER is None, reason="no C++ compiler")
PAGE, LATENT, ROPE, HEADS, RING = 64, 128, 64, 6, 8
DIM = LATENT + ROPE
TYPES = {1: ("MlaE4m3", ml_dtypes.float8_e4m3fn), 2: ("MlaBf16", ml_dtypes.bfloat16)}
SHAPES = [(1, 1), (1, 6), (2, 6)]


class Rows(ctypes.Structure):
    _fields_ = [(n, ctypes.c_void_p) for n in ("row_slot", "row_position", "page_table")] + [("slot_pages", ctypes.c_int), ("rows", ctypes.c_int)]


class Attend(ctypes.Structure):
    _fields_ = [("rows", Rows), ("query", ctypes.c_void_p), ("map", ctypes.c_void_p), ("first", ctypes.c_int), ("score_scale", ctypes.c_float),
                ("cache_scale", ctypes.c_float)] + [(n, ctypes.c_void_p) for n in ("partial", "top_sum", "info", "next")]


class Combine(ctypes.Structure):
    _fields_ = [(n, ctypes.c_void_p) for n in ("row_slot", "row_position", "info", "partial", "top_sum")] + [
        ("cache_scale", ctypes.c_float), ("next", ctypes.c_void_p), ("out", ctypes.c_void_p)]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    lines = ['#include "mla_attend.cuh"', '#include "mla_combine.cuh"']
    for size, tiles in SHAPES:
        n, shape = f"a{size}_{tiles}", f"MlaShape<{TYPES[size][0]}, {HEADS}, {LATENT}, {ROPE}, {tiles}, {RING}>"
        lines += [f"using S_{n} = {shape}; extern \"C\" int {n}_shared; int {n}_shared = sizeof(MlaSmem<S_{n}>);",
                  f"void {n}(MlaAttend a) {{ K3_DYN_SMEM(u8, raw); mla_attend<S_{n}>(a, *(MlaSmem<S_{n}>*)raw, [] {{}}); }}",
                  f"void c{size}_{tiles}(MlaCombine a, int row, int head, int slab) {{ __shared__ MlaCombineSmem m; "
                  f"mla_combine<{HEADS}, {LATENT}, {8 * tiles}>(a, m, row, head, slab); }}"]
    names = [f"{k}{s}_{t}" for s, t in SHAPES for k in "ac"]
    lines.append('extern "C" size_t far_row(int page, int position) { return mla_cache_row<576>(page, position); }\n')
    return host.build("\n".join(lines) + "\n", names, tmp_path_factory.mktemp("mla"))


def run(library, size, tiles, query, cache, slot, position, table, blocks=2, seed=0):
    arrays = [np.asarray(x, np.int32) for x in (slot, position, table)]
    rows, total = len(slot), 64
    partial, top_sum = np.full((total, 8 * tiles, LATENT), np.nan, np.float32), np.full((total, 8 * tiles, 2), np.nan, np.float32)
    info, count, out = np.full((64, 4), -1, np.int32), np.zeros(1, np.int32), np.full((rows, HEADS, LATENT), 0xffff, np.uint16)
    encoded = np.zeros(32, np.uint64)
    start = -encoded.ctypes.data % 64 // 8
    encoded[start:start + 3] = cache.ctypes.data, DIM * size, 64 * size
    pointers = [a.ctypes.data for a in arrays]
    a = Attend(Rows(*pointers, table.shape[1], rows), query.ctypes.data, encoded[start:].ctypes.data, 0, np.float32(192 ** -0.5 * np.log2(np.e)), 1.0,
               partial.ctypes.data, top_sum.ctypes.data, info.ctypes.data, count.ctypes.data)
    shared = host.constants(library, f"a{size}_{tiles}_shared", 1)[0]
    host.launch(library, f"a{size}_{tiles}", blocks, 512, [a], shared, seed)
    c = Combine(pointers[0], pointers[1], info.ctypes.data, partial.ctypes.data, top_sum.ctypes.data, 1.0, count.ctypes.data, out.ctypes.data)
    for row in range(rows):
        for head in range(HEADS):
            for slab in range(LATENT // 64):
                host.launch(library, f"c{size}_{tiles}", 1, 512, [c, *(ctypes.c_int(v) for v in (row, head, slab))])
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
            out = run(library, size, tiles, query, cache, slot, position, table, blocks, seed)
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


def test_nan_row_reaches_later_rows_only(library, case):
    query, values, slot, position, table = case
    clean = run(library, 1, 6, query, np.ascontiguousarray(values.astype(TYPES[1][1])), slot, position, table)
    values[table[0, 4], 0, 5] = np.nan      # position 256: row 1
    out = run(library, 1, 6, query, np.ascontiguousarray(values.astype(TYPES[1][1])), slot, position, table)
    assert (out[[0, 4]] == clean[[0, 4]]).all()
    assert np.isnan(out[1:3].view(ml_dtypes.bfloat16).astype(np.float32)).all()


def test_addresses_pass_two_to_the_31(library):
    library.far_row.restype = ctypes.c_size_t
    assert library.far_row(200_000, 1_000_001) == (200_000 * 64 + 1_000_001 % 64) * 576
