"""What a step in one launch notes of its phases: every part of every block once and in its order, the bytes of the program, and no other result."""
import json
from xml.etree import ElementTree

import numpy as np
import pytest
from shim import host

pytest.importorskip("cupy", reason="no CUDA line installed; install k3cuda[cu13] or k3cuda[cu12]")   # ctypes' view of Step lies beside it

from host_step import Memory  # noqa: E402
from step_launch import Step, StepLaunch  # noqa: E402
from test_launch_step import CFG, PLAN, TP  # noqa: E402
from trace_checks import check_bytes, check_parts  # noqa: E402

from k3cuda import launch_source as ls  # noqa: E402
from k3cuda.launch_step import step_program  # noqa: E402
from k3cuda.launch_trace import ROLES, LaunchTrace, phases_of  # noqa: E402
from k3cuda.phases import Grid  # noqa: E402
from k3cuda.runtime.made_model import MadeCheckpoint  # noqa: E402

shim = pytest.mark.skipif(host.COMPILER is None, reason="needs g++")
ROWS, BLOCKS = 2, 4


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """(trace of a whole step, one of its third layer, memories behind steps that were and were not stamped)."""
    folder = tmp_path_factory.mktemp("trace")
    program = step_program(PLAN, ROWS, Grid(sms=BLOCKS, cluster=2), cache=2, rank_parts=TP, page=128)
    step, memories, traces = Step(CFG, ROWS, ROWS, range(ROWS), 7, 70), [], []
    stamped, plain = (StepLaunch(PLAN, program, folder / str(on), stamped=on) for on in (True, False))
    for launch, layers in ((stamped, None), (stamped, range(2, 3)), (plain, None)):
        memory, phases = Memory(PLAN, MadeCheckpoint(CFG), slot_pages=2), phases_of(program, layers)
        memory.step.loopback = 1
        step.put(memory)
        words = np.zeros((BLOCKS, len(phases), len(ls.STAMPS)), np.uint64)
        clocks, issued = np.zeros((BLOCKS, 2, 2), np.uint64), np.zeros((BLOCKS, ls.ISSUE_BINS), np.uint32)
        launch.run(memory, stamps=(phases.start, words, clocks, issued))
        memories.append(memory)
        traces.append(LaunchTrace(program, phases.start, words, clocks, issued))
    assert not traces[2].words.any() and not traces[2].clocks.any() and not traces[2].issued.any()   # of a build that notes nothing
    return traces[0], traces[1], memories


@shim
def test_every_part_is_there_once_and_in_its_order(traced):
    trace, program = traced[0], traced[0].program
    check_parts(trace, range(program.phases))
    for phase, sources in enumerate(program.sources):   # nothing is read before somebody has begun to make it
        for source in (s for s in sources if s is not None):
            assert max(p.input_here for p in trace.parts if p.phase == phase) >= min(p.begins for p in trace.parts if p.phase == source)


@shim
def test_bytes_are_those_of_the_program(traced):
    check_bytes(traced[0], CFG, cache_bytes=2)


@shim
def test_the_step_has_the_same_bytes(traced):
    stamped, _, plain = traced[2]
    assert stamped.buffer("logits")[:ROWS].tobytes() == plain.buffer("logits")[:ROWS].tobytes() and np.isfinite(plain.buffer("logits")[:ROWS]).all()
    for name in stamped.session:
        assert stamped.session[name].tobytes() == plain.session[name].tobytes(), name


@shim
def test_a_trace_of_some_layers_has_no_others(traced):
    trace = traced[1]
    of_layer = [i for i, s in enumerate(trace.program.steps) if s.layer == 2]
    assert trace.words.shape[1] == of_layer[-1] - of_layer[0] + 1
    check_parts(trace, range(of_layer[0], of_layer[-1] + 1))


@shim
def test_files_are_whole(traced):
    trace = traced[0]
    events = json.loads(json.dumps(trace.chrome()))
    bars = [e for e in events if e["ph"] == "X"]
    assert len([e for e in bars if e["tid"] < 2]) == len(trace.parts) and all(e["dur"] >= 0 and e["ts"] >= 0 for e in bars)
    assert sum(e["args"]["bytes"] for e in bars if ROLES[e["tid"]] == "producers") == sum(p.copied for p in trace.parts)
    assert {e["pid"] for e in bars} == set(range(BLOCKS)) and {e["args"]["name"] for e in events if e["name"] == "thread_name"} == set(ROLES)
    drawn = ElementTree.fromstring(trace.picture("a step", 4.5e12))
    assert len(drawn.findall("{http://www.w3.org/2000/svg}rect")) == len(trace.parts) and "MB copied" in "".join(drawn.itertext())
    table = trace.medians()
    assert set(table) == {s.name for s in trace.program.steps} and all(v >= 0 for k in table.values() for name, v in k.items() if name.startswith("block_"))
