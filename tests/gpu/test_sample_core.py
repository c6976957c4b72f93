"""The sampler on a GPU against reference/sample.py, draw by draw."""
import numpy as np
import pytest

cp = pytest.importorskip("cupy")
from sample_device import TOP, sample  # noqa: E402

from k3cuda.reference import sample as reference  # noqa: E402
from k3cuda.runtime.sampling import Draw, SamplingParams  # noqa: E402

pytestmark = pytest.mark.gpu
VOCAB = 163840
NEAR = 1e-5      # of a boundary, a share of the mass: expf and NumPy's exp differ by an ulp or two there


def draw(seed=1, position=5, **params):
    ids = {k: params.pop(k) for k in ("prompt_ids", "output_ids") if k in params}
    return Draw(SamplingParams(**params).resolved({}), seed, position, **ids)


def near_boundary(weights, u, a, b) -> bool:
    cdf = np.cumsum(weights, dtype=np.float64) / np.sum(weights, dtype=np.float64)
    return bool(np.abs(u - cdf[min(a, b)]) < NEAR and np.abs(u - cdf[max(a, b) - 1]) < NEAR)


@pytest.fixture
def rng():
    return np.random.default_rng()


@pytest.mark.parametrize("vocab", [640, 5000, 50000, VOCAB])
def test_greedy(rng, vocab):
    logits = rng.standard_normal((64, vocab)).astype(np.float32)
    logits[1, [vocab // 3, vocab - 1, 7]] = 9
    logits[2] = np.where(rng.random(vocab) < 0.5, -0.0, 0.0)
    logits[3] = -3e38
    draws = [draw(temperature=0)] * 64
    draws[5] = None
    got = sample(logits, draws).token.get()
    want = logits.argmax(1)
    want[5] = -7
    assert (got == want).all()


def test_non_finite_rows(rng):
    logits = rng.standard_normal((8, VOCAB)).astype(np.float32)
    clean = sample(logits, [draw(seed=s, temperature=0.8, top_p=0.9) for s in range(8)]).token.get()
    for row, at, value in ((1, 0, np.nan), (3, VOCAB - 1, np.inf), (6, 77777, -np.inf)):
        logits[row, at] = value
    got = sample(logits, [draw(seed=s, temperature=0.8, top_p=0.9) for s in range(8)]).token.get()
    bad = [1, 3, 6]
    assert (got[bad] == -1).all() and (np.delete(got, bad) == np.delete(clean, bad)).all() and (clean >= 0).all()
    assert (sample(logits, [draw(temperature=0)] * 8).token.get()[bad] == -1).all()


CASES = [dict(temperature=1.0), dict(temperature=0.7, top_p=0.95), dict(temperature=1.3, top_p=0.5, min_p=0.02), dict(temperature=1.0, top_k=50),
         dict(temperature=2.0, top_k=1000, top_p=0.9), dict(temperature=0.3, min_p=0.1), dict(temperature=1.0, top_p=1e-6),
         dict(temperature=1.5, top_k=1)]


def test_ten_thousand_draws(rng, capsys):
    """Eight laws of the real vocabulary, 1,280 draws each: the reference's token unless u is near a boundary."""
    differ = total = 0
    for case in CASES:
        row = (rng.standard_normal(VOCAB) * 3).astype(np.float32)
        row[rng.integers(0, VOCAB, 500)] = row[rng.integers(0, VOCAB)]      # ties
        law = reference.law(row, draw(**case).params)
        logits = cp.broadcast_to(cp.asarray(row), (64, VOCAB)).copy()
        for block in range(20):
            draws = [draw(seed=int(s), position=int(p), **case)
                     for s, p in zip(rng.integers(0, 1 << 63, 64), rng.integers(0, 1 << 20, 64))]
            got = sample(logits, draws).token.get()
            levels = reference.tree_levels(law) if block == 0 else levels
            for d, token in zip(draws, got):
                u = reference.uniform(d.seed, d.position, d.stream)
                want = descend(levels, u)
                total += 1
                if token != want:
                    differ += 1
                    assert near_boundary(law, u, int(token), want), (case, d.seed, token, want)
    with capsys.disabled():
        print(f" {differ} of {total} draws differ, all within {NEAR:g} of a boundary")
    assert differ <= total // 200


def descend(levels, u) -> int:
    """reference.pick over levels made once."""
    target, node = u * levels[-1][0], 0
    for level in reversed(levels[:-1]):
        node *= 2
        if target >= level[node] and level[node + 1] > 0:
            target, node = target - level[node], node + 1
    return node


@pytest.mark.parametrize("vocab", [640, 5000, VOCAB])
def test_everything_at_once(rng, vocab):
    """Rows of all kinds in one launch, penalties and log-probabilities among them, against sample_row."""
    logits = (rng.standard_normal((24, vocab)) * 4).astype(np.float32)
    draws = []
    for i in range(24):
        params = dict(CASES[i % len(CASES)] if i % 3 else dict(temperature=0), logprobs=[None, 0, 5, 20][i % 4])
        if i % 2:
            params |= dict(presence_penalty=float(rng.uniform(-2, 2)), frequency_penalty=float(rng.uniform(-2, 2)),
                           repetition_penalty=float(rng.uniform(0.5, 2)), prompt_ids=rng.integers(0, vocab, 200), output_ids=rng.integers(0, vocab, 300))
        draws.append(draw(seed=int(rng.integers(1 << 63)), **params))
    s = sample(logits, draws)
    token, logprob, ids, tops = (a.get() for a in (s.token, s.logprob, s.top_ids, s.top_logprobs))
    for i, d in enumerate(draws):
        want = reference.sample_row(logits[i], d)
        if token[i] != want.token_id:
            scores = reference.penalised(logits[i], d.params, d.prompt_ids, d.output_ids)
            assert not d.params.greedy
            assert near_boundary(reference.law(scores, d.params), reference.uniform(d.seed, d.position, d.stream), int(token[i]), want.token_id)
            continue
        if d.params.logprobs is None:
            assert np.isnan(logprob[i]) and (ids[i] == -7).all()
            continue
        assert abs(logprob[i] - want.logprob) < 2e-5
        n = min(d.params.logprobs, vocab)
        assert (ids[i, n:] == -7).all() and np.isnan(tops[i, n:]).all()
        assert [int(t) for t in ids[i, :n]] == [t for t, _ in want.top_logprobs]
        assert np.allclose(tops[i, :n], [p for _, p in want.top_logprobs], atol=2e-5)


def test_same_bytes_in_any_row(rng):
    """A row alone and at the end of 64 others gives the same token, log-probability and list."""
    logits = (rng.standard_normal((64, VOCAB)) * 3).astype(np.float32)
    d = [draw(seed=s, temperature=1.1, top_p=0.9, top_k=500, logprobs=TOP) for s in range(64)]
    many, one = sample(logits, d), sample(logits[63:], d[63:])
    for name in ("token", "logprob", "top_ids", "top_logprobs"):
        a, b = getattr(many, name)[63].get(), getattr(one, name)[0].get()
        assert a.tobytes() == b.tobytes(), name
