"""The cores' own device code under g++, against NumPy: sums, layouts, MXFP4 values, what is written and what isn't.

The shim runs logic, not the machine: bytes, speed and memory order are tests/gpu/test_core.py's matter.
"""
import ctypes

import core_units as u
import numpy as np
import pytest
from shim import host

pytestmark = pytest.mark.skipif(host.COMPILER is None, reason="needs g++")
F32_SUMS = 2e-6   # relative error of sums of at most 1536 products in F32, as norms


@pytest.mark.parametrize("name", u.ON_HOST)
@pytest.mark.parametrize("nt, first, rows", [(1, 0, 8), (1, 3, 5), (2, 0, 13)])
def test_rows(tmp_path, name, nt, first, rows):
    library = host.build(u.row_source(name, nt), [f"{name}_{nt}"], tmp_path)
    packed, x, want = u.row_case(name)
    grid, threads, shared, cluster = host.constants(library, f"{name}_{nt}_launch", 4)
    assert cluster == 1
    x[first + rows:] = 0x7FC0   # NaN beside the live rows
    y = np.full(want.shape, np.nan, np.float32)
    host.launch(library, f"{name}_{nt}", grid, threads, [packed, ctypes.c_int(len(packed)), x[first:], ctypes.c_int(x.shape[1]), ctypes.c_int(rows),
                                                        y[first:], ctypes.c_int(y.shape[1])], shared, seed=first + 1)
    live, want = y[first:first + rows], want[first:first + rows]
    assert np.linalg.norm(live - want) < F32_SUMS * np.linalg.norm(want)
    assert np.isnan(np.delete(y, range(first, first + rows), axis=0)).all()


@pytest.mark.parametrize("before", ["", "#define K3_SHIM_WGMMA\n"], ids=["mma", "wgmma"])
@pytest.mark.parametrize("name", u.WIDE)
def test_wide_rows(tmp_path, name, before):
    """A product of many tokens: right, complete, and the bytes of the narrow product's tree."""
    rows, leaves, steps, tokens, pair = u.WIDE[name]
    packed, x, want = u.wide_case(name)
    library, count = host.build(before + u.wide_source(name), [name, f"{name}_tree"], tmp_path), ctypes.c_int
    grid, threads, shared, sum_grid, sum_threads = host.constants(library, f"{name}_launch", 5)
    partial = np.full((len(packed), tokens // 8, leaves, 128), np.nan, np.float32)
    y = np.full((tokens + 1, want.shape[1]), np.nan, np.float32)
    host.launch(library, name, grid, threads, [packed, x, count(x.shape[1]), partial, y, count(y.shape[1])], shared, seed=1)
    if sum_grid:
        host.launch(library, f"{name}_tree", sum_grid, sum_threads, [partial, y, count(y.shape[1])], seed=1)
    assert np.linalg.norm(y[:-1] - want) < F32_SUMS * np.linalg.norm(want)
    assert np.isnan(y[-1]).all()
    if pair:
        return
    (tmp_path / "narrow").mkdir()
    narrow = host.build(u.narrow_source(name), ["narrow"], tmp_path / "narrow")
    grid, threads, shared, _ = host.constants(narrow, "narrow_launch", 4)
    again = np.full_like(y, np.nan)
    for first in range(0, tokens, 8):
        host.launch(narrow, "narrow", grid, threads, [packed, count(len(packed)), x[first:], count(x.shape[1]), count(8), again[first:], count(y.shape[1])], shared)
    assert again[:-1].tobytes() == y[:-1].tobytes()


@pytest.mark.parametrize("leaves", [1, 2])
def test_experts(tmp_path, leaves):
    """w2 in windows of 24 items, whose sums go on in the next one; of one leaf the last one's are the results."""
    library = host.build(u.expert_source(leaves), ["small_up", "small_down"], tmp_path)
    case, rows, count = u.ExpertCase(rows=20), [0, 1, 2, 3, 4, 7, 9, 11, 12, 19], ctypes.c_int   # ten rows share expert 0: two entries
    gate_up, total = case.want()
    up, down = np.full((20 * u.TOP_K, 2, u.WIDTH), np.nan, np.float32), np.full((20, u.LATENT), np.nan, np.float32)
    words = case.list(rows)
    _, threads, shared, _ = host.constants(library, "small_up_launch", 4)
    host.launch(library, "small_up", 3, threads, [case.w13, count(u.WIDTH // 16), case.x, count(u.LATENT), count(u.TOP_K), words, up], shared, seed=1)
    _, threads, shared, _ = host.constants(library, "small_down_launch", 4)
    host.launch(library, "small_down", u.LATENT // 16, threads, [u.repack.pack_mxfp4(*case.w2, leaves), count(u.LATENT // 16), case.act, count(u.WIDTH),
                                                                 case.weights, count(20), words, down], shared, seed=2)
    items = [r * u.TOP_K + p for r in rows for p in range(u.TOP_K)]
    assert np.linalg.norm(up[items] - gate_up[items]) < F32_SUMS * np.linalg.norm(gate_up[items])
    assert np.isnan(np.delete(up, items, axis=0)).all()
    assert np.linalg.norm(down[rows] - total[rows]) < F32_SUMS * np.linalg.norm(total[rows])
    assert not np.delete(down, rows, axis=0).any()


@pytest.mark.parametrize("leaves", [1, 2])
def test_experts_of_many_rows(tmp_path, leaves):
    """Every item once, whatever the number of blocks; sums of a row by rising expert."""
    library = host.build(u.wide_expert_source(leaves), ["items", "sums"], tmp_path)
    case, rows, count = u.ExpertCase(rows=64), list(range(0, 64, 2)), ctypes.c_int
    items = [r * u.TOP_K + p for r in rows for p in range(u.TOP_K)]
    results, y = np.full((leaves, u.MAX_ITEMS, u.LATENT), np.nan, np.float32), np.full((64, u.LATENT), np.nan, np.float32)
    threads, shared = host.constants(library, "items_launch", 2)
    host.launch(library, "items", 3, threads, [u.repack.pack_mxfp4(*case.w2, leaves), count(u.LATENT // 16), case.act, count(u.WIDTH), case.list(rows),
                                              results, count(u.LATENT)], shared, seed=1)
    assert np.isfinite(results[:, items]).all() and np.isnan(np.delete(results, items, axis=1)).all()
    host.launch(library, "sums", 64, u.LATENT // 4, [results, case.ids, case.weights, count(u.LATENT), y])
    total = case.want()[1]
    assert np.linalg.norm(y[rows] - total[rows]) < F32_SUMS * np.linalg.norm(total[rows])
    # The order inside a leaf, in F32: rising expert, one rounding a product and sum.
    row, by_leaf = rows[3], []
    for leaf in range(leaves):
        value = np.zeros(u.LATENT, np.float64)
        for p in np.argsort(case.ids[row]):
            value = (np.float64(case.weights[row, p]) * results[leaf, row * u.TOP_K + p] + value).astype(np.float32).astype(np.float64)
        by_leaf.append(value.astype(np.float32))
    assert (np.sum(by_leaf, axis=0, dtype=np.float32)).tobytes() == y[row].tobytes()
