"""Declarations are the truth: each stage reads exactly what it says, writes exactly what it says, and uses all of it.

Barriers, arenas and kernels are derived from stages.py, so a declaration that lies must fail here.
"""
import numpy as np
import pytest

from k3cuda.buffers import BUFFERS, BY_NAME
from k3cuda.plan import instance
from k3cuda.stages import STAGES
from models import backend, headdims, open_slot, step_rows

TP = 2  # with one rank collectives fall away and their targets are aliases
LOCAL = [s for s in STAGES if not s.moves]
# Integers a stage follows to an address: they get another valid value, not a wild one.
_NEXT = {"token_ids": lambda x: (x + 3) % 200, "row_slot": lambda x: np.where(np.arange(len(x)) < 10, 3 - x, -1), "row_position": lambda x: x + 1,
         "page_table": lambda x: np.where(x >= 0, (x + 1) % 8, x), "logit_rows": lambda x: np.where(x > 0, x - 1, x),
         "row_accepted": lambda x: 1 - x, "expert_ids": lambda x: (x + 1) % 16}


class Machine:
    """A backend that has just run a step of 11 rows in three slots, so that every buffer holds valid values."""

    def __init__(self):
        self.be = backend(headdims(), TP)
        for slot in range(4):
            open_slot(self.be, slot)
        self.be.step(step_rows((0, 0, [5, 9, 14]), (1, 0, [30, 6])))
        self.be.commit(np.ones(5, bool))
        self.rows = step_rows((1, 2, [8, 177, 99, 204]), (0, 3, [40, 141, 42, 143, 44, 145]), (2, 0, [17]))
        self.be.step(self.rows)
        for arena in self.be.arenas:
            arena["row_accepted"][:] = 0
            arena["row_accepted"][[0, 1, 4, 5, 6, 10]] = 1
        self.saved = [{b.name: a[b.name].copy() for b in BUFFERS} for a in self.be.arenas]

    def run(self, op, rank=1, change=None):
        """Runs `op` on one rank from the saved contents, altered by `change(name, array)`; the arena before and after."""
        arena = self.be.arenas[rank]
        for name, saved in self.saved[rank].items():
            arena[name][...] = saved
            if change:
                change(name, arena[name])
        before = {name: x.copy() for name, x in arena.items()}
        n = len(self.rows)
        call = self.be._bind(op, rank, n, n)
        with np.errstate(all="ignore"):
            call.stage(call.m, call.w, call.b, op)
        return before, arena

    def op(self, stage):
        """The stage's operation in the latest layer that has it: its buffers hold what that layer left."""
        return [op for op in self.be.plan.ops + self.be.plan.commit if op.stage is stage][-1]


@pytest.fixture(scope="module")
def machine():
    return Machine()


def poison(array, value):
    array[...] = value if array.dtype == np.float32 else np.iinfo(array.dtype).max - (value > 0)


def part_of(name, array, op):
    return array[op.kind_index] if len(instance(name, op)) > 1 else array


def live(name, array, op, n):
    """The rows of the step in a buffer that has rows; padding may hold anything."""
    part, shape = part_of(name, array, op), BY_NAME[name].shape
    shape = shape[len(shape) - part.ndim:]
    axis = next((i for i, s in enumerate(shape) if s in ("rows", "head_rows")), None)
    return part if axis is None else part.take(range(n), axis)


def live_outputs(machine, op, arena):
    return {name: live(name, arena[name], op, len(machine.rows)).copy() for name in op.stage.outputs}


@pytest.mark.parametrize("stage", LOCAL, ids=lambda s: s.name)
def test_a_stage_needs_only_what_it_declares(machine, stage):
    """What it does not read is NaN, what it writes holds one of two poisons: the result is the same, complete and finite."""
    op = machine.op(stage)
    results = []
    for value in (np.nan, 1e30):
        def spoil(name, array):
            if name not in stage.inputs:
                poison(array, value)

        _, arena = machine.run(op, change=spoil)
        results.append(live_outputs(machine, op, arena))
    for name in stage.outputs:
        first, second = (r[name] for r in results)
        assert np.isfinite(first).all(), name
        np.testing.assert_array_equal(first, second, err_msg=name)


@pytest.mark.parametrize("stage", LOCAL, ids=lambda s: s.name)
def test_a_stage_writes_only_what_it_declares(machine, stage):
    op = machine.op(stage)
    before, arena = machine.run(op)
    for name, array in arena.items():
        if name not in stage.outputs:
            np.testing.assert_array_equal(array, before[name], err_msg=name)
        elif part_of(name, array, op) is not array:  # other layers' parts of a layered buffer
            others = np.arange(len(array)) != op.kind_index
            np.testing.assert_array_equal(array[others], before[name][others], err_msg=name)


@pytest.mark.parametrize("stage", LOCAL, ids=lambda s: s.name)
def test_a_stage_uses_every_buffer_it_declares(machine, stage):
    """A read that changes nothing is a dependency that costs a barrier for nothing."""
    op = machine.op(stage)

    def unwritten(name, array):
        if name in stage.writes:
            array[...] = 7  # so that a row which is no longer written differs from one that is

    _, arena = machine.run(op, change=unwritten)
    want = live_outputs(machine, op, arena)
    for name in stage.inputs:
        def change(other, array):
            unwritten(other, array)
            if other == name:
                array[...] = _NEXT[name](array) if name in _NEXT else array * np.float32(1.5) + np.float32(0.25)

        before, arena = machine.run(op, change=change)
        got = live_outputs(machine, op, arena)
        assert any(not np.array_equal(got[n], want[n]) for n in want), f"{name} is read, but nothing depends on it"


@pytest.mark.parametrize("stage", LOCAL, ids=lambda s: s.name)
def test_a_stage_uses_every_weight_it_declares(machine, stage):
    op = machine.op(stage)
    _, arena = machine.run(op)
    want = live_outputs(machine, op, arena)
    held = machine.be._weights[1][op.layer]
    for name in stage.weights:
        if name.endswith("_scale"):
            continue  # part of the ExpertMatrix of its pair
        saved = held[name]
        held[name] = Doubled(saved) if hasattr(saved, "packed") else saved * np.float32(1.5) + np.float32(0.1)
        try:
            _, arena = machine.run(op)
            got = live_outputs(machine, op, arena)
        finally:
            held[name] = saved
        assert any(not np.array_equal(got[n], want[n]) for n in want), f"{name} is declared, but nothing depends on it"


class Doubled:
    """Every expert of an ExpertMatrix, doubled."""

    def __init__(self, matrix):
        self.matrix = matrix

    def __getitem__(self, expert):
        return self.matrix[expert] * 2


def test_reads_are_read_only_and_undeclared_names_do_not_exist(machine):
    op = machine.op(next(s for s in STAGES if s.name == "o_proj"))
    call = machine.be._bind(op, 0, 8, 8)
    with pytest.raises(ValueError, match="read-only"):
        call.b.mixer_out[:] = 0
    with pytest.raises(AttributeError):
        call.b.attn_in
    with pytest.raises(AttributeError):
        call.w.lm_head
