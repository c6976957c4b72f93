"""The cores on a GPU: right against float64, written everywhere and nowhere else, and the same bytes whatever stands beside a row."""
import ctypes

import numpy as np
import pytest

cp = pytest.importorskip("cupy")
import core_units as u  # noqa: E402

from k3cuda.errors import DeviceError  # noqa: E402
from k3cuda.runtime.cuda_driver import Launch, Module, open_device  # noqa: E402
from k3cuda.runtime.cuda_jit import compile_cuda  # noqa: E402

pytestmark = pytest.mark.gpu
F32_SUMS = 2e-6   # relative error of sums of at most 1536 products in F32, as norms; a wrong element would show as 1e-3


@pytest.fixture(scope="module")
def device():
    try:
        return open_device(0)
    except DeviceError as e:
        pytest.skip(str(e))


def pointer(a):
    return ctypes.c_void_p(a.data.ptr)


def run_rows(device, name, nt, packed, x, first, rows, y):
    module = Module(compile_cuda(u.row_source(name, nt), device.arch).cubin)
    grid, threads, shared, cluster = module.constants(f"{name}_{nt}_launch", 4)
    arguments = [pointer(packed), ctypes.c_int(len(packed)), pointer(x[first:]), ctypes.c_int(x.shape[1]), ctypes.c_int(rows), pointer(y[first:]),
                 ctypes.c_int(y.shape[1])]
    cp.cuda.Device().synchronize()
    Launch(module.function(f"{name}_{nt}", shared), grid, threads, arguments, shared=shared, cluster=cluster, dependent=True).launch()
    cp.cuda.Device().synchronize()


@pytest.mark.parametrize("name", u.PRODUCTS)
def test_rows(device, name):
    packed, x, want = u.row_case(name)
    packed, x, bytes_of = cp.asarray(packed), cp.asarray(x), {}
    for nt in (1, 2, 4, 8):
        y = cp.full((64, want.shape[1]), cp.nan, cp.float32)
        for first in range(0, 64, nt * 8):
            run_rows(device, name, nt, packed, x, first, nt * 8, y)
        got = cp.asnumpy(y)
        assert np.linalg.norm(got - want) < F32_SUMS * np.linalg.norm(want)
        bytes_of[nt] = got.tobytes()
    assert len(set(bytes_of.values())) == 1
    x[10:] = 0x7FC0   # NaN beside the live rows
    y = cp.full((64, want.shape[1]), cp.nan, cp.float32)
    run_rows(device, name, 2, packed, x, 3, 7, y)
    again = cp.asnumpy(y)
    assert again[3:10].tobytes() == got[3:10].tobytes() and np.isnan(again[:3]).all() and np.isnan(again[10:]).all()


def test_layouts_of_one_product_agree(device):
    results = set()
    for name in ("auto", "narrow", "direct", "streamed", "many"):
        packed, x, want = u.row_case(name)
        y = cp.full((64, want.shape[1]), cp.nan, cp.float32)
        run_rows(device, name, 8, cp.asarray(packed), cp.asarray(x), 0, 64, y)
        results.add(cp.asnumpy(y).tobytes())
    assert len(results) == 1


@pytest.mark.parametrize("name", [name for name, (*_, pair) in u.WIDE.items() if not pair])
def test_wide_products_have_the_bytes_of_narrow_ones(device, name):
    """On sm_90a one is wgmma, the other mma.sync."""
    leaves, tokens = u.WIDE[name][1], u.WIDE[name][3]
    packed, x, want = (cp.asarray(a) for a in u.wide_case(name))
    wide, narrow = (Module(compile_cuda(source, device.arch).cubin) for source in (u.wide_source(name), u.narrow_source(name)))
    width, stride, count = ctypes.c_int(want.shape[1]), ctypes.c_int(x.shape[1]), ctypes.c_int
    y, again = cp.full(want.shape, cp.nan, cp.float32), cp.full(want.shape, cp.nan, cp.float32)
    partial = cp.full((len(packed), tokens // 8, leaves, 128), cp.nan, cp.float32)
    grid, threads, shared, sum_grid, sum_threads = wide.constants(f"{name}_launch", 5)
    Launch(wide.function(name, shared), grid, threads, [pointer(packed), pointer(x), stride, pointer(partial), pointer(y), width], shared=shared).launch()
    if sum_grid:
        Launch(wide.function(f"{name}_tree", 0), sum_grid, sum_threads, [pointer(partial), pointer(y), width]).launch()
    grid, threads, shared, _ = narrow.constants("narrow_launch", 4)
    for first in range(0, tokens, 8):
        Launch(narrow.function("narrow", shared), grid, threads,
               [pointer(packed), count(len(packed)), pointer(x[first:]), stride, count(8), pointer(again[first:]), width], shared=shared).launch()
    cp.cuda.Device().synchronize()
    assert cp.linalg.norm(y - want) < F32_SUMS * cp.linalg.norm(want)
    assert y.tobytes() == again.tobytes()


def run_experts(device, case, rows):
    module = Module(compile_cuda(u.expert_source(), device.arch).cubin)
    n, count = len(case.ids), ctypes.c_int
    up, down = cp.full((n * u.TOP_K, 2, u.WIDTH), cp.nan, cp.float32), cp.full((n, u.LATENT), cp.nan, cp.float32)
    w13, w2, x, act, weights, words = map(cp.asarray, (case.w13, case.w2_packed, case.x, case.act, case.weights, case.list(rows)))
    for kind, grid, arguments in (
            ("up", 7, [pointer(w13), count(u.WIDTH // 16), pointer(x), count(u.LATENT), count(u.TOP_K), pointer(words), pointer(up)]),
            ("down", u.LATENT // 16, [pointer(w2), count(u.LATENT // 16), pointer(act), count(u.WIDTH), pointer(weights), count(n),
                                      pointer(words), pointer(down)])):
        _, threads, shared, _ = module.constants(f"small_{kind}_launch", 4)
        cp.cuda.Device().synchronize()
        Launch(module.function(f"small_{kind}", shared), grid, threads, arguments, shared=shared, dependent=True).launch()
    cp.cuda.Device().synchronize()
    return cp.asnumpy(up), cp.asnumpy(down)


def test_experts(device):
    case = u.ExpertCase()
    gate_up, total = case.want()
    up, down = run_experts(device, case, range(64))
    assert np.linalg.norm(up - gate_up) < F32_SUMS * np.linalg.norm(gate_up)
    assert np.linalg.norm(down - total) < F32_SUMS * np.linalg.norm(total)
    for rows in ([5], [63, 0, 17], range(8, 40)):   # fewer rows: the same bytes for those, nothing for the others
        some_up, some_down = run_experts(device, case, sorted(rows))
        items = [r * u.TOP_K + p for r in rows for p in range(u.TOP_K)]
        assert some_up[items].tobytes() == up[items].tobytes() and some_down[list(rows)].tobytes() == down[list(rows)].tobytes()
        rest = [r for r in range(64) if r not in rows]
        assert not some_down[rest].any()
        assert np.isnan(np.delete(some_up, items, axis=0)).all()
