"""Ranks that outnumber a model's heads, and the pieces of what lies between two products, under g++: whole steps, and a draft's, have the bytes of one rank."""
import numpy as np
import pytest
from drafts import made
from shim import host

pytest.importorskip("cupy", reason="no CUDA line installed; install k3cuda[cu13] or k3cuda[cu12]")   # ctypes' view of Step lies beside it
pytestmark = pytest.mark.skipif(host.COMPILER is None, reason="needs g++")

from host_step import SLOTS, Kernels, Memory  # noqa: E402
from test_draft_shim import Chain, whole_way  # noqa: E402

from k3cuda.plan import build_plan  # noqa: E402
from k3cuda.runtime.made_config import made_config  # noqa: E402
from k3cuda.runtime.made_model import MadeCheckpoint  # noqa: E402

# A layer of either kind. Over 16 ranks the heads fall into 4 pieces, the dense MLP into 8, the experts' inner size into 2.
CFG = made_config(num_hidden_layers=2, num_attention_heads=4, head_dim=128, v_head_dim=128, qk_nope_head_dim=64, full_attn_layers=[2], intermediate_size=384,
                  moe_intermediate_size=64)
IDS, SLOT = [5, 17, 80], 2


def step(tp, rows, folder):
    """The ranks' memories behind a step over `IDS` and its commit."""
    plan, source = build_plan(CFG, tp), MadeCheckpoint(CFG, seed=3)
    kernels = Kernels(rows, tp, True, {op.stage.name: () for op in plan.ops + plan.commit}, folder / str(tp), plan=plan)
    ranks = [Memory(plan, source, rank) for rank in range(tp)]
    given = {"token_ids": IDS, "row_slot": [SLOT] * len(IDS), "row_position": range(len(IDS)), "logit_rows": range(len(IDS)), "row_accepted": [1] * len(IDS)}
    for memory in ranks:
        memory.meet(ranks)
        memory.poison()
        memory.buffer("page_table")[:] = np.arange(SLOTS)[:, None]
        for name, values in given.items():
            memory.buffer(name)[:] = -1 if name in ("row_slot", "logit_rows") else 0
            memory.buffer(name)[:len(IDS)] = values
    for op in kernels.ops:
        for memory in ranks:
            kernels.run(op, memory)
    return ranks


def test_a_step_and_its_commit(tmp_path):
    one, = step(1, 4, tmp_path)
    want = one.buffer("logits")[:len(IDS)]
    assert np.isfinite(want).all() and want.std() > 0.1
    for tp in (8, 16):
        ranks = step(tp, 4, tmp_path)
        assert all(m.buffer("logits")[:len(IDS)].tobytes() == want.tobytes() for m in ranks)
        for name in ("kda_state", "conv_state"):
            axis = one.tables.buffers[name].cut
            states = np.concatenate([m.buffer(name) for m in ranks], axis=axis)
            whole, behind = np.split(states, [one.buffer(name).shape[axis]], axis=axis)
            assert whole.tobytes() == one.buffer(name).tobytes() and whole.any() and not behind.any()


@pytest.mark.parametrize("family, changes", [("mla", {"num_attention_heads": 2}), ("gqa", {})])
def test_a_draft(tmp_path, family, changes):
    """Of two heads, or two heads of keys, over four ranks."""
    chains = {}
    for tp in (1, 4):
        (tmp_path / str(tp)).mkdir()
        chains[tp] = Chain(made(family, changes), tmp_path / str(tp), tp=tp)
        whole_way(chains[tp], 1)
    one, = chains[1].memories
    for memory in chains[4].memories:
        for name in ("draft_logits", "draft_ids", "draft_confidence"):
            assert memory.buffer(name).tobytes() == one.buffer(name).tobytes(), name
