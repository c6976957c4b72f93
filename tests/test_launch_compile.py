"""The single launch compiles for every architecture, within its registers and without spills."""
import pytest

pytest.importorskip("cuda.bindings", reason="no CUDA line installed; install k3cuda[cu13] or k3cuda[cu12]")

from k3cuda import launch_source as ls  # noqa: E402
from k3cuda.buffers import KV_BYTES  # noqa: E402
from k3cuda.cli.model_argument import config_of  # noqa: E402
from k3cuda.config import RELEASED_FOLDER, K3Config  # noqa: E402
from k3cuda.draft_config import ATTN_RES, PREFIX  # noqa: E402
from k3cuda.emit_sizes import H200_SMS  # noqa: E402
from k3cuda.launch_step import hop_kinds, step_program  # noqa: E402
from k3cuda.phases import Grid  # noqa: E402
from k3cuda.plan import Taps, build_plan  # noqa: E402
from k3cuda.runtime import cuda_jit  # noqa: E402
from k3cuda.runtime.launch_program import BUCKETS  # noqa: E402

TP = 16
PLAN = build_plan(K3Config.from_json(RELEASED_FOLDER), TP)
MOST = 96   # of 20 warps five are in one of the four parts of a multiprocessor


def registers(plan, rows, arch, ranks=1, hop_cycles=0, **shape):
    """Of a kernel without spills."""
    program = step_program(plan, rows, Grid(cluster=2), cache=1, rank_parts=plan.tp, ranks=ranks)
    return cuda_jit.compile_cuda(ls.source(program, hop_kinds=hop_kinds(plan, program), hop_cycles=hop_cycles, **shape), arch, strict=True).resources()["product_chain"].registers


ARCHS = cuda_jit.ARCHS


@pytest.mark.parametrize(("rows", "ranks", "arch"), [(1, 1, arch) for arch in ARCHS] + [(8, 1, arch) for arch in ARCHS] + [(1, TP, ARCHS[0])])
def test_a_step_compiles_without_spills(rows, ranks, arch):
    """All kinds of phases: what one of them keeps in registers beyond its phases, the others lack. Of one rank alone, and of one among others."""
    assert registers(PLAN, rows, arch, ranks) <= MOST


@pytest.mark.parametrize("cache", KV_BYTES.values(), ids=KV_BYTES)
@pytest.mark.parametrize(("model", "ranks"), [("kimi-k3", TP), ("demo", 1)])
def test_every_bucket_has_room_for_its_ring(model, ranks, cache):
    """The shape of the launch alone: what doesn't fit must be known where a way is chosen, not at a step's compilation."""
    for rows in BUCKETS:
        program = step_program(build_plan(config_of(model), ranks), rows, Grid(sms=H200_SMS // 2 * 2, cluster=2), cache=cache, rank_parts=ranks)
        assert cuda_jit.compile_cuda(ls.constants(program), ARCHS[0]).cubin, rows


def test_so_does_one_with_a_bf16_cache():
    program = step_program(PLAN, 8, Grid(cluster=2), cache=2, rank_parts=TP)
    found = cuda_jit.compile_cuda(ls.source(program), ARCHS[0], strict=True).resources()["product_chain"]
    assert found.registers <= MOST


def test_so_does_one_whose_hops_take_longer():
    assert registers(PLAN, 8, ARCHS[0], hop_cycles=4950) <= MOST


@pytest.mark.parametrize(("rows", "arch"), [(1, ARCHS[-1]), (8, ARCHS[0])])
def test_so_does_one_that_notes_times(rows, arch):
    assert registers(PLAN, rows, arch, stamped=True) <= MOST


@pytest.mark.parametrize(("rows", "stream", "arch"), [(1, PREFIX, ARCHS[0]), (8, ATTN_RES, ARCHS[-1])])
def test_so_does_one_of_a_whole_model_that_a_draft_reads(rows, stream, arch):
    """Several leaves of w2, and leaves of an odd number of steps."""
    assert registers(build_plan(config_of("demo"), 1, Taps((2, 4, 7), stream)), rows, arch) <= MOST
