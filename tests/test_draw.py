"""The draw itself, greedy choice, and log-probabilities."""
import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from sampling_cases import MARGIN, coarse, filters, params, rows, wild

from k3cuda.reference import sample
from k3cuda.reference.numerics import F32
from k3cuda.reference.sample import law, log_softmax, most_likely, pick, sample_row, tree_levels
from k3cuda.runtime.sampling import Draw, Drawn, SamplingParams


@settings(max_examples=300)
@given(rows(coarse, most=9), filters)
def test_draw_has_the_law(row, given_):
    p = params(**given_)
    w = law(row, p)
    grid = 512  # an interval of length p holds p x 512 points of the grid, give or take one
    counts = np.bincount([pick(w, F32(i / grid)) for i in range(grid)], minlength=len(row))
    assert np.all(np.abs(counts - grid * (w / w.astype(float).sum())) <= 1.01)
    assert np.all(counts[w == 0] == 0)


@settings(max_examples=300)
@given(rows(st.one_of(st.just(0.0), st.floats(2.0**-149, 1, width=32)), most=70), st.integers(0, (1 << 24) - 1), st.data())
def test_pick_is_the_inverse_cdf_in_id_order_and_has_mass(w, bits, data):
    w[data.draw(st.integers(0, len(w) - 1))] = 1  # as the likeliest token always has
    u = F32(bits * 2.0**-24)
    token = pick(w, u)
    assert w[token] > 0
    cumulative, total = np.cumsum(w.astype(float)), w.astype(float).sum()
    assert cumulative[token] - w[token] - MARGIN * total <= u * total <= cumulative[token] + MARGIN * total


def test_pick_never_ends_on_a_token_without_mass_at_the_end_of_the_line():
    # u x total rounds up to what the left part of the tree holds, and nothing follows it.
    last = F32(1 - 2.0**-24)
    for w in ([1, 0], [0, 1, 0, 0], [1e-45, 0, 0], [0.1, 0.2, 0.3, 0, 0], [0, 0, 0, 1e-40, 0]):
        for u in (F32(0), F32(0.5), last):
            assert F32(w[pick(np.array(w, F32), u)]) > 0


def test_sampled_tokens_pass_a_chi_square_test():
    row = np.log(np.array([0.4, 0.25, 0.15, 0.1, 0.06, 0.04], F32))
    p, n = params(seed=3), 6000
    counts = np.bincount([sample_row(row, Draw(p, 3, position)).token_id for position in range(n)], minlength=6)
    expected = n * np.exp(row.astype(float))
    assert ((counts - expected) ** 2 / expected).sum() < 25.7  # 5 degrees of freedom, 1 in 10,000; the seed is fixed


@given(rows(wild))
def test_greedy_takes_the_lowest_id_of_the_largest(row):
    for given_ in ({"temperature": 0}, {"temperature": 0, "top_k": 3, "min_p": 0.5}, {"top_p": 0}):
        assert sample_row(row, Draw(SamplingParams(**given_), 0, 0)).token_id == row.tolist().index(row.max())


@pytest.mark.parametrize("row", [[0.0], [-1e30], [3.4e38]])
def test_one_token_vocabulary(row):
    for given_ in ({}, {"temperature": 0}, {"top_k": 1, "top_p": 0.1, "min_p": 1}):
        drawn = sample_row(np.array(row, F32), Draw(params(**given_, logprobs=5), 1, 1))
        assert drawn == Drawn(0, 0.0, ((0, 0.0),))


@given(rows(wild, most=8), st.sampled_from([math.nan, math.inf, -math.inf]), st.data())
def test_a_row_that_is_not_finite_gives_no_token(row, poison, data):
    row[data.draw(st.integers(0, len(row) - 1))] = poison
    for given_ in ({}, {"temperature": 0}, {"logprobs": 3, "top_p": 0.5}):
        assert sample_row(row, Draw(params(**given_), 1, 1)) == Drawn(None)


@settings(max_examples=60)
@given(rows(coarse), filters, st.integers(0, 2**64 - 1), st.integers(0, 2**20))
def test_a_draw_depends_on_nothing_but_its_arguments(row, given_, seed, position):
    draw = Draw(params(**given_, logprobs=3), seed, position, prompt_ids=[0], output_ids=[0, 0])
    alone = sample_row(row, draw)
    batch = np.random.default_rng(0).standard_normal((5, len(row))).astype(F32)
    batch[3] = row
    for other in batch[[0, 4]]:
        sample_row(other, Draw(draw.params, seed ^ 1, position + 1))
    assert sample_row(batch[3], draw) == alone
    assert sample_row(np.asfortranarray(batch)[3], draw) == alone  # strided: values decide, not the layout
    assert sample_row(row, Draw(draw.params, seed, position, prompt_ids=np.array([0]), output_ids=(0, 0))) == alone


# Log-probabilities

@given(rows(wild), st.integers(0, 20))
def test_logprobs_are_the_raw_log_softmax(row, count):
    drawn = sample_row(row, Draw(params(temperature=2, top_k=1, repetition_penalty=0.5, logprobs=count), 0, 0, output_ids=[0]))
    z = row.astype(float) - row.max()
    want = np.maximum(z - np.log(np.exp(z).sum()), -float(sample.LARGEST))
    assert drawn.logprob == pytest.approx(want[drawn.token_id], rel=1e-6, abs=1e-6)  # F32 log and sum of at most 40 values
    assert len(drawn.top_logprobs) == min(count, len(row))
    got = log_softmax(row)
    assert list(drawn.top_logprobs) == sorted(((i, float(x)) for i, x in enumerate(got)), key=lambda t: (-t[1], t[0]))[:count]
    assert all(math.isfinite(x) for _, x in drawn.top_logprobs)  # JSON has no infinity


def test_logprobs_stay_finite():
    drawn = sample_row(np.array([3.4e38, -3.4e38], F32), Draw(params(temperature=0, logprobs=2), 0, 0))
    assert drawn.top_logprobs == ((0, 0.0), (1, float(-sample.LARGEST)))


def test_logprobs_are_left_out_unless_asked_for():
    row = np.zeros(4, F32)
    assert sample_row(row, Draw(params(temperature=0), 0, 0)) == Drawn(0, None, None)
    assert sample_row(row, Draw(params(temperature=0, logprobs=0), 0, 0)).top_logprobs == ()
    assert most_likely(row, 2) == ((0, 0.0), (1, 0.0))


def test_a_vocabulary_of_the_release_takes_every_path():
    row = np.random.default_rng(1).standard_normal(163_840).astype(F32) * F32(3)
    drawn = sample_row(row, Draw(params(top_p=0.95, min_p=1e-4, top_k=5000, repetition_penalty=1.1, logprobs=20), 9, 100_000,
                                 prompt_ids=range(1000), output_ids=range(500)))
    assert 0 <= drawn.token_id < len(row) and len(drawn.top_logprobs) == 20
    assert len(tree_levels(row)) == 19  # 163,840 leaves in a tree of 2^18
