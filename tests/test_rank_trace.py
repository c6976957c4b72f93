"""Traces of several ranks: clocks that run apart are brought together, and what carries a collective has a place between its neighbours."""
import sys

import numpy as np
import pytest
from command import ROOT

sys.path.append(str(ROOT / "scripts"))
pytest.importorskip("cuda.bindings", reason="no CUDA line installed; install k3cuda[cu13] or k3cuda[cu12]")
pytest.importorskip("cupy", reason="no CUDA line installed; install k3cuda[cu13] or k3cuda[cu12]")
import rank_trace  # noqa: E402

AHEAD, WAY = np.array([0, 7_300_123, -450_000]), 1_900   # of each rank's clock; what an exchange takes once the last rank has begun it


def test_clocks_are_as_far_apart_as_they_were_set():
    """Ranks begin exchanges at odd times; some take longer, none is shorter than the way."""
    rng = np.random.default_rng(0)
    begin = np.cumsum(rng.integers(3_000, 9_000, 500)) + rng.integers(0, 2_000, (3, 500))
    end = begin.max(0) + WAY + rng.integers(0, 600, (3, 500))
    ahead, off = rank_trace.apart(np.stack([begin, end], axis=2) + AHEAD[:, None, None])
    assert ahead[0] == 0 and all(abs(found - given) < 60 for found, given in zip(ahead, AHEAD)) and all(WAY <= x < WAY + 60 for x in off)


def test_a_collective_lies_between_its_neighbours_and_ranks_on_one_axis():
    never = 1 << 62
    times = np.array([[0, 1, 2, 8, 10], [never, 0, 0, never, 0], [9, 11, 15, 20, 22], [never, 0, 0, never, 0]])
    spans = rank_trace.launches(times, [False, True, False, True])
    assert spans.tolist() == [[0, 10], [10, 15], [9, 22], [22, 22]]
    names = [("kda_in", 2), ("kda_f_a_exchange", 2), ("kda_mix", 2), ("logits_exchange", None)]
    found = rank_trace.events(names, np.stack([1000 * spans + 5_000, 1000 * spans + 5_500]), layers=(2,))
    assert [(e["name"], e["pid"], e["ts"], e["dur"]) for e in found[2:4]] == [("kda_mix", 0, 9.0, 13.0), ("kda_in", 1, 0.5, 10.0)] and len(found) == 6
