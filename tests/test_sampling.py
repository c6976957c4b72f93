"""The sampler against plain oracles: random numbers, parameters, the tree of sums, filters."""
import logging
import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from sampling_cases import MARGIN, coarse, filters, params, rows, wild

from k3cuda.errors import ConfigError, UsageError
from k3cuda.reference import sample
from k3cuda.reference.numerics import F32
from k3cuda.reference.sample import law, penalised, philox4x32, tree_sum, uniform
from k3cuda.runtime import sampling
from k3cuda.runtime.sampling import STREAM_ACCEPT, STREAM_DRAFT, STREAM_SAMPLE, SamplingParams


# Random numbers

# kat_vectors of the Random123 distribution: zeros, ones, digits of pi.
@pytest.mark.parametrize("counter, key, want", [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1))])
def test_philox_known_answers(counter, key, want):
    assert philox4x32(counter, key) == want


def test_uniform_counts_position_stream_and_index_under_the_seed():
    assert (STREAM_ACCEPT, STREAM_SAMPLE, STREAM_DRAFT) == (0, 1, 2)  # settled: they are part of every stored result
    seed = 0x299F31D0A4093822
    for position in range(100):  # low bits are dropped, not rounded: half of these would tell
        assert uniform(seed, position, 1) == F32((philox4x32((position, 1, 0, 0), (0xA4093822, 0x299F31D0))[0] >> 8) * 2.0**-24)
    values = {float(uniform(s, p, t, i)) for s in (0, 1, 1 << 32) for p in (0, 1) for t in (0, 1, 2) for i in (0, 1)}
    assert len(values) == 3 * 2 * 3 * 2  # 24 bits: 36 numbers collide with probability 4e-5, and these are fixed
    assert all(0 <= v < 1 for v in values)


def test_uniform_is_flat():
    counts = np.bincount([int(uniform(5, p, STREAM_SAMPLE) * 16) for p in range(8000)], minlength=16)
    assert ((counts - 500) ** 2 / 500).sum() < 44.3  # chi-square, 15 degrees of freedom, 1 in 10,000


# Parameters

@pytest.mark.parametrize("field, value", [
    ("temperature", -0.1), ("temperature", 2.01), ("temperature", math.nan), ("temperature", math.inf), ("temperature", "1"),
    ("temperature", True), ("temperature", 10**400), ("top_p", -0.1), ("top_p", 1.1), ("top_p", math.nan), ("top_k", -2), ("top_k", 1.0),
    ("top_k", True), ("min_p", -0.1), ("min_p", 1.1), ("seed", -1), ("seed", 1 << 64), ("seed", 1.0), ("seed", "1"), ("max_tokens", 0),
    ("max_tokens", 1.5), ("max_tokens", True), ("presence_penalty", 2.1), ("frequency_penalty", -2.1), ("presence_penalty", None),
    ("repetition_penalty", 0), ("repetition_penalty", -1), ("repetition_penalty", 2.1), ("logprobs", 21), ("logprobs", -1),
    ("logprobs", True), ("stop", [""]), ("stop", ""), ("stop", ["x"] * 17), ("stop", [1]), ("stop", 5), ("stop_token_ids", [-1]),
    ("stop_token_ids", "12"), ("stop_token_ids", {3: 4}), ("stop_token_ids", [True]), ("stop_token_ids", [1.0]), ("stop_token_ids", 3), ("ignore_eos", 1),
    ("ignore_eos", "yes"), ("stop_in_reasoning", None)])
def test_params_refuse(field, value):
    with pytest.raises(UsageError) as e:
        SamplingParams(**{field: value})
    assert str(e.value).startswith(f"{field}: found ") and ", wanted " in str(e.value)
    assert len(str(e.value)) < 200  # a message stays readable whatever was given


def test_params_accept_numpy_scalars_and_single_strings():
    p = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(4), stop="x", stop_token_ids=np.array([3, 4, 3]), seed=(1 << 64) - 1, top_p=1)
    assert (p.temperature, p.top_k, p.stop, p.stop_token_ids, p.top_p) == (0.5, 4, ("x",), (3, 4), 1.0)
    assert type(p.top_k) is int and type(p.temperature) is float and type(p.stop_token_ids[0]) is int
    assert SamplingParams(stop=["x"] * 16).stop == ("x",) * 16
    assert hash(p) == hash(SamplingParams(**{f: getattr(p, f) for f in p.__dataclass_fields__}))


def test_params_resolve_request_then_checkpoint_then_default():
    config = {"temperature": 0.6, "top_p": 0.9, "top_k": None, "eos_token_id": 5, "repetition_penalty": 1.5}
    p = SamplingParams(top_p=0.5, top_k=-1).resolved(config)
    assert (p.temperature, p.top_p, p.top_k, p.min_p, p.repetition_penalty) == (0.6, 0.5, 0, 0.0, 1.0)
    assert p.resolved({"temperature": 2}) == p
    d = SamplingParams().resolved({})
    assert (d.temperature, d.top_p, d.top_k, d.min_p) == (1.0, 1.0, 0, 0.0)  # D4
    with pytest.raises(ConfigError, match="generation_config.json: temperature: found 'hot'"):
        SamplingParams().resolved({"temperature": "hot"})


@pytest.mark.parametrize("given_, warned", [({"temperature": 0}, False), ({"temperature": 1e-6}, True), ({"top_p": 0}, True),
                                            ({"temperature": 0, "top_p": 0}, False)])
def test_greedy_is_spelled_one_way_and_warned_once(given_, warned, caplog):
    sampling._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "k3cuda"):
        for _ in range(3):
            p = SamplingParams(**given_).resolved({})
    assert (p.temperature, p.top_p, p.greedy) == (0.0, 1.0, True)
    assert len(caplog.records) == warned
    assert not SamplingParams(temperature=1e-5).resolved({}).greedy  # the bound itself is sampled


# The tree

def recursive_sum(x):
    return x[0] if len(x) == 1 else F32(recursive_sum(x[:len(x) // 2]) + recursive_sum(x[len(x) // 2:]))


@given(rows(st.floats(0, 2.0**100, width=32), most=70))
def test_tree_sum_is_the_padded_binary_tree(x):
    padded = np.zeros(1 << (len(x) - 1).bit_length(), F32)
    padded[:len(x)] = x
    assert tree_sum(x).tobytes() == recursive_sum(padded).tobytes()


@given(rows(st.floats(0, 1, width=32)), st.data())
def test_tree_sum_never_falls_when_a_value_is_added(x, data):
    fewer = np.where(np.array(data.draw(st.lists(st.booleans(), min_size=len(x), max_size=len(x)))), x, F32(0))
    assert tree_sum(fewer) <= tree_sum(x)


def test_exp_does_not_depend_on_where_an_array_starts():
    # NumPy works in vectors: a value must not depend on its lane, or a row would depend on its place in a batch.
    x = np.linspace(-20, 0, 1000, dtype=F32)
    base = np.empty(1064, F32)
    for offset in range(17):  # one more than the widest vector holds
        view = base[offset:offset + 1000]
        view[:] = x
        assert np.exp(view).tobytes() == np.exp(x).tobytes()


# Filters: what is left, and with which weight

def oracle_law(row, p, prompt=(), output=()):
    """F64, sorted, one token at a time. Returns (probabilities, whether some decision was too close to judge)."""
    z = row.astype(float)
    for i in set(prompt) | set(output):
        z[i] = z[i] / p.repetition_penalty if z[i] > 0 else z[i] * p.repetition_penalty
    for i in set(output):
        z[i] -= p.frequency_penalty * list(output).count(i) + p.presence_penalty
    w = np.exp((z - z.max()) / p.temperature)
    near = bool(np.any(np.abs(w - p.min_p) < MARGIN) and 0 < p.min_p < 1)
    w[w < p.min_p] = 0
    order = sorted(range(len(w)), key=lambda i: -z[i])
    if 0 < p.top_k < len(w):
        kth = z[order[p.top_k - 1]]
        near |= any(0 < abs(z[i] - kth) < MARGIN * max(1, abs(kth)) for i in order)
        w[z < kth] = 0
    if p.top_p < 1:
        mass, last, total, kept = 0.0, 0.0, w.sum(), set()
        for i in order:
            if kept and mass >= p.top_p * total and w[i] < last:
                break
            near |= abs(mass - p.top_p * total) < MARGIN * total or bool(kept and 0 < last - w[i] < MARGIN * last)
            mass, last = mass + w[i], w[i]
            kept.add(i)
        near |= abs(mass - p.top_p * total) < MARGIN * total and len(kept) < np.count_nonzero(w)
        w[[i for i in order if i not in kept]] = 0
    return w / w.sum(), near


@settings(max_examples=400)
@given(rows(coarse), filters, st.data())
def test_law_is_that_of_the_sorted_oracle(row, given_, data):
    p = params(**given_)
    ids = st.lists(st.integers(0, len(row) - 1), max_size=12)
    prompt, output = data.draw(ids), data.draw(ids)
    want, near = oracle_law(row, p, prompt, output)
    w = law(penalised(row, p, prompt, output), p)
    if not near:
        judged = (want == 0) | (want > 1e-37)  # below lie the numbers that F32 rounds to 0
        assert np.array_equal((w > 0)[judged], (want > 0)[judged])
        np.testing.assert_allclose(w / w.astype(float).sum(), want, rtol=2e-5, atol=1e-9)  # F32: exp of up to 80 has 40 ulp


@settings(max_examples=400)
@given(rows(wild), filters)
def test_top_p_keeps_the_largest_threshold_that_reaches_the_mass(row, given_):
    p = params(**given_ | {"top_p": 0.9})
    before = law(row, SamplingParams(**{f: getattr(p, f) for f in ("temperature", "top_k", "min_p")}, top_p=1.0))
    wanted = F32(0.9) * tree_sum(before)
    taus = [v for v in sorted(set(before[before > 0].tolist())) if tree_sum(np.where(before >= F32(v), before, F32(0))) >= wanted]
    assert law(row, p).tobytes() == np.where(before >= F32(taus[-1]), before, F32(0)).tobytes()


def test_top_p_ends_where_the_mass_is_reached_exactly():
    w = np.array([0.5, 1, 0.25, 0.25], F32)  # every sum is exact
    assert sample._top_p(w, F32(0.5)).tolist() == [0, 1, 0, 0]
    assert sample._top_p(w, F32(0.75)).tolist() == [0.5, 1, 0, 0]
    assert sample._top_p(w, np.nextafter(F32(0.75), F32(1))).tolist() == w.tolist()  # equals come together


@given(rows(wild), filters)
def test_something_is_always_left_and_ties_stay_together(row, given_):
    p = params(**given_)
    w = law(row, p)
    assert w.dtype == F32 and np.all(np.isfinite(w)) and w.max() == 1
    for value in set(row.tolist()):
        assert len(set(w[row == F32(value)].tolist())) == 1


@given(rows(wild, most=12), st.integers(1, 12))
def test_top_k_keeps_k_and_what_ties_with_the_kth(row, k):
    with np.errstate(over="ignore"):
        z = row - row.max()
    kept = z >= np.sort(z)[::-1][min(k, len(z)) - 1]
    w = law(row, params(top_k=k, temperature=1))
    assert np.all(w[~kept] == 0)
    assert np.array_equal(w[kept], np.exp(z[kept]))


def test_filters_act_in_order():
    row = np.log(np.array([0.5, 0.3, 0.15, 0.05], F32))
    # min-p first: 0.05 < 0.2 x 0.5 goes; 0.83 of the 0.95 left is 0.789, reached by two; 0.83 of everything would need three.
    assert np.count_nonzero(law(row, params(min_p=0.2, top_p=0.83))) == 2
    assert np.count_nonzero(law(row, params(top_p=0.83))) == 3
    # top-k first: 0.62 of the 0.8 left is 0.496, reached by one; 0.62 of everything would need two.
    assert np.count_nonzero(law(row, params(top_k=2, top_p=0.62))) == 1
    assert np.count_nonzero(law(row, params(top_p=0.62))) == 2
    # temperature before min-p: at T = 0.5 the third has (0.15 / 0.5)^2 = 0.09 of the first; at T = 1 the last still has 0.1.
    assert np.count_nonzero(law(row, params(temperature=0.5, min_p=0.095))) == 2
    assert np.count_nonzero(law(row, params(min_p=0.095))) == 4


def test_penalties_are_those_of_the_formulas():
    row = np.array([2, -2, 1, 0, 3], F32)
    p = SamplingParams(repetition_penalty=2, frequency_penalty=0.5, presence_penalty=0.25)
    got = penalised(row, p, prompt_ids=[0, 1], output_ids=[2, 2, 1])
    assert got.tolist() == [1, -4 - 0.5 - 0.25, 0.5 - 1 - 0.25, 0, 3]
    assert row.tolist() == [2, -2, 1, 0, 3]
    assert penalised(row, SamplingParams(), [0], [0]) is row
    huge = penalised(np.array([3e38, -3e38], F32), SamplingParams(repetition_penalty=0.1), [0], [])
    assert np.all(np.isfinite(huge))
