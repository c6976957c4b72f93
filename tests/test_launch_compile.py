"""The single launch compiles for every architecture, within its registers and without spills."""
import pytest

pytest.importorskip("cuda.bindings", reason="no CUDA line installed; install k3cuda[cu13] or k3cuda[cu12]")

from k3cuda import block_program as bp  # noqa: E402
from k3cuda import launch_source as ls  # noqa: E402
from k3cuda.config import RELEASED_FOLDER, K3Config  # noqa: E402
from k3cuda.launch_layer import LAYER_SLOTS, MERGED_ROWS, layer_kinds, layer_steps  # noqa: E402
from k3cuda.launch_mla import mla_layer_kinds  # noqa: E402
from k3cuda.phases import Grid  # noqa: E402
from k3cuda.plan import build_plan  # noqa: E402
from k3cuda.runtime import cuda_jit  # noqa: E402

TP, CLUSTER, TOP_K = 16, 2, 16
CFG = K3Config.from_json(RELEASED_FOLDER)
GRID = Grid(cluster=CLUSTER)
MOST = 96   # of 18 warps five are in one of the four parts of a multiprocessor


def registers(kinds, rows, arch):
    program = bp.program(kinds, layer_steps(build_plan(CFG, TP), kinds, range(30, 31)), rows, GRID, TOP_K, slots=LAYER_SLOTS)
    return cuda_jit.compile_cuda(ls.source(program), arch, strict=True).resources()["product_chain"].registers


@pytest.mark.parametrize("arch", cuda_jit.ARCHS)
@pytest.mark.parametrize("rows", [1, 8])
def test_a_layer_compiles_without_spills(arch, rows):
    """What one kind of phase keeps in registers beyond its phases, the others lack."""
    assert registers(layer_kinds(CFG, TP, CLUSTER, rank_parts=TP, forced=False, merged=rows <= MERGED_ROWS), rows, arch) <= MOST


@pytest.mark.parametrize("arch", cuda_jit.ARCHS)
@pytest.mark.parametrize(("rows", "cache"), [(1, 2), (8, 1)])
def test_a_layer_of_latent_attention_compiles_without_spills(arch, rows, cache):
    assert registers(mla_layer_kinds(CFG, TP, CLUSTER, rank_parts=TP, forced=False, merged=rows <= MERGED_ROWS, rows=rows, cache=cache, blocks=GRID.sms), rows, arch) <= MOST
