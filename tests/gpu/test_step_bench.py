"""Benchmarks on a small model: every check passes on what runs, sees what does not, and probes do what they say."""
import pytest

pytestmark = pytest.mark.gpu
cp = pytest.importorskip("cupy", reason="CuPy holds the device's memory; install k3cuda[cu13] or k3cuda[cu12]")

from models import headdims  # noqa: E402

from k3cuda.emit import NO_PROBES, Probes  # noqa: E402
from k3cuda.errors import BenchmarkError  # noqa: E402
from k3cuda.runtime.cuda_bench import StepBench  # noqa: E402
from k3cuda.runtime.cuda_bench_checks import same_step  # noqa: E402

FORCED, DELAY_US = 7, 50.0
#          sequences, rows of each, context
SHAPES = ((1, 1, 100), (1, 8, 8), (32, 1, 70))


@pytest.fixture(scope="module")
def bench():
    made = StepBench(headdims().cfg, 4, 2, "fp8_e4m3")
    made.compile([s * n for s, n, _ in SHAPES], [NO_PROBES, Probes(forced_experts=FORCED), Probes(hop_cycles=round(DELAY_US * made.cycles_a_us))])
    yield made
    made.close()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_steps_pass_their_own_checks(bench, shape):
    bench.open(32, 128)
    bench.place(*shape)
    found = bench.step(walk=shape[0] == 1)
    assert found["ms"] >= found["floor_ms"] > 0 and found["rows"] == shape[0] * shape[1] and found["context"] == shape[2]
    assert found["checks"]["parts_read"] == 4 and found["checks"]["stale_exchange_buffers"]
    assert ("part_of_allowed_error" in found["checks"]) == (shape[0] == 1)
    stages = bench.stages()
    assert {"kda_in", "mla_attend", "expert_up"} <= {s["stage"] for s in stages} and all(s["us"] > 0 for s in stages)
    advances = shape[0] > 8
    assert ("kda_commit" in {s["stage"] for s in stages}) == (not advances) and ("same_states_as_commit" in found["checks"]) == advances
    assert [s["stage"] for s in bench.stages(["route"])] == ["route"]


def test_every_stage_finds_what_the_step_leaves(bench, monkeypatch):
    bench.open(1, 64)
    bench.place(1, 8, 8)
    want, found, graph = bench.replay(), [], bench.timer.graph
    monkeypatch.setattr(bench.timer, "graph", lambda launches: (found.append(bench.outputs()), graph(launches))[1])
    stages = bench.stages()
    for stage, got in zip(stages, found, strict=True):
        same_step(got, want, f"before {stage['stage']} is timed")


def test_a_step_behind_another_begins_where_that_one_did(bench):
    """Without stages between them, which put states back."""
    bench.open(1, 64)
    for rows in (1, 8, 1):
        bench.place(1, rows, 8)
        assert bench.step()["rows"] == rows


def test_forced_experts_are_read(bench):
    bench.open(1, 64, Probes(forced_experts=FORCED))
    bench.place(1, 8, 8)
    assert bench.step()["distinct_experts"] == FORCED


def test_delay_is_added_at_every_hop(bench):
    times = []
    for cycles in (0, round(DELAY_US * bench.cycles_a_us)):
        bench.open(1, 64, Probes(hop_cycles=cycles))
        bench.place(1, 8, 8)
        found = bench.step()
        times.append(found["ms"] * 1e3)
    assert found["delayed_hops"] > 10 and found["hop_delay_us"] == pytest.approx(DELAY_US, rel=0.01)
    # clocks are below the highest at times, so a delay counted in cycles may be longer
    assert found["delayed_hops"] * DELAY_US * 0.9 < times[1] - times[0] < found["delayed_hops"] * DELAY_US * 1.6


def test_state_that_moves_between_replays_is_seen(bench, monkeypatch):
    bench.open(1, 64)
    bench.place(1, 8, 8)
    monkeypatch.setattr(bench, "restore", lambda: None)
    with pytest.raises(BenchmarkError, match="the last timed step: logits of rows"):
        bench.step()


def test_a_place_that_nobody_wrote_is_seen(bench, monkeypatch):
    bench.open(1, 64)
    bench.place(1, 8, 8)
    replay = bench.replay

    def leave_one_out():
        found = replay()
        bench.memory.buffer("attn_parts")[3, 2, 5] += 1
        cp.cuda.Device().synchronize()
        return found

    monkeypatch.setattr(bench, "replay", leave_one_out)
    with pytest.raises(BenchmarkError, match=r"attn_parts: the places of ranks \[3\]"):
        bench.step()
