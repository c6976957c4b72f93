"""Projected steps: their bytes and their way of carrying a measurement over are held to what was measured on a GPU; terms, ranges and sources."""
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
    assert 1.8 < eight.terms[0].low / sixteen.terms[0].low < 2 and eight.terms[2].low == sixteen.terms[2].low
    for p in (eight, sixteen):
        low, high = p.ms
        assert 0 < low < high and p.tokens_a_second == (1e3 * 64 / high, 1e3 * 64 / low)
    assert len(projection.project(PLANS[1], BY_ROWS[1]).terms) == 2   # one rank has no hops


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
