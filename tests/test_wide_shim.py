"""Stages of a wide step under g++: their emitted kernels give every row the bytes of a step of 64 rows.

The shim has no clusters of blocks, so stages whose narrow kernel is one are left to tests/gpu/test_standard_wide.py.
"""
import ml_dtypes
import numpy as np
import pytest
from shim import host

pytest.importorskip("cupy", reason="no CUDA line installed; install k3cuda[cu13] or k3cuda[cu12]")   # ctypes' view of Step lies beside it

from host_step import Kernels, Memory  # noqa: E402

from k3cuda.buffers import BY_NAME, ROW_AXES  # noqa: E402
from k3cuda.emit import SUMMED_ROWS  # noqa: E402
from k3cuda.plan import build_plan  # noqa: E402
from k3cuda.runtime.made_config import made_config  # noqa: E402
from k3cuda.runtime.made_model import MadeCheckpoint  # noqa: E402
from k3cuda.stages import GATHER, SCATTER, STACK  # noqa: E402

pytestmark = pytest.mark.skipif(host.COMPILER is None, reason="needs g++")
WIDE, NARROW, WIDEST = 128, 64, 512   # the widest: two tiles of tokens share the expansion of an expert's weights
# Neighbours of one slot, none across row 64; padding at the end, since a step has nothing behind it.
SLOT = np.repeat([3, 0, 5, 1, 7, 9, 2, 4], [37, 1, 9, 17, 1, 3, 52, 6])
LIVE = len(SLOT)
# stage -> kernels left out, because another stage's test has them or they need clusters
STAGES = {"kda_in": (), "kda_mix": (), "mla_in": (), "mla_q": (), "dense_up": (), "dense_down": (), "moe_in": (), "route": ("shared_down", "shared_down_tree"),
          "expert_up": (), "moe_down": (), "latent_up": ()}
CHOICE = {"route": NARROW}   # the choice's blocks come first; the shared expert's are left out
CHAIN = ("route", "expert_up", "moe_down")   # the list of experts passes between them


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wide")
    stages = {WIDE: STAGES, NARROW: STAGES, WIDEST: {s: STAGES[s] for s in (*CHAIN, "kda_mix")}}
    found = {rows: Kernels(rows, 1, True, of_rows, folder / str(rows), CHOICE) for rows, of_rows in stages.items()}
    return {rows: (k, Memory(k.plan, k.source)) for rows, k in found.items()}


def values(name, shape, rng):
    """Random contents of a buffer as a step would find it."""
    b = BY_NAME[name]
    x = rng.standard_normal(shape).astype(np.float32) * (1 if name != "kda_state" else 0.3)
    if name == "kda_beta":
        x = 1 / (1 + np.exp(-x))
    if name == "expert_weights":
        x = np.abs(x)
    return x.astype(ml_dtypes.bfloat16).view(np.uint16) if b.dtype == "bf16" else x


def row_axis(name):
    return next((i for i, s in enumerate(BY_NAME[name].shape) if s in ROW_AXES), None)


def run(machine, stages, rows, given):
    """Puts the given rows of every buffer first, runs the latest operations of the stages; what those rows then hold in every output."""
    kernels, memory = machine
    memory.arena[:] = 0xFF   # NaN
    memory.buffer("row_slot")[:] = -1
    memory.buffer("row_slot")[:len(rows)] = SLOT[rows]
    for name, array in given.items():
        axis, target = row_axis(name), memory.buffer(name)
        if axis is None:
            target[...] = array
        else:
            target[(slice(None),) * axis + (slice(len(rows)),)] = array.take(rows, axis)
    outputs = {}
    for name in stages:
        op = kernels.last(name)
        kernels.run(op, memory)
        for out in op.stage.outputs:
            whole = memory.buffer(out)
            part = whole[op.kind_index] if BY_NAME[out].is_layered else whole
            axis = row_axis(out) - BY_NAME[out].is_layered
            outputs[out] = part.take(range(len(rows)), axis).copy()
    return outputs


@pytest.mark.parametrize("stages, wide", [((s,), WIDE) for s in STAGES if s not in CHAIN] + [(CHAIN, WIDE), (CHAIN, WIDEST), (("kda_mix",), WIDEST)],
                         ids=lambda x: "+".join(x) if isinstance(x, tuple) else str(x))
def test_rows_have_the_bytes_of_a_small_step(machines, stages, wide):
    rng, (kernels, memory) = np.random.default_rng(len(stages[0])), machines[wide]
    ops = [kernels.last(s) for s in stages]
    made = {out for op in ops for out in op.stage.outputs}
    inputs = dict.fromkeys(n for op in ops for n in op.stage.inputs if n not in made and n not in ("row_slot", "page_table"))
    given = {n: values(n, memory.buffer(n).shape, rng) for n in inputs}
    got = run(machines[wide], stages, np.arange(LIVE), given)
    for rows in (np.arange(64), np.arange(64, LIVE)):
        want = run(machines[NARROW], stages, rows, given)
        for name, array in want.items():
            if name == "shared_partial":
                continue   # left out
            axis = row_axis(name) - BY_NAME[name].is_layered
            mine = got[name].take(rows, axis)
            assert mine.tobytes() == array.tobytes(), (name, np.argwhere(mine != array)[:3], mine[mine != array][:3], array[mine != array][:3])
            if array.dtype == np.float32:
                assert np.isfinite(array).all() and array.std() > 0, name


# ---- several ranks: what a small step stacks is added up in place ----

EXCHANGES = {"embed": (), "embed_exchange": (), "embed_sum": (), "attn_exchange": (), "dense_exchange": (), "dense_sum": (), "moe_sum_exchange": ()}


def tree(parts):
    parts = list(parts)
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2])]
    return parts[0]


@pytest.mark.parametrize("tp, ride, rows", [(2, True, WIDE), (4, True, WIDE), (4, False, WIDE), (4, True, SUMMED_ROWS)])
def test_ranks_add_up_what_a_small_step_stacks(tmp_path, tp, ride, rows):
    kernels = Kernels(rows, tp, ride, EXCHANGES, tmp_path / "wide")
    ranks, rng = [Memory(kernels.plan, kernels.source, r) for r in range(tp)], np.random.default_rng(tp)
    for memory in ranks:
        memory.meet(ranks)
        memory.arena[:] = 0xFF
        memory.buffer("row_slot")[:] = 0
        memory.buffer("token_ids")[:] = np.arange(len(memory.buffer("token_ids"))) * 3 % 256

    def run(stage):
        for memory in ranks:
            kernels.run(kernels.last(stage), memory)

    for stage in ("attn_exchange", "dense_exchange", "moe_sum_exchange"):
        given = {}
        for move in kernels.last(stage).stage.moves:
            given[move] = [rng.standard_normal(m.buffer(move.source)[:rows].shape).astype(np.float32) for m in ranks]
            for memory, part in zip(ranks, given[move]):
                memory.buffer(move.source)[:rows] = part
        run(stage)
        for move, parts in given.items():
            for r, memory in enumerate(ranks):
                if move.how == STACK:
                    assert memory.buffer(move.source)[:rows].tobytes() == tree(parts).tobytes(), (stage, r)
                elif not ride:
                    assert move.how in (SCATTER, GATHER)
                    own = parts[0].shape[1] // tp
                    assert all((memory.buffer(move.target)[p, :rows] == part[:, r * own:(r + 1) * own]).all() for p, part in enumerate(parts))
    sums = [m.buffer("dense_partial")[:rows].copy() for m in ranks]
    run("dense_sum")
    assert all((m.buffer("ffn_out")[:rows] == s).all() for m, s in zip(ranks, sums))

    for stage in ("embed", "embed_exchange", "embed_sum"):
        run(stage)
    table = np.concatenate([kernels.source.rank_slices("embed_tokens", None, tp, r) for r in range(tp)]).astype(np.float32)
    for memory in ranks:
        np.testing.assert_array_equal(memory.buffer("ffn_out")[:rows], table[memory.buffer("token_ids")[:rows]])
        assert not memory.buffer("hidden")[:rows].any()


# ---- 64 rows of sixteen long leaves, which small steps multiply otherwise ----

LONG = made_config(hidden_size=16 * 18 * 16, num_hidden_layers=2, num_attention_heads=1, head_dim=128, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, q_lora_rank=16,
                   kv_lora_rank=64, intermediate_size=24, moe_intermediate_size=32, routed_expert_hidden_size=32, num_experts=4, num_experts_per_token=2,
                   full_attn_layers=[2], kda_layers=[1], vocab_size=40)


@pytest.mark.parametrize(("stages", "before"), [(("kda_in", "lm_head"), ""), (("dense_up", "mla_in", "moe_in", "lm_head"), "#define K3_SHIM_WGMMA\n")], ids=["mma", "wgmma"])
def test_long_leaves_of_64_rows_have_the_bytes_of_a_small_step(tmp_path, stages, before):
    plan, source, rng = build_plan(LONG, 1), MadeCheckpoint(LONG, seed=3), np.random.default_rng(5)
    machines = {rows: (Kernels(rows, 1, True, dict.fromkeys(stages, ()), tmp_path / str(rows), plan=plan, before=before), Memory(plan, source)) for rows in (NARROW, 8)}
    for stage in stages:
        kernels, memory = machines[NARROW]
        op = kernels.last(stage)
        assert [k for k, _ in kernels.launches(op)] == [stage, f"{stage}_tree"] and host.constants(kernels.library, f"k_{stage}_tree_launch", 1)[0] > 0
        given = {n: values(n, memory.buffer(n).shape, rng) for n in op.stage.inputs if n not in ("row_slot", "logit_rows")}
        got, rows = run(machines[NARROW], (stage,), np.arange(40), given), np.arange(32, 40)
        for name, array in run(machines[8], (stage,), rows, given).items():
            axis = row_axis(name) - BY_NAME[name].is_layered
            assert got[name].take(rows, axis).tobytes() == array.tobytes(), name
            assert np.isfinite(array.astype(np.float32)).all() and array.std() > 0, name
