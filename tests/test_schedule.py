"""Schedules of the single launch: all work once, no deadlock, the table's bytes; and a model of time that knows what was measured."""
import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from command import k3
from k3cuda.config import RELEASED_FOLDER, K3Config
from k3cuda.dataflow import op_bytes
from k3cuda.errors import PlanError
from k3cuda.phases import ARRANGEMENTS, BY_STAGE, MERGED, Grid, Phase, Wait
from k3cuda.plan import build_plan
from k3cuda.schedule import Schedule, build, check
from k3cuda.timeline import exchange_us, simulate

HANDOVER = json.loads((Path(__file__).parent / "data" / "handover.json").read_text(encoding="utf-8"))
LAYERS = 5      # dense, two and one of KDA, one of latent attention: every kind of layer stands behind every other


@pytest.fixture(scope="module")
def cfg():
    return K3Config.from_json(RELEASED_FOLDER)


def short(plan):
    return replace(plan, ops=tuple(op for op in plan.ops if op.layer is None or op.layer < LAYERS))


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("how", [BY_STAGE, MERGED], ids=["by stage", "merged"])
def test_a_schedule_reads_what_the_table_says_once(cfg, tp, how):
    plan = short(build_plan(cfg, tp))
    schedule = build(plan, 1, arrangement=how, experts=16, context=0)
    units = sum(sum(p.units) for p in schedule.phases)
    states = sum(p.name == "kda_mix" for p in schedule.phases) * 96 // tp * 128 * 128 * 4
    # Norm weights, taps and biases are not streamed; tiles are padded to 16 rows: both below a hundredth.
    assert units - states == pytest.approx(sum(op_bytes(cfg, op, tp, 1) for op in plan.ops), rel=0.01)
    done = [unit for program in schedule.programs for unit in program]
    assert len(done) == len(set(done)) == sum(len(p.units) for p in schedule.phases)


def test_the_busiest_block_of_the_whole_step_has_little_more_than_its_share(cfg):
    schedule = build(short(build_plan(cfg, 16)), 8, experts=107, context=8192)
    loads = [sum(schedule.phases[phase].units[unit] for phase, unit in program) for program in schedule.programs]
    assert max(loads) < 1.06 * np.mean(loads)    # single phases are up to a third apart: what the next ones make up for


def test_blocks_read_only_their_part_of_a_vector(cfg):
    schedule = build(short(build_plan(cfg, 16)), 1, arrangement=BY_STAGE, experts=16, context=8192)
    for at, phase in enumerate(schedule.phases):
        if phase.parts > 1:
            for program in schedule.programs:
                assert len({unit % phase.parts for p, unit in program if p == at}) <= 1, phase
    kda_in = next(p for p in schedule.phases if p.name == "kda_in")
    assert [w.block_bytes for w in kda_in.waits] == [7168 * 2 // kda_in.parts]


@pytest.fixture
def small():
    phases = (Phase("a", 0, (16, 16, 16), ()), Phase("b", 0, (16, 16), (Wait(0, 64),)))
    return Schedule(Grid(sms=2), 1, phases, (((0, 0), (0, 1), (1, 0)), ((0, 2), (1, 1))))


def test_faults_are_found(small):
    check(small)
    first, second = small.programs
    for programs, message in ((((*first, (1, 1)), second), "which another block does"), ((first[:-1], second), "nobody does 1 units of b"),
                              (((*first, (1, 7)), second), "does not exist"), ((first, (second[1], second[0])), "block 0 stands at b .*which waits for a")):
        with pytest.raises(PlanError, match=message):
            check(replace(small, programs=programs))
    for waits in (Wait(1, 8), Wait(0, 8)):      # for itself, and for one that waits for it
        phases = (replace(small.phases[0], waits=(waits,)), small.phases[1])
        with pytest.raises(PlanError, match="2 blocks never end"):
            check(replace(small, phases=phases))


def measured(rows, exchanges, read_kb, layers=12):
    """The stream that was measured, as a schedule."""
    grid = Grid(sms=HANDOVER["sms"], ring=HANDOVER["ring_bytes"], copy=HANDOVER["copy_bytes"])
    phases, programs = [], [[] for _ in range(grid.sms)]
    for _ in range(layers):
        for i, mb in enumerate(HANDOVER["phases_mb"][rows]):
            for extra in range(HANDOVER["exchanges"][exchanges][i]):
                units = (grid.copy,) * round(mb * 1e6 / grid.copy) if not extra else (0,) * grid.sms
                waits = (Wait(len(phases) - 1, round(read_kb * 1024)),) if phases else ()
                for unit in range(len(units)):
                    programs[unit % grid.sms].append((len(phases), unit))
                phases.append(Phase("", 0, units, waits, chosen=not extra and i == HANDOVER["chosen_phase"]))
    return Schedule(grid, 1, tuple(phases), tuple(map(tuple, programs)))


@pytest.mark.parametrize("case", HANDOVER["measured"], ids=lambda c: f"{c['rows']}, {c['exchanges']} of {c['read_kb']} KB")
def test_the_model_knows_what_was_measured(case):
    schedule = measured(case["rows"], case["exchanges"], case["read_kb"])
    check(schedule)
    spans = simulate(schedule, HANDOVER["read_ceiling_tb_s"]).spans
    layer = len(spans) // 12
    assert (spans[-1].end - spans[2 * layer - 1].end) / 10 == pytest.approx(case["us_a_layer"], rel=0.05)


@pytest.mark.parametrize("read_kb", [7.25, 28.25, 29.0, 113.0])
def test_a_hand_over_on_an_idle_memory(read_kb):
    assert exchange_us(round(read_kb * 1024), 0) == pytest.approx(HANDOVER["alone_us"][str(read_kb)], rel=0.1)


def test_time_follows_what_it_should(cfg):
    plan = short(build_plan(cfg, 16))
    step = lambda how=MERGED, tb_s=4.48, hop_us=0.0, **grid: simulate(build(plan, 1, Grid(**grid), how, experts=16, context=8192), tb_s, hop_us)
    base = step()
    assert base.us > base.nbytes / 4.48e6 and base.ratio(4.48) == base.us / (base.nbytes / 4.48e6)
    assert step(BY_STAGE).us > base.us                          # fewer phases
    assert step(tb_s=8.0).us < base.us < step(hop_us=2.5).us
    assert step(ring=64 * 1024).us > base.us > step(ring=400 * 1024).us
    assert all(span.ready <= span.first <= span.end for span in base.spans)


def test_the_command_prints_and_draws_the_fastest(tmp_path):
    picture = tmp_path / "step.svg"
    shown = k3("plan", "tiny-random", "--timeline", "--experts", "4", "--context", "64", "--svg", picture).stdout.decode()
    table = shown.split("\n\n")[1].splitlines()
    times = {line[:22].strip(): float(line[22:30]) for line in table[1:]}
    assert set(times) == {*ARRANGEMENTS, "floor"}
    assert next(line for line in table if "shown" in line)[:22].strip() == min(ARRANGEMENTS, key=times.get)
    assert "A prediction, not a measurement" in shown and "\nlayer 4:" in shown
    bars = ElementTree.parse(picture).getroot().findall("{http://www.w3.org/2000/svg}rect")
    assert len(bars) > Grid().sms                               # more than a phase of every block
    assert b"--timeline" in k3("plan", "tiny-random", "--svg", picture, code=2).stderr
    assert b"--experts: found 1e+300, wanted up to 16," in k3("plan", "tiny-random", "--timeline", "--experts", "1e300", code=2).stderr
    assert b"0<=x<=1048576" in k3("plan", "tiny-random", "--timeline", "--context", 1 << 21, code=2).stderr
