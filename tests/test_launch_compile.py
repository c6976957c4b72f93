"""The single launch compiles for every architecture, within its registers."""
import pytest

pytest.importorskip("cuda.bindings", reason="no CUDA line installed; install k3cuda[cu13] or k3cuda[cu12]")

from k3cuda import block_program as bp  # noqa: E402
from k3cuda import launch_source as ls  # noqa: E402
from k3cuda.config import RELEASED_FOLDER, K3Config  # noqa: E402
from k3cuda.phases import Grid  # noqa: E402
from k3cuda.runtime import cuda_jit  # noqa: E402

TP, CLUSTER, TOP_K = 16, 2, 16


@pytest.mark.parametrize("arch", cuda_jit.ARCHS)
def test_chains_of_dense_products_compile_without_spills(arch):
    compiled = cuda_jit.compile_cuda(ls.source(chain_of(bp.dense_products, 8)), arch, strict=True)
    assert compiled.resources()["product_chain"].registers <= 96    # 18 warps: five of them in one of the four parts of a multiprocessor


def test_experts_spill_little_where_they_are_tuned():
    """All kinds together want a few registers more than there are (docs/megakernel-log.md); what is kept in memory is touched once a phase."""
    compiled = cuda_jit.compile_cuda(ls.source(chain_of(bp.with_experts, 8)), cuda_jit.ARCHS[0])
    assert compiled.resources()["product_chain"].spills <= 64


def chain_of(kinds, rows):
    return bp.chain(kinds(K3Config.from_json(RELEASED_FOLDER), TP, CLUSTER), 1, rows, Grid(cluster=CLUSTER), TOP_K if kinds is bp.with_experts else 0)
