"""Declarations are the truth: each stage reads exactly what it says, writes exactly what it says, and uses all of it.

Barriers, arenas and kernels are derived from stages.py and draft_stages.py, so a declaration that lies must fail here.
"""
import functools

import numpy as np
import pytest
from drafts import Alone, ask, made, random_taps
from models import backend, headdims, open_slot, step_rows

from k3cuda.buffers import ROW_AXES
from k3cuda.draft_stages import DRAFT_STAGES
from k3cuda.plan import instance
from k3cuda.runtime.drafting import Drafting
from k3cuda.runtime.made_draft import MadeDraft, made_draft_json
from k3cuda.stages import STAGES

TP = 2  # with one rank collectives fall away and their targets are aliases
# Integers a stage follows to an address: they get another valid value, not a wild one. Slots change places, and the first row becomes nobody's.
_NEXT = {"token_ids": lambda x: (x + 3) % 90, "row_position": lambda x: x + 1, "logit_rows": lambda x: np.where(x > 0, x - 1, x),
         "row_slot": lambda x: np.where((x >= 0) & (np.arange(len(x)) > 0), x.max() - x, -1), "row_accepted": np.ones_like, "expert_ids": lambda x: (x + 1) % 16,
         "page_table": lambda x: np.where(x >= 0, (x + 1) % x.size, x), "seq_seed": lambda x: x + 1, "row_last": lambda x: x - 1}


class Machine:
    """A program that has just run, so that every buffer holds valid values: `ops` with the sizes of their step, `counts`."""

    def __init__(self, program, ops, counts):
        self.program, self.ops, self.counts = program, ops, counts
        self.saved = [{name: a[name].copy() for name in program.table} for a in program.arenas]

    def run(self, op, rank=1, change=None):
        """Runs `op` on one rank from the saved contents, altered by `change(name, array)`; the arena before and after."""
        arena = self.program.arenas[rank]
        for name, saved in self.saved[rank].items():
            arena[name][...] = saved
            if change:
                change(name, arena[name])
        before = {name: x.copy() for name, x in arena.items()}
        call = self.program.bind(op, rank, self.counts)
        with np.errstate(all="ignore"):
            call.stage(call.m, call.w, call.b, op)
        return before, arena

    def op(self, stage):
        """The stage's operation in the latest layer that has it: its buffers hold what that layer left."""
        return [op for op in self.ops if op.stage is stage][-1]


def target(**draft):
    """11 rows in three slots; `draft`: changes to the config of one that taps this target."""
    source = headdims()
    drafting = Drafting(MadeDraft(made_draft_json(source.cfg, **draft), source.cfg)) if draft else None
    be = backend(source, TP, drafting=drafting)
    for slot in range(4):
        open_slot(be, slot)
    be.step(step_rows((0, 0, [5, 9, 14]), (1, 0, [30, 6])))
    be.commit(np.ones(5, bool))
    rows = step_rows((1, 2, [8, 177, 99, 204]), (0, 3, [40, 141, 42, 143, 44, 145]), (2, 0, [17]))
    be.step(rows)
    for arena in be.arenas:
        arena["row_accepted"][:] = 0
        arena["row_accepted"][[0, 1, 4, 5, 6, 10]] = 1
    return Machine(be.program, be.plan.ops + be.plan.commit, dict.fromkeys(ROW_AXES, 11))


def split():
    """A cache that both ranks hold together, and 9 rows behind the first page of three slots: every row sees positions of either rank."""
    be = backend(headdims(), TP, dcp=TP)
    for slot in range(3):
        be.open_slot(slot, [slot])
        be.step(step_rows((slot, 0, np.arange(60) % (40 + slot))))
        be.commit(np.ones(60, bool))
        be.step(step_rows((slot, 60, np.arange(8) + slot)))
        be.commit(np.ones(8, bool))
    be.step(step_rows((1, 68, [8, 177, 99]), (0, 68, [40, 141, 42, 143, 44]), (2, 68, [17])))
    return Machine(be.program, be.plan.ops, dict.fromkeys(ROW_AXES, 9))


def draft(family, is_context=False, **changes):
    """Two sequences, a block of 7 rows each; `is_context`: the 9 rows whose context was made last instead."""
    source = made(family, {"num_key_value_heads": 4} | changes)
    alone = Alone(source, tp=TP, slots=2, num_drafts=5)
    for slot in range(2):
        alone.commit(slot, 0, random_taps(source.cfg, 12, slot))
    if is_context:
        alone.commit(1, 12, random_taps(source.cfg, 9, 5), accepted=6)
        return Machine(alone.draft.program, alone.draft.plan.context, {"rows": 9, "decode_rows": 9})
    alone.draft.propose([ask(slot, 3 + slot, 12, seed=slot, temperature=0.7) for slot in range(2)])
    return Machine(alone.draft.program, alone.draft.plan.ops, {"rows": 14, "decode_rows": 14, "head_rows": 10, "seqs": 2})


# A window counts from the anchor's position, and both ways a row sees up to its block's last: such a layer uses all that it declares.
WINDOW = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8, "sliding_window_non_causal": True}
GATED = {"mla_use_nope": True, "mla_use_output_gate": True, "hidden_act": "situ", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0,
         "rope_parameters": None}
BUILD = {
    "target": target, "split": split, "prefix": lambda: target(target_layer_ids=[0, 2]),
    "attn_res": lambda: target(target_layer_ids=[1, 3], aux_hidden_stream="attn_res"),
    "mla": lambda: draft("mla", **WINDOW), "gated": lambda: draft("mla", **GATED), "gqa": lambda: draft("gqa", confidence_head_with_markov=False, **WINDOW),
    "mla-context": lambda: draft("mla", True), "normed-context": lambda: draft("mla", True, fc_norm=True), "gqa-context": lambda: draft("gqa", True),
}
machine = functools.cache(lambda name: BUILD[name]())


def cases():
    """(machine, stage): every stage of every table once, in the first machine that runs it."""
    left = {s.name: s for s in STAGES + DRAFT_STAGES if not s.moves}
    for name in BUILD:
        for stage in dict.fromkeys(op.stage for op in machine(name).ops):
            if left.pop(stage.name, None):
                yield name, stage
    assert not left, f"no machine here runs {sorted(left)}"


CASES = [pytest.param(*case, id=case[1].name) for case in cases()]


def poison(array, value):
    array[...] = value if array.dtype == np.float32 else np.iinfo(array.dtype).max - (value > 0)


def part_of(m, name, array, op):
    return array[op.kind_index] if len(instance(name, op, m.program.table)) > 1 else array


def live(m, name, array, op):
    """The rows of the step in a buffer that has rows; padding may hold anything."""
    part, shape = part_of(m, name, array, op), m.program.table[name].shape
    return part[tuple(slice(m.counts.get(s)) for s in shape[len(shape) - part.ndim:])]


def live_outputs(m, op, arena):
    return {name: live(m, name, arena[name], op).copy() for name in op.stage.outputs}


@pytest.mark.parametrize("which, stage", CASES)
def test_a_stage_needs_only_what_it_declares(which, stage):
    """What it does not read is NaN, what it writes holds one of two poisons: the result is the same, complete and finite."""
    m = machine(which)
    op = m.op(stage)
    results = []
    for value in (np.nan, 1e30):
        def spoil(name, array):
            if name not in stage.inputs:
                poison(array, value)

        _, arena = m.run(op, change=spoil)
        results.append(live_outputs(m, op, arena))
    for name in stage.outputs:
        first, second = (r[name] for r in results)
        assert np.isfinite(first).all(), name
        np.testing.assert_array_equal(first, second, err_msg=name)


@pytest.mark.parametrize("which, stage", CASES)
def test_a_stage_writes_only_what_it_declares(which, stage):
    m = machine(which)
    op = m.op(stage)
    before, arena = m.run(op)
    for name, array in arena.items():
        if name not in stage.outputs:
            np.testing.assert_array_equal(array, before[name], err_msg=name)
        elif part_of(m, name, array, op) is not array:  # other layers' parts of a layered buffer
            others = np.arange(len(array)) != op.kind_index
            np.testing.assert_array_equal(array[others], before[name][others], err_msg=name)


@pytest.mark.parametrize("which, stage", CASES)
def test_a_stage_uses_every_buffer_it_declares(which, stage):
    """A read that changes nothing is a dependency that costs a barrier for nothing."""
    m = machine(which)
    op = m.op(stage)

    def unwritten(name, array):
        if name in stage.writes:
            array[...] = 7  # so that a row which is no longer written differs from one that is

    _, arena = m.run(op, change=unwritten)
    want = live_outputs(m, op, arena)
    for name in stage.inputs:
        def change(other, array):
            unwritten(other, array)
            if other == name:
                array[...] = _NEXT[name](array) if name in _NEXT else array * np.float32(1.5) + np.float32(0.25)

        before, arena = m.run(op, change=change)
        got = live_outputs(m, op, arena)
        assert any(not np.array_equal(got[n], want[n]) for n in want), f"{name} is read, but nothing depends on it"


@pytest.mark.parametrize("which, stage", CASES)
def test_a_stage_uses_every_weight_it_declares(which, stage):
    m = machine(which)
    op = m.op(stage)
    _, arena = m.run(op)
    want = live_outputs(m, op, arena)
    held = m.program.weights[1][op.layer]
    for name in stage.weights:
        if name.endswith("_scale"):
            continue  # part of the ExpertMatrix of its pair
        saved = held[name]
        held[name] = Doubled(saved) if hasattr(saved, "packed") else saved * np.float32(1.5) + np.float32(0.1)
        try:
            _, arena = m.run(op)
            got = live_outputs(m, op, arena)
        finally:
            held[name] = saved
        assert any(not np.array_equal(got[n], want[n]) for n in want), f"{name} is declared, but nothing depends on it"


class Doubled:
    """Every expert of an ExpertMatrix, doubled."""

    def __init__(self, matrix):
        self.matrix = matrix

    def __getitem__(self, expert):
        return self.matrix[expert] * 2


def test_reads_are_read_only_and_undeclared_names_do_not_exist():
    m = machine("target")
    call = m.program.bind(m.op(next(s for s in STAGES if s.name == "o_proj")), 0, dict.fromkeys(ROW_AXES, 8))
    with pytest.raises(ValueError, match="read-only"):
        call.b.mixer_out[:] = 0
    with pytest.raises(AttributeError):
        call.b.attn_in
    with pytest.raises(AttributeError):
        call.w.lm_head
