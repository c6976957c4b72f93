"""A whole step in one launch under g++: from token ids to logits with the bytes of the standard path's kernels, and its programs."""
import ctypes

import numpy as np
import pytest
from shim import host

pytest.importorskip("cupy", reason="no CUDA line installed; install k3cuda[cu13] or k3cuda[cu12]")   # ctypes' view of Step lies beside it

from host_step import Kernels, Memory, held  # noqa: E402
from launch_shim import NOT_THERE  # noqa: E402
from step_launch import Step, StepLaunch  # noqa: E402

from k3cuda.config import RELEASED_FOLDER, K3Config  # noqa: E402
from k3cuda.draft_config import ATTN_RES, PREFIX  # noqa: E402
from k3cuda.emit import NO_PROBES, Probes, follows_collective  # noqa: E402
from k3cuda.errors import PlanError  # noqa: E402
from k3cuda.launch_operands import operand  # noqa: E402
from k3cuda.launch_source import LaunchArgs  # noqa: E402
from k3cuda.launch_step import hop_kinds, step_program  # noqa: E402
from k3cuda.packing import PACKED  # noqa: E402
from k3cuda.phases import Grid  # noqa: E402
from k3cuda.plan import Taps, build_plan  # noqa: E402
from k3cuda.runtime.launch_program import delayed_hops, launch_source  # noqa: E402
from k3cuda.runtime.made_config import made_config  # noqa: E402
from k3cuda.runtime.made_model import MadeCheckpoint  # noqa: E402

shim = pytest.mark.skipif(host.COMPILER is None, reason="needs g++")
TP = 4
# The first layer is dense, the third has latent attention; blocks open at the first and the third.
CFG = made_config(hidden_size=128, num_hidden_layers=4, num_attention_heads=4, head_dim=128, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, q_lora_rank=64,
                  kv_lora_rank=128, intermediate_size=512, moe_intermediate_size=128, routed_expert_hidden_size=64, attn_res_block_size=2, num_experts=16,
                  num_experts_per_token=4, full_attn_layers=[3], kda_layers=[1, 2, 4], vocab_size=256)
PLAN = build_plan(CFG, TP)
# A rank that holds all four leaves of w2, with leaves of an odd number of k-steps.
WHOLE = made_config(hidden_size=192, num_hidden_layers=4, num_attention_heads=2, head_dim=128, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
                    q_lora_rank=64, kv_lora_rank=64, intermediate_size=384, moe_intermediate_size=128, routed_expert_hidden_size=64, attn_res_block_size=2,
                    num_experts=32, num_experts_per_token=4, full_attn_layers=[3], kda_layers=[1, 2, 4], vocab_size=256)


class Both:
    """The standard path's kernels and the launch, of a bucket."""

    def __init__(self, plan, rows: int, folder, grid=Grid(sms=3), page: int = 128, hop_cycles: int = 0):
        self.plan, source = plan, MadeCheckpoint(plan.cfg)
        self.standard = Kernels(rows, plan.tp, True, {op.stage.name: () for op in plan.ops}, folder / "standard", plan=plan)
        self.program = step_program(plan, rows, grid, cache=2, rank_parts=plan.tp, page=page)
        self.launch = StepLaunch(plan, self.program, folder / "launch", hop_kinds=hop_kinds(plan, self.program), hop_cycles=hop_cycles)
        self.memories = [Memory(plan, source, slot_pages=2) for _ in range(2)]
        for memory in self.memories:
            memory.step.loopback = 1

    def run(self, step: Step, launches: int = 1):
        """(the standard path's memory, the launch's)."""
        for memory in self.memories:
            step.put(memory)
        for op in self.plan.ops:
            self.standard.run(op, self.memories[0])
        exchange, = self.launch.run(self.memories[1], launches=launches)
        assert (exchange == NOT_THERE).all()   # as the next launch must find it
        return self.memories


def check(step: Step, standard: Memory, launched: Memory) -> None:
    wanted, live = len(step.wanted), step.live
    logits, want = (m.buffer("logits")[:wanted] for m in (launched, standard))
    assert np.isfinite(want).all() and want.std() > 0.1 and (logits.view(np.uint32) == want.view(np.uint32)).all()
    for name in ("kda_qkv", "kda_k", "kda_v", "kda_decay", "kda_beta"):
        assert (launched.buffer(name)[:, :live] == standard.buffer(name)[:, :live]).all(), name
    for name in launched.session:
        assert launched.session[name].tobytes() == standard.session[name].tobytes(), name


@shim
@pytest.mark.parametrize(("rows", "live", "wanted", "context", "grid"), [(1, 1, (0,), 30, Grid(sms=3)), (4, 3, (0, 2), 60, Grid(sms=3)), (2, 2, (1,), 100, Grid(sms=4))])
def test_the_bytes_of_the_standard_path(tmp_path, rows, live, wanted, context, grid):
    """Behind three of four rows is padding, and not of all rows somebody wants logits. Pages of each program pass through its two places."""
    both, step = Both(PLAN, rows, tmp_path, grid), Step(CFG, rows, live, wanted, rows, context)
    assert both.program.words.shape[1] >= 3 * both.program.page
    check(step, *both.run(step, launches=2))   # the second one over records and a cache that have the rows already


@shim
@pytest.mark.parametrize(("rows", "live", "grid", "stream"), [(1, 1, Grid(sms=3), PREFIX), (1, 1, Grid(sms=3), ATTN_RES), (2, 2, Grid(sms=3), PREFIX), (4, 3, Grid(sms=4, cluster=2), ATTN_RES)])
def test_a_rank_that_holds_all_leaves_and_what_a_draft_model_reads(tmp_path, rows, live, grid, stream):
    """Behind a layer that a block opens behind, in a step's middle, and behind the last layer."""
    plan = build_plan(WHOLE, 1, Taps((0, 1, 3), stream))
    both, step = Both(plan, rows, tmp_path, grid), Step(WHOLE, rows, live, range(live), rows, 60)
    kinds = {k.name: k for k in both.program.kinds}
    assert kinds["moe_down"].leaves == 4 and kinds["kda_in"].steps == kinds["dense_down"].steps == 3
    standard, launched = both.run(step)
    check(step, standard, launched)
    taps = [held(memory, "taps")[:live].astype(np.float32) for memory in (standard, launched)]
    assert (taps[0] == taps[1]).all() and taps[0].std((0, 2)).min() > 0.1


@shim
def test_hops_that_take_longer_give_the_same_bytes(tmp_path):
    """Each block goes on waiting once in each phase behind a collective in which it has something to do."""
    both, step = Both(PLAN, 1, tmp_path, hop_cycles=50), Step(CFG, 1, 1, [0], 1, 30)
    check(step, *both.run(step))
    p, found = both.program, np.array((ctypes.c_uint32 * 32).in_dll(both.launch.library, "k3_hops"))
    want = np.zeros_like(found)
    for block, words in enumerate(p.words):
        for phase, at in enumerate(p.places(block)):
            want[p.weights[phase][0]] += int(words[at]) >> 16 > 0
    want[[i for i in range(32) if i not in hop_kinds(PLAN, p)]] = 0
    assert found.tolist() == want.tolist() and np.count_nonzero(want) == 7


@pytest.mark.parametrize(("rows", "ranks"), [(1, 1), (8, 1), (1, 16)])
def test_hops_are_those_of_the_standard_path(rows, ranks):
    """But that the embedding's sum is no phase of its own, and that attn_mix stands behind it in the first layer. A build without the probe has nothing of it."""
    plan = build_plan(K3Config.from_json(RELEASED_FOLDER), 16)
    program = step_program(plan, rows, Grid(sms=132, cluster=2), cache=1, rank_parts=16, ranks=ranks)
    assert {program.kinds[i].name for i in hop_kinds(plan, program)} == {"attn_mix_sums", "ffn_mix_sums", "kda_mix", "mla_q", "route", "routed_norm_sums", "dense_sum"}
    assert delayed_hops(plan, program) == sum(follows_collective(op.stage) for op in plan.ops) - 1 == 465
    plain, slow = (launch_source(plan, program, probes=probes) for probes in (NO_PROBES, Probes(hop_cycles=4950)))
    mask = sum(1 << i for i in hop_kinds(plan, program))
    assert "K3_LINK" not in plain and slow == f"#define K3_LINK_KINDS {mask}u\n#define K3_LINK_CYCLES 4950\n{plain}"


def test_one_rank_has_no_hops():
    plan = build_plan(WHOLE, 1)
    assert hop_kinds(plan, step_program(plan, 1, Grid(sms=3), cache=2, rank_parts=1)) == ()


@pytest.mark.parametrize("rows", [1, 8])
def test_the_program_of_the_released_model(rows):
    cfg = K3Config.from_json(RELEASED_FOLDER)
    plan = build_plan(cfg, 16)
    program = step_program(plan, rows, Grid(sms=132, cluster=2), cache=1, rank_parts=16)
    names = [step.name for step in program.steps]
    assert names[0] == "embed" and names[-1] == "lm_head" and {name: names.count(name) for name in ("dense_sum", "latent_up", "kda_mix", "mla_attend")} == {
        "dense_sum": 1, "latent_up": 92, "kda_mix": 69, "mla_attend": 24}
    assert not any(None in sources[:1] for sources in program.sources)          # the launch has no input
    assert names.count("attn_mix_sums") == 94 and program.steps[-1].layer == 93
    output = [step.extra for step in program.steps if step.layer == 93 and step.name != "lm_head"]
    assert {extra & 15 for extra in output} == {8} and not any(extra >> 4 for extra in output)   # all eight closed blocks, and no ninth
    for block, words in enumerate(program.words):
        places = program.places(block)
        pages = words.reshape(-1, program.page)
        used = max(places) // program.page + 1
        assert (pages[:used, 0] == np.arange(1, used + 1)).all() and all(at % program.page for at in places)
    for kind, layer in program.weights:
        found = operand(plan, program.kinds[kind], layer)
        assert found.packed is None or found.packed < len(PACKED[found.stage])
    assert ctypes.sizeof(LaunchArgs) <= 4096   # what every driver takes


def test_what_a_step_in_one_launch_cannot_have_is_refused():
    for plan, message in ((build_plan(CFG, TP, dcp=2), "has no cache that ranks hold together"), (build_plan(CFG, TP, Taps((1,), ATTN_RES)), "no phase makes the attn_res stream")):
        with pytest.raises(PlanError, match=message):
            step_program(plan, 1, Grid(sms=3), cache=2, rank_parts=TP, merged=True)
    with pytest.raises(PlanError, match="a phase has [0-9]+ words of a block's program, wanted at most 14"):
        step_program(PLAN, 1, Grid(sms=3), cache=2, rank_parts=TP, page=16)
    with pytest.raises(PlanError, match="lm_head of layer 2 is stage lm_head, which the plan has not there"):
        operand(PLAN, step_program(PLAN, 1, Grid(sms=3), cache=2, rank_parts=TP).kinds[-1], 2)
