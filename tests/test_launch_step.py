"""A whole step in one launch under g++: from token ids to logits with the bytes of the standard path's kernels, and its programs."""
from dataclasses import replace

import numpy as np
import pytest
from shim import host

pytest.importorskip("cupy", reason="no CUDA line installed; install k3cuda[cu13] or k3cuda[cu12]")   # ctypes' view of Step lies beside it

from host_step import Kernels, Memory  # noqa: E402
from launch_shim import NOT_THERE  # noqa: E402
from step_launch import Step, StepLaunch  # noqa: E402

from k3cuda.launch_step import step_program  # noqa: E402
from k3cuda.phases import Grid  # noqa: E402
from k3cuda.plan import build_plan  # noqa: E402
from k3cuda.runtime.made_config import made_config  # noqa: E402
from k3cuda.runtime.made_model import MadeCheckpoint  # noqa: E402

shim = pytest.mark.skipif(host.COMPILER is None, reason="needs g++")
TP = 4
# The first layer is dense, the third has latent attention; blocks open at the first and the third.
CFG = made_config(hidden_size=128, num_hidden_layers=4, num_attention_heads=4, head_dim=128, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, q_lora_rank=64,
                  kv_lora_rank=128, intermediate_size=512, moe_intermediate_size=128, routed_expert_hidden_size=64, attn_res_block_size=2, num_experts=16,
                  num_experts_per_token=4, full_attn_layers=[3], kda_layers=[1, 2, 4], vocab_size=256)
PLAN = build_plan(CFG, TP)


class Both:
    """The standard path's kernels and the launch, of a bucket."""

    def __init__(self, rows: int, folder, grid=Grid(sms=3), page: int = 128):
        self.rows, source = rows, MadeCheckpoint(CFG)
        self.standard = Kernels(rows, TP, True, {op.stage.name: () for op in PLAN.ops}, folder / "standard", plan=PLAN)
        self.program = step_program(PLAN, rows, grid, cache=2, rank_parts=TP, page=page)
        self.launch = StepLaunch(PLAN, self.program, folder / "launch")
        self.memories = [Memory(PLAN, source, slot_pages=2) for _ in range(2)]
        for memory in self.memories:
            memory.step.loopback = 1

    def run(self, step: Step, launches: int = 1):
        """(the standard path's memory, the launch's)."""
        for memory in self.memories:
            step.put(memory)
        for op in PLAN.ops:
            self.standard.run(op, self.memories[0])
        exchange = self.launch.run(self.memories[1], launches)
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
@pytest.mark.parametrize(("rows", "live", "wanted", "context"), [(1, 1, (0,), 30), (4, 3, (0, 2), 60)])
def test_the_bytes_of_the_standard_path(tmp_path, rows, live, wanted, context):
    """Behind the third of four rows is padding, and of one row nobody wants logits. Three pages of each program pass through the two places."""
    both, step = Both(rows, tmp_path), Step(CFG, rows, live, wanted, rows, context)
    check(step, *both.run(step))
