"""The KDA, norm and route cores' own device code under g++, in the tests of tests/gpu that need no cluster of blocks."""
import ctypes
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from shim import host

sys.path.insert(0, str(Path(__file__).parent / "gpu"))
import core_kernels as ck  # noqa: E402
import test_kda_core as gpu_kda  # noqa: E402
import test_norm_core as gpu_norm  # noqa: E402
import test_route_core as gpu_route  # noqa: E402

pytestmark = pytest.mark.skipif(host.COMPILER is None, reason="needs g++")


class Array(np.ndarray):
    """A NumPy array that tells its address as a CuPy array does."""

    @property
    def data(self):
        return SimpleNamespace(ptr=self.ctypes.data)


CUPY = SimpleNamespace(ndarray=Array, asarray=lambda x: np.array(x).view(Array), asnumpy=lambda x: np.array(x).view(np.ndarray))


class HostCores:
    """As core_kernels.Cores, without a GPU."""

    def __init__(self, kernels, folder):
        self.library = host.build(ck.unit(kernels), [k.name for k in kernels], folder)

    def run(self, kernel, grid, arguments, *, shared=0):
        assert kernel.cluster == 1
        values = [a if isinstance(a, (ctypes.Structure, ctypes._SimpleCData)) else ctypes.c_void_p(a.data.ptr) for a in arguments]
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        three, blocks = ctypes.c_uint * 3, (grid,) if isinstance(grid, int) else grid
        getattr(self.library, f"k3_shim_{kernel.name}")(three(*(*blocks, 1, 1)[:3]), three(kernel.threads, 1, 1), ctypes.c_size_t(shared), 0,
                                                        ctypes.c_uint(3), pointers)   # 3: threads in a shuffled order


@pytest.fixture(autouse=True)
def numpy_for_cupy(monkeypatch):
    monkeypatch.setattr(ck, "cp", CUPY)
    monkeypatch.setattr(gpu_kda, "MAIN", (1, 4, 512))


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    return lambda kernels: HostCores(kernels, tmp_path_factory.mktemp("unit"))


def test_kda(build, monkeypatch):
    cores = build([gpu_kda.MIXES[1, 4, 512], *gpu_kda.WIDE, gpu_kda.ROWS, gpu_kda.MIXES[1, 2, 512], gpu_kda.COMMITS[4, 2], gpu_kda.COMMITS[2, 2]])
    gpu_kda.test_mix_matches_reference(cores, 1, 30)
    gpu_kda.test_chunks_and_commits_give_the_bytes_of_single_rows(cores, 1, (3, 9, 8))
    monkeypatch.setattr(gpu_kda, "MIXES", {(1, 4, 512): gpu_kda.MIXES[1, 4, 512]})
    gpu_kda.test_a_wide_steps_kernels_give_the_same_bytes(cores, 1, 55)
    gpu_kda.test_a_step_of_many_rows_gives_the_same_bytes(cores, 1, 55, 3)
    gpu_kda.test_a_step_of_many_rows_gives_the_same_bytes(cores, 1, 32, 22)
    gpu_kda.test_commit_bytes_do_not_depend_on_launch(cores, (2, 2), 2)
    gpu_kda.test_a_middle_of_many_rows_that_advances_leaves_what_a_commit_would(cores, 1, 55, 3, False)
    gpu_kda.test_a_middle_of_many_rows_that_advances_leaves_what_a_commit_would(cores, 1, 32, 22, True)


def test_kda_shares(build):
    cores = build([gpu_kda.SHARES])
    for slots in gpu_kda.FEW:
        gpu_kda.test_every_sequence_of_few_rows_is_taken_once(cores, slots)


@pytest.mark.parametrize("shape", [s for s in gpu_norm.SHAPES if s[4] == 1])
def test_norm(build, shape):
    cores = build([gpu_norm.KERNELS[shape]])
    for rows in (1, 5):
        gpu_norm.test_matches_float64(cores, shape, rows)


def test_a_wide_steps_norm_gives_the_same_bytes(build):
    small, wide = (next(s for s in gpu_norm.SHAPES if s[:5] == (128, 8, 2, 2, 1) and bool(s[5]) == threads) for threads in (True, False))
    cores = build([gpu_norm.KERNELS[s] for s in (small, wide)])
    gpu_norm.test_bytes_do_not_depend_on_spread(cores, small, wide)
    gpu_norm.test_row_alone_and_beside_nan(cores, wide)
    gpu_norm.test_snapshot_closes_the_block_and_empties_hidden(cores, wide)


def test_route(build):
    cores = build(gpu_route.ROUTES.values())
    for shape in gpu_route.ROUTES:
        gpu_route.test_matches_numpy(cores, shape)
        for kind in ("equal", "few values", "rising", "by lane", "nan"):
            gpu_route.test_ties_orders_and_odd_values(cores, shape, kind)


def test_list(build):
    cores = build(gpu_route.LISTS.values())
    for shape in gpu_route.LISTS:
        for kind in ("random", "one set", "padding"):
            gpu_route.test_expert_list(cores, shape, min(shape[2], 70), kind)


def test_wide_list(build):
    cores = build(gpu_route.WIDE_LISTS.values())
    for shape in gpu_route.WIDE_LISTS:
        for kind in ("random", "one set", "padding", "half"):
            gpu_route.test_wide_expert_list(cores, shape, kind)
