"""Projected steps: their bytes and their way of carrying a measurement over are held to what was measured on a GPU; terms, ranges and sources."""
import json
import re
import sys

import pytest
from command import ROOT, k3

from k3cuda.config import RELEASED_FOLDER, K3Config
from k3cuda.plan import build_plan
from k3cuda.runtime import projection
from k3cuda.runtime.tiny_random import open_tiny_random

sys.path.insert(0, str(ROOT / "scripts"))
import make_measured  # noqa: E402
from first_layers import first_layers  # noqa: E402

PLANS = {tp: build_plan(K3Config.from_json(RELEASED_FOLDER), tp) for tp in (1, 8, 16)}
MEASURED = projection.read("measured")["steps"]
BY_ROWS = {m["rows"]: m for m in MEASURED}
GPU = projection.read("measured")["gpu"]


def test_what_was_measured_is_that_of_the_benchmark():
    assert make_measured.TARGET.read_text(encoding="utf-8") == make_measured.measured(), "run scripts/make_measured.py"


@pytest.mark.parametrize("measured", MEASURED, ids=lambda m: str(m["rows"]))
def test_bytes_are_those_that_the_benchmark_counted_on_the_device(measured):
    """The benchmark counts experts layer by layer, we have their mean: hence not to the byte."""
    assert projection.step_floor(PLANS[measured["tp"]], measured) == pytest.approx(measured["floor_bytes"], rel=1e-3)


@pytest.mark.parametrize("measured", MEASURED, ids=lambda m: str(m["rows"]))
def test_on_the_measured_gpu_the_terms_are_the_measured_time(measured):
    got = projection.project(PLANS[measured["tp"]], measured, GPU)
    without_hops = [t for t in got.terms if "hops" not in t.name]
    assert measured["ranks"] == "loopback" and len(without_hops) == 2
    for side in ("low", "high"):
        assert sum(getattr(t, side) for t in without_hops) == pytest.approx(measured["ms"], rel=2e-3)


@pytest.mark.parametrize(("rows", "like"), [(1, 8), (8, 1)])
def test_one_measured_step_foretells_another(rows, like):
    """What a GPU takes beyond bytes, carried from one row count to another as it is carried to another GPU: the range has the measured time.

    64 rows are another regime, where products and not their waiting take the time: nothing is foretold from them, nor they from others.
    """
    low, high = (sum(getattr(t, side) for t in projection.project(PLANS[16], BY_ROWS[rows], GPU, BY_ROWS[like]).terms[:2]) for side in ("low", "high"))
    assert low < BY_ROWS[rows]["ms"] < high and high < 2 * low, "a range that has everything says nothing"


def test_more_ranks_read_less():
    eight, sixteen = (projection.project(PLANS[tp], BY_ROWS[64]) for tp in (8, 16))
    assert 1.8 < eight.terms[0].low / sixteen.terms[0].low < 2 and eight.terms[2].low < sixteen.terms[2].low   # who has more neighbours receives more
    for p in (eight, sixteen):
        low, high = p.ms
        assert 0 < low < high and p.tokens_a_second == (1e3 * 64 / high, 1e3 * 64 / low)
    assert len(projection.project(PLANS[1], BY_ROWS[1]).terms) == 2   # one rank has no hops


def test_the_line_through_measured_exchanges():
    """No measured one is further from it than a quarter of a microsecond and a tenth."""
    start, rate = projection.exchange()
    for e in projection.read("measured")["exchanges"]["times"]:
        assert start + e["bytes"] / rate == pytest.approx(e["us"], rel=0.1, abs=0.25)


def test_hops_receive_what_was_measured():
    """Of two ranks: their columns of a row where they are gathered, a whole row of sums where they are stacked."""
    plan = build_plan(PLANS[1].cfg, 2)
    got = {op.stage.name: nbytes for op, nbytes in zip(projection.hops(plan), projection.received(plan, 8))}
    assert got["attn_exchange"] == 8 * 7168 * 4 and got["moe_out_exchange"] == 8 * 7168 * 4 // 2


@pytest.mark.parametrize("measured", projection.read("measured")["rank_steps"], ids=lambda m: f"{m['tp']} ranks, {m['layers']} layers, {m['rows']} rows")
def test_steps_of_real_ranks_lie_in_their_range(measured):
    """Projected from a step of one rank of 16 and from exchanges alone."""
    low, high = projection.project(build_plan(first_layers(measured["layers"]), measured["tp"]), measured, GPU, BY_ROWS[measured["rows"]]).ms
    assert low < measured["ms"] < high


def test_steps_of_real_ranks_are_those_over_the_exchange(tmp_path):
    for name in ("step", "collectives-2"):
        (tmp_path / f"{name}.json").write_bytes((make_measured.FOLDER / f"{name}.json").read_bytes())
    steps = [{"how": how, "ranks": how, "rows": 8, "experts": 90, "floor_ms": 2.0, "ms": ms} for how, ms in (("nccl", 4.0), ("peer", 3.0), ("looped_back", 2.5))]
    (tmp_path / "rank_steps.json").write_text(json.dumps({"ranks": 2, "layers": 12, "ceiling_tb_s": 4.5, "steps": steps}))
    (tmp_path / "rank_steps-trace.json").write_text("[]")
    found, = json.loads(make_measured.measured(tmp_path))["rank_steps"]
    assert (found["tp"], found["layers"], found["rows"], found["ms"]) == (2, 12, 8, 3.0)
    plan = build_plan(first_layers(12), 2)
    assert len(projection.project(plan, found, GPU, BY_ROWS[8]).terms) == 3


def test_the_printed_projection():
    text = k3("plan", "--project").stdout.decode()
    assert text.startswith("A projection: nothing here was run on GB300.")
    assert len(re.findall(r"^(?:8|16) ranks, ", text, re.M)) == 2 * len(MEASURED)
    notes = dict(re.findall(r"^\[(\d+)\] (.+)$", text, re.M))
    assert set(re.findall(r" \[(\d+)\]$", text, re.M)) == set(notes) and all(len(note) > 20 for note in notes.values())
    for block in text.split("\n\n")[:-1]:
        ranges = [(float(a), float(b)) for a, b in re.findall(r"^ +([\d.]+) to +([\d.]+) ms", block, re.M)]
        *terms, whole = ranges
        for i in (0, 1):
            assert sum(t[i] for t in terms) == pytest.approx(whole[i], abs=0.03)


@pytest.mark.parametrize(("words", "code", "text"), [
    (["tiny-random", "--project"], 3, "the steps that were measured have"), (["--project", "--tp", "5"], 3, "5"), (["--project", "--markdown"], 2, "exclude each other")])
def test_what_cannot_be_projected(words, code, text):
    assert text in k3("plan", *words, code=code).stderr.decode()


def test_another_model_is_refused():
    with pytest.raises(projection.ConfigError):
        projection.check_model(open_tiny_random().cfg)
