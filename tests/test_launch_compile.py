"""The single launch compiles for every architecture, within its registers."""
from dataclasses import replace

import pytest

pytest.importorskip("cuda.bindings", reason="no CUDA line installed; install k3cuda[cu13] or k3cuda[cu12]")

from k3cuda import block_program as bp  # noqa: E402
from k3cuda import launch_rank as lr  # noqa: E402
from k3cuda import launch_source as ls  # noqa: E402
from k3cuda.config import RELEASED_FOLDER, K3Config  # noqa: E402
from k3cuda.launch_layer import layer_kinds, layer_steps  # noqa: E402
from k3cuda.phases import Grid  # noqa: E402
from k3cuda.plan import build_plan  # noqa: E402
from k3cuda.runtime import cuda_jit  # noqa: E402

TP, CLUSTER, TOP_K, ROWS = 16, 2, 16, 8
CFG = K3Config.from_json(RELEASED_FOLDER)
GRID = Grid(cluster=CLUSTER)


@pytest.mark.parametrize("arch", cuda_jit.ARCHS)
def test_chains_of_dense_products_compile_without_spills(arch):
    compiled = cuda_jit.compile_cuda(ls.source(bp.chain(lr.dense_products(CFG, TP, CLUSTER), 1, ROWS, GRID)), arch, strict=True)
    assert compiled.resources()["product_chain"].registers <= 96    # 18 warps: five of them in one of the four parts of a multiprocessor


@pytest.mark.parametrize("arch", cuda_jit.ARCHS)
def test_a_layer_but_its_experts_compiles_without_spills(arch):
    kinds = layer_kinds(CFG, TP, CLUSTER, rank_parts=TP, forced=False)
    program = bp.program(kinds, layer_steps(build_plan(CFG, TP), kinds, range(30, 31)), ROWS, GRID, TOP_K, slots=10)
    kept = [(k, most) for k, most in zip(program.kinds, program.most) if not k.is_chosen]
    assert len(kept) == len(kinds) - 2
    compiled = cuda_jit.compile_cuda(ls.source(replace(program, kinds=tuple(k for k, _ in kept), most=tuple(most for _, most in kept))), arch, strict=True)
    assert compiled.resources()["product_chain"].registers <= 96


def test_experts_spill_little_where_they_are_tuned():
    """All kinds together want a few registers more than there are (docs/megakernel-log.md); what is kept in memory is touched once a phase."""
    compiled = cuda_jit.compile_cuda(ls.source(bp.chain(lr.with_experts(CFG, TP, CLUSTER), 1, ROWS, GRID, TOP_K)), cuda_jit.ARCHS[0])
    assert compiled.resources()["product_chain"].spills <= 64
