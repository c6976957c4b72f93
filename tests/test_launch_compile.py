"""The single launch compiles for every architecture, within its registers and without spills."""
import pytest

pytest.importorskip("cuda.bindings", reason="no CUDA line installed; install k3cuda[cu13] or k3cuda[cu12]")

from k3cuda import launch_source as ls  # noqa: E402
from k3cuda.config import RELEASED_FOLDER, K3Config  # noqa: E402
from k3cuda.launch_step import step_program  # noqa: E402
from k3cuda.phases import Grid  # noqa: E402
from k3cuda.plan import build_plan  # noqa: E402
from k3cuda.runtime import cuda_jit  # noqa: E402

TP = 16
PLAN = build_plan(K3Config.from_json(RELEASED_FOLDER), TP)
MOST = 96   # of 18 warps five are in one of the four parts of a multiprocessor


@pytest.mark.parametrize("arch", cuda_jit.ARCHS)
@pytest.mark.parametrize(("rows", "ranks"), [(1, 1), (8, 1), (1, TP)])
def test_a_step_compiles_without_spills(arch, rows, ranks):
    """All kinds of phases: what one of them keeps in registers beyond its phases, the others lack. Of one rank alone, and of one among others."""
    program = step_program(PLAN, rows, Grid(cluster=2), cache=1, rank_parts=TP, ranks=ranks)
    assert cuda_jit.compile_cuda(ls.source(program), arch, strict=True).resources()["product_chain"].registers <= MOST
