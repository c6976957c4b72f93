"""Orders, waits, bytes and hops that follow from the tables."""
import dataclasses
from pathlib import Path

import pytest

from k3cuda import plan as plan_module
from k3cuda import stages
from k3cuda.config import RELEASED_FOLDER, K3Config
from k3cuda.dataflow import hops, layer_kinds, markdown, op_bytes
from k3cuda.errors import ConfigError, PlanError
from k3cuda.plan import build_plan, instance
from k3cuda.runtime.made_config import made_config
from k3cuda.stages import STAGES
from models import FEW_PIECES

DATAFLOW = Path(__file__).parents[1] / "docs" / "dataflow.md"


@pytest.fixture(scope="module")
def cfg():
    return K3Config.from_json(RELEASED_FOLDER)


@pytest.fixture(scope="module")
def plan(cfg):
    return build_plan(cfg, 16)


def ancestors(ops):
    """For each operation the set of all that it follows, through any number of waits."""
    out = []
    for op in ops:
        out.append(set(op.waits).union(*(out[w] for w in op.waits)))
    return out


def test_every_conflict_is_ordered(plan):
    """Two operations that touch the same memory, one of them writing, are never free to run at once. The first 200 repeat later."""
    ops = plan.ops[:200]
    before = ancestors(ops)
    for i, op in enumerate(ops):
        mine = {instance(n, op) for n in op.stage.inputs}, {instance(n, op) for n in op.stage.outputs}
        for j in range(i):
            other = {instance(n, ops[j]) for n in ops[j].stage.inputs}, {instance(n, ops[j]) for n in ops[j].stage.outputs}
            if mine[1] & (other[0] | other[1]) or mine[0] & other[1]:
                assert j in before[i], f"{op} may run beside {ops[j]}"


def test_no_wait_is_implied_by_another(plan):
    before = ancestors(plan.ops)
    for op in plan.ops:
        for w in op.waits:
            assert not any(w in before[other] for other in op.waits), str(op)


def test_phases_are_one_more_than_the_latest_wait(plan):
    for op in plan.ops:
        assert op.phase == 1 + max((plan.ops[w].phase for w in op.waits), default=-1)


def test_phases_of_the_moe_half(plan):
    phase = {op.stage.name: op.phase for op in plan.ops if op.layer == 1}
    assert phase["moe_in_exchange"] == phase["route"] - 1 == phase["moe_in"] + 1
    assert phase["moe_down"] == phase["expert_up"] + 1


def test_snapshots_are_seen_when_the_release_sees_them(plan, cfg):
    """Pre-attention mix of layer i: ceil(i/12) blocks, the open sum not yet pushed; pre-FFN mix: floor(i/12) + 1."""
    for op in plan.ops:
        if op.stage.name == "attn_mix":
            assert op.num_blocks == -(-op.layer // cfg.attn_res_block_size)
        if op.stage.name == "ffn_mix":
            assert op.num_blocks == op.layer // cfg.attn_res_block_size + 1
    assert next(op for op in plan.ops if op.stage.name == "output_mix").num_blocks == 8


def test_bytes_of_one_rank_equal_the_published_table(cfg, plan):
    """Counted by hand from the release's index: 8.571 and 19.092 GB of weights read at TP16 by 1 and 8 rows, 17.132 and 38.175 at TP8."""
    for ranks, want in ((16, (8.571, 19.092)), (8, (17.132, 38.175))):
        ops = build_plan(cfg, ranks).ops
        for rows, gb in zip((1, 8), want):
            assert abs(sum(op_bytes(cfg, op, ranks, rows) for op in ops) / 1e9 - gb) < 1e-3


def test_hops(cfg, plan):
    assert layer_kinds(cfg).keys() == {"KDA + dense MLP", "KDA + MoE", "MLA + MoE"}
    assert [hops(plan, layer)[0] for layer in (0, 1, 3)] == [3, 5, 5]
    assert hops(build_plan(cfg, 1), 1) == (0, 0)


def test_a_model_that_does_not_divide_is_refused(cfg):
    with pytest.raises(ConfigError, match="1, 2, 4, 8, 16 fit"):
        build_plan(cfg, 6)


def with_stage(name, **changes):
    return tuple(dataclasses.replace(s, **changes) if s.name == name else s for s in STAGES)


@pytest.mark.parametrize("stages_, message", [
    (with_stage("o_proj", reads=("mixer_out", "mla_out_gate")), "reads 'mla_out_gate' before any stage writes it"),
    (with_stage("kda_in", reads=("attn_inn",)), "names buffer 'attn_inn'"),
    (with_stage("o_proj", weights=("mla_q_b_proj",)), "names weight 'mla_q_b_proj', which its layer does not have"),
    (with_stage("o_proj", weights=()), "no stage uses weight 'o_proj' of layer 0"),
    (with_stage("route", reads=("router_logits", "expert_act")), "reads 'expert_act' before any stage writes it"),
    (tuple(s for s in STAGES if s.name != "kda_mix"), "reads 'mixer_out' before"),
    (with_stage("latent_up", reads=("routed_normed",)), "nothing reads 'shared_parts'"),
], ids=["unwritten", "unknown-buffer", "absent-weight", "unused-weight", "too-early", "no-writer", "unread"])
def test_tables_that_contradict_themselves(monkeypatch, cfg, stages_, message):
    monkeypatch.setattr(plan_module, "STAGES", stages_)
    monkeypatch.setattr(stages, "STAGES", stages_)
    with pytest.raises(PlanError, match=message):
        build_plan(cfg, 16)


def test_dataflow_page_is_the_printed_one(cfg):
    assert DATAFLOW.read_text(encoding="utf-8") == markdown(cfg), "write it again: k3cuda plan --markdown > docs/dataflow.md"


def test_the_page_says_what_ranks_lack():
    """And counts the bytes of what they hold in its place: one of sixteen ranks has as many of the heads' as one of four."""
    page = markdown(FEW_PIECES, 16)
    assert "Of 16 ranks not all have a piece of num_attention_heads (pieces: 4)" in page and "not all have" not in markdown(made_config(), 16)
    heads = {op.stage.name: op for op in build_plan(FEW_PIECES, 16).ops if op.stage.name in ("kda_mix", "o_proj")}
    assert all(op_bytes(FEW_PIECES, op, 16, 1) == op_bytes(FEW_PIECES, op, 4, 1) for op in heads.values())


@pytest.mark.parametrize("tp", [1, 2])
def test_every_stage_stands_in_its_own_part_of_the_page(tp):
    page = markdown(made_config(), tp)
    start, end = (page[page.index(f"## {head} of the step"):].split("\n## ")[0] for head in ("Start", "End"))
    assert "`embed_sum`" in start and "`output_mix`" not in start
    assert "`output_mix`" in end and "`lm_head`" in end
