"""Acceptance: the golden's verdicts, the emitted law by enumeration, the synthetic schedule, and rows that are not finite."""
import itertools
from dataclasses import replace

import numpy as np
import pytest
from drafts import VERDICTS, golden, golden_step

from k3cuda.reference import accept
from k3cuda.reference.accept import accept_block, accept_greedy, accept_standard, accept_synthetic, block_chances, judge, log_law, log_softmax_at, residual
from k3cuda.reference.sample import draft_token, pick, sample_row, uniform
from k3cuda.runtime.drafting import BLOCK, STANDARD, SYNTHETIC
from k3cuda.runtime.sampling import STREAM_ACCEPT, STREAM_SAMPLE, Draw, Drawn, SamplingParams

INPUTS, WANT = golden()
RULES = {"standard": accept_standard, "block": accept_block}


# The golden

@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("r", [0, 1])
@pytest.mark.parametrize("row", VERDICTS)
def test_golden_verdicts(r, row, dtype):
    given, want = ({n.removeprefix(f"round{r}."): x for n, x in table.items()} for table in (INPUTS, WANT))
    logits, u = given["target_logits"].astype(dtype), given["u_accept"].astype(dtype)
    if row == "greedy":
        ids = want["greedy.tokens"].tolist()
        count = accept_greedy(logits, ids)
        last = int(logits[count].argmax())
    else:
        rule, kind = row.split(".")
        ids, temperature = want["sampled.tokens"].tolist(), float(INPUTS["temperature"][0])
        params = SamplingParams(temperature=temperature, top_k=int(INPUTS["top_k"][0]), top_p=float(INPUTS["top_p"][0]), min_p=0.0)
        log_p = [log_law(z, params) for z in logits]
        log_q = [log_softmax_at(z.astype(dtype), temperature) for z in want["sampled.logits"]] if kind == "probs" else None
        np.testing.assert_allclose(np.exp(log_p), want["target_probs"], rtol=1e-5, atol=1e-9)
        count, log_w = RULES[rule](log_p, log_q, ids, u)
        law = np.exp(log_p[7]) if count == 7 else residual(log_p[count], log_q and log_q[count], ids[count], log_w)
        last = pick(law, dtype(given["u_next"][0]))
    assert [count, *ids[:count], last] == [x for x in want[f"verify.{row}"] if x >= 0]


@pytest.mark.parametrize("r", [0, 1])
@pytest.mark.parametrize("row", VERDICTS)
def test_golden_verdicts_of_a_whole_step(monkeypatch, r, row):
    """As the engine asks for them, but with the golden's dice."""
    asked, acceptance, drawn_from, dice, want = golden_step(r, row)
    monkeypatch.setattr(accept, "uniform", lambda seed, position, stream, index=0: np.float32(dice[stream][index]))
    count, drawn = judge(INPUTS[f"round{r}.target_logits"], asked.draws, asked.draft_ids, drawn_from, acceptance)
    assert [count, *(d.token_id for d in drawn)] == want


@pytest.mark.parametrize("r", [0, 1])
def test_golden_block_numbers(r):
    given, want = ({n.removeprefix(f"round{r}."): x for n, x in table.items()} for table in (INPUTS, WANT))
    with np.errstate(divide="ignore"):
        log_p = np.log(want["target_probs"])
    h, log_w = block_chances(list(log_p), list(np.log(want["sampled.probs"])), want["sampled.tokens"].tolist())
    np.testing.assert_allclose(np.exp(log_w), want["block.w"], rtol=1e-12)
    np.testing.assert_allclose(h, want["block.h"], rtol=1e-9, atol=1e-12)


def test_golden_draws_of_the_draft():
    for r in range(2):
        for i, logits in enumerate(WANT[f"round{r}.sampled.logits"]):
            weights = np.exp(log_softmax_at(logits.astype(np.float32), float(INPUTS["temperature"][0])))
            assert pick(weights, np.float32(INPUTS[f"round{r}.u_draft"][i])) == WANT[f"round{r}.sampled.tokens"][i]


# The emitted law, by enumeration

V, K = 3, 3


def tables(seed, zeros):
    """Log laws of the target behind every prefix of up to K drafts, and of the draft behind every shorter one; some tokens have no probability."""
    rng, p, q = np.random.default_rng(seed), {}, {}
    for n in range(K + 1):
        for prefix in itertools.product(range(V), repeat=n):
            for table, can in ((p, True), (q, n < K)):
                law = rng.dirichlet(np.full(V, 0.7))
                if zeros and rng.random() < 0.4:
                    law[rng.integers(V)] = 0
                with np.errstate(divide="ignore"):
                    if can:
                        table[prefix] = np.log(law / law.sum())
    return p, q


def chances(rule, log_p, log_q, ids):
    """For each count of accepted drafts its probability and the log weight of P behind it; the rule itself is asked on both sides of every bound."""
    if rule == "standard":
        bounds = [min(1.0, float(np.exp(log_p[i][d] - (log_q[i][d] if log_q else 0)))) for i, d in enumerate(ids)]
        stop = lambda c: np.prod(bounds[:c]) * (1 - bounds[c] if c < len(ids) else 1)
        log_w = [0.0] * (len(ids) + 1)
    else:
        bounds, log_w = block_chances(log_p, log_q, ids)
        stop = lambda c: (bounds[c - 1] if c else 1) * np.prod([1 - h for h in bounds[c:]])
    for c in range(len(ids) + 1):
        # One number for each draft that puts exactly c of them through.
        below = [0.5 * b for b in bounds]
        above = [0.5 * (b + 1) for b in bounds]
        u = below[:c] + above[c:] if rule == "standard" else [above[i] if i != c - 1 else below[i] for i in range(len(ids))]
        if all(b > 0 for b in bounds[:c] if rule == "standard") and (c == 0 or bounds[c - 1] > 0) and all(b < 1 for b in bounds[c:][:1 if rule == "standard" else None]):
            assert RULES[rule](log_p, log_q, ids, u)[0] == c
    return [stop(c) for c in range(len(ids) + 1)], log_w


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("is_onehot", [False, True], ids=["full", "one-hot"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("leaf", [None, 5], ids=["all", "some"])
def test_emitted_law_is_the_target_s(rule, is_onehot, zeros, leaf):
    """The joint law of the next K + 1 tokens, drafts and dice summed out. `leaf`: after some drafts no further one is verified, decided by those
    before it alone, as a confidence threshold does."""
    for seed in range(3):
        p, q = tables(seed, zeros)
        ends = lambda prefix: len(prefix) == K or (leaf is not None and len(prefix) > 0 and hash((prefix, seed)) % leaf == 0)
        emitted = np.zeros((V,) * (K + 1))
        paths = [((), 1.0)]
        while paths:
            prefix, weight = paths.pop()
            if not ends(prefix):
                law = np.eye(V)[q[prefix].argmax()] if is_onehot else np.exp(q[prefix])
                paths += [(prefix + (d,), weight * law[d]) for d in range(V) if law[d] > 0]
                continue
            log_p = [p[prefix[:i]] for i in range(len(prefix) + 1)]
            log_q = None if is_onehot else [q[prefix[:i]] for i in range(len(prefix))]
            probabilities, log_w = chances(rule, log_p[:-1], log_q, prefix)
            for count, chance in enumerate(probabilities):
                if count == len(prefix):
                    behind = np.exp(log_p[count])
                else:
                    behind = residual(log_p[count], log_q and log_q[count], prefix[count], log_w[count])
                    behind = behind / behind.sum()
                for y in range(V):
                    spread(emitted, p, prefix[:count] + (y,), weight * chance * behind[y])
        want = np.zeros_like(emitted)
        spread(want, p, (), 1.0)
        assert abs(emitted - want).max() < 1e-12


def spread(joint, p, prefix, weight):
    """Adds `weight` to `joint`, the tokens behind `prefix` drawn from the target."""
    if weight == 0:
        return
    if len(prefix) == K + 1:
        joint[prefix] += weight
        return
    for token, chance in enumerate(np.exp(p[prefix])):
        spread(joint, p, prefix + (token,), weight * chance)


def test_the_enumeration_can_fail(monkeypatch):
    """A residual of the wrong weight, or drafts judged by P alone, is seen."""
    monkeypatch.setattr("test_acceptance.residual", lambda log_p, log_q, token, log_w=0.0: np.exp(log_p))
    with pytest.raises(AssertionError):
        test_emitted_law_is_the_target_s("standard", False, False, None)


def test_block_verification_accepts_no_fewer():
    for seed in range(8):
        p, q = tables(seed, False)
        mean = {rule: 0.0 for rule in RULES}
        for ids in itertools.product(range(V), repeat=K):
            log_p, log_q = [p[ids[:i]] for i in range(K)], [q[ids[:i]] for i in range(K)]
            weight = np.exp(sum(log_q[i][d] for i, d in enumerate(ids)))
            for rule in RULES:
                mean[rule] += weight * sum(c * x for c, x in enumerate(chances(rule, log_p, log_q, ids)[0]))
        assert mean["block"] >= mean["standard"] - 1e-12


# The whole judge, with its own random numbers

def draws(seed, first, k, params):
    return tuple(Draw(params, seed, first + i) for i in range(k + 1))


@pytest.mark.parametrize("acceptance", [STANDARD, BLOCK])
def test_random_numbers_of_drafts_and_verdicts_are_independent(acceptance):
    """Several steps in a row for 1,500 seeds: the first three tokens have the target's joint law, which they have not where drafts and verdicts
    share their numbers. That no number comes twice in later steps either is tested with the engine."""
    p, q = tables(7, False)
    params, k, seen = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0), 2, np.zeros((V,) * 3)
    for seed in range(1500):
        tokens = ()
        while len(tokens) < 3:
            ids, laws = (), []
            for i in range(k):   # both models look back two tokens
                laws.append(q[(tokens + ids)[-2:]].astype(np.float32))
                ids += (draft_token(laws[i], 1.0, seed, 100 + len(tokens) + i, i),)
            rows = np.array([p[(tokens + ids[:i])[-2:]] for i in range(k + 1)], np.float32)
            _, drawn = judge(rows, draws(seed, 100 + len(tokens), k, params), ids, np.array(laws), acceptance)
            tokens += tuple(d.token_id for d in drawn)
        seen[tokens[:3]] += 1
    law = lambda *before: np.exp(p[before[-2:]])
    want = 1500 * np.array([[[law()[a] * law(a)[b] * law(a, b)[c] for c in range(V)] for b in range(V)] for a in range(V)])
    large = want > 5
    chi = ((seen - want)[large] ** 2 / want[large]).sum() + (seen[~large].sum() - want[~large].sum()) ** 2 / max(want[~large].sum(), 1)
    assert chi < 62   # 26 degrees of freedom, 1 in 10,000


def random_case(seed, k=4, vocab=50):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(k + 1, vocab)).astype(np.float32) * 2
    draft = logits[:k] + rng.normal(size=(k, vocab)).astype(np.float32)
    params = SamplingParams(temperature=float(rng.choice([0.6, 1.3])), top_k=int(rng.choice([0, 12])), top_p=float(rng.choice([0.8, 1.0])),
                            min_p=float(rng.choice([0.0, 0.02])), logprobs=2)
    ids = tuple(draft_token(draft[i], params.temperature, seed, 9 + i, i) for i in range(k))
    return logits, draws(seed, 9, k, params), ids, draft


@pytest.mark.parametrize("acceptance", [STANDARD, BLOCK])
def test_verdicts_use_the_settled_numbers(acceptance):
    counts = set()
    for seed in range(40):
        logits, each, ids, draft = random_case(seed)
        count, drawn = judge(logits, each, ids, draft, acceptance)
        params = each[0].params
        log_p, log_q = [log_law(z, params) for z in logits], [log_softmax_at(z, params.temperature) for z in draft]
        u = [uniform(seed, 9 + i, STREAM_ACCEPT, i) for i in range(4)]
        want, log_w = RULES[acceptance](log_p[:4], log_q, ids, u)
        assert count == want and tuple(d.token_id for d in drawn[:-1]) == ids[:count]
        if count < 4:
            assert drawn[-1].token_id == pick(residual(log_p[count], log_q[count], ids[count], log_w), uniform(seed, 9 + count, STREAM_SAMPLE))
        else:
            assert drawn[-1] == sample_row(logits[4], each[4])
        assert all(np.exp(log_p[i][d.token_id]) > 0 for i, d in enumerate(drawn)), "a token that a filter took away"
        counts.add(count)
    assert len(counts) > 2


def test_no_draft_is_a_plain_draw():
    logits, each, _, _ = random_case(3)
    for params in (each[0].params, replace(each[0].params, temperature=0.0, top_p=1.0)):
        one = (replace(each[0], params=params),)
        assert judge(logits[:1], one, (), None, BLOCK) == (0, (sample_row(logits[0], one[0]),))


def test_greedy_requests_ask_no_dice():
    logits, each, _, draft = random_case(5)
    each = tuple(replace(d, params=replace(d.params, temperature=0.0, top_p=1.0)) for d in each)
    right = tuple(int(row.argmax()) for row in logits)
    for wrong in range(5):
        ids = tuple((t + (i == wrong)) % 50 for i, t in enumerate(right[:4]))
        for acceptance in (STANDARD, BLOCK):
            count, drawn = judge(logits, each, ids, draft, acceptance)
            assert count == wrong and tuple(d.token_id for d in drawn) == right[:wrong + 1]


def test_penalties_of_a_row_see_the_drafts_before_it():
    logits = np.zeros((3, 8), np.float32)
    logits[:, 5] = 4.0
    params = SamplingParams(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, presence_penalty=2.0, frequency_penalty=1.5)
    each = tuple(Draw(params, 1, 10 + i, output_ids=[5] * i) for i in range(3))
    logits[:, 6] = 2.0
    assert judge(logits, each, (5, 6), None) == (2, (Drawn(5, from_draft=True), Drawn(6, from_draft=True), Drawn(6)))
    assert judge(logits, each, (5, 5), None)[0] == 1


def test_nothing_left_behind_a_rejection_is_the_target_itself():
    """P = Q but for rounding: a draft may be rejected although no token has more probability than before."""
    p = log_softmax_at(np.arange(5, dtype=np.float32), 1.0)
    np.testing.assert_allclose(residual(p, p, 2) / residual(p, p, 2).sum(), np.exp(p), rtol=1e-6)


@pytest.mark.parametrize("acceptance", [STANDARD, BLOCK, SYNTHETIC])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_count_only_where_they_are_needed(acceptance, bad):
    length = 5.0 if acceptance == SYNTHETIC else None
    for seed in range(12):
        logits, each, ids, draft = random_case(seed)
        whole, drawn = judge(logits, each, ids, draft, acceptance, length)
        for row in range(5):
            sick = logits.copy()
            sick[row, 7] = bad
            count, now = judge(sick, each, ids, draft, acceptance, length)
            assert count <= row and (now[-1].token_id is None) == (count == row)
            if acceptance == STANDARD and row > whole:
                assert (count, now) == (whole, drawn), "rejected drafts may leave any row behind"


# Synthetic acceptance

def test_length_6_with_7_drafts_emits_6_in_every_step():
    for seed in range(50):
        logits, each, ids, draft = random_case(seed, k=7)
        for params in (each[0].params, replace(each[0].params, temperature=0.0, top_p=1.0)):
            count, drawn = judge(logits, tuple(replace(d, params=params) for d in each), ids, draft, SYNTHETIC, 6.0)
            assert (count, len(drawn)) == (5, 6)


@pytest.mark.parametrize("length", [1.0, 1.25, 3.78, 4.0, 8.0])
def test_lengths_are_met_with_the_least_variance(length):
    counts = [1 + accept_synthetic([uniform(seed, i, STREAM_ACCEPT, i) for i in range(7)], length, 7) for seed in range(1200)]
    assert set(counts) <= {int(length), int(np.ceil(length))} and abs(np.mean(counts) - length) < 0.05
