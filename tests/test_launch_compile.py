"""The single launch compiles for every architecture, within its registers and without spills."""
import pytest

pytest.importorskip("cuda.bindings", reason="no CUDA line installed; install k3cuda[cu13] or k3cuda[cu12]")

from k3cuda import block_program as bp  # noqa: E402
from k3cuda import launch_source as ls  # noqa: E402
from k3cuda.config import RELEASED_FOLDER, K3Config  # noqa: E402
from k3cuda.phases import Grid  # noqa: E402
from k3cuda.runtime import cuda_jit  # noqa: E402

TP, CLUSTER, TOP_K = 16, 2, 16


@pytest.mark.parametrize("arch", cuda_jit.ARCHS)
@pytest.mark.parametrize("rows", [1, 8])
def test_the_chain_with_experts_compiles_without_spills(arch, rows):
    """Its kinds are the dense chain's and the experts' together: what one keeps in registers beyond its phases, the others lack."""
    chain = bp.chain(bp.with_experts(K3Config.from_json(RELEASED_FOLDER), TP, CLUSTER), 1, rows, Grid(cluster=CLUSTER), TOP_K)
    compiled = cuda_jit.compile_cuda(ls.source(chain), arch, strict=True)
    assert compiled.resources()["product_chain"].registers <= 96    # 18 warps: five of them in one of the four parts of a multiprocessor
