"""The sampler's kernel on the CPU against reference/sample.py: a cluster of one block."""
import ctypes
import sys
from pathlib import Path

import numpy as np
import pytest

from k3cuda.reference import sample as reference
from k3cuda.runtime.sampling import Draw, SamplingParams

sys.path[:0] = [str(Path(__file__).resolve().parent / "shim")]
import host  # noqa: E402

pytestmark = pytest.mark.skipif(host.COMPILER is None, reason="no C++ compiler")
VOCAB, WARPS, TOP = 3004, 3, 20
ROW = np.dtype([(n, t) for t, names in (
    ("i4", "active greedy"), ("f4", "temperature top_p min_p"), ("i4", "top_k"), ("u4", "seed_low seed_high position stream"),
    ("i4", "logprobs penalty_begin penalty_count"), ("f4", "repetition frequency presence")) for n in names.split()])


class Args(ctypes.Structure):
    _fields_ = [(n, ctypes.c_void_p) for n in ("logits", "rows", "penalties", "token", "logprob", "top_ids", "top_logprobs")]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    source = f'''#include "sample_core.cuh"
using S = SampleShape<{VOCAB}, 1, {WARPS}>;
void full(SampleArgs a) {{ __shared__ SampleSmem<S> m; sample_row<S, true>(a, m, blockIdx.x); }}
void greedy(SampleArgs a) {{ __shared__ SampleSmem<S> m; sample_row<S, false>(a, m, blockIdx.x); }}
'''
    return host.build(source, ["full", "greedy"], tmp_path_factory.mktemp("sample"))


def run(library, logits, draws, kernel="full"):
    rows, penalties = np.zeros(len(draws), ROW), [(0, 0)]
    for i, d in enumerate(draws):
        p, begin = d.params, len(penalties)
        if p.has_penalties:
            output, counts = np.unique(np.asarray(d.output_ids, int), return_counts=True)
            count = dict(zip(output.tolist(), counts.tolist()))
            ids = np.union1d(np.asarray(d.prompt_ids, int), output) if p.repetition_penalty != 1 else output
            penalties += [(j, count.get(j, 0)) for j in ids.tolist()]
        rows[i] = (1, p.greedy, p.temperature, p.top_p, p.min_p, p.top_k, d.seed & 0xffffffff, d.seed >> 32, d.position, d.stream,
                   -1 if p.logprobs is None else p.logprobs, begin, len(penalties) - begin, p.repetition_penalty, p.frequency_penalty,
                   p.presence_penalty)
    out = (np.full(len(draws), -7, np.int32), np.full(len(draws), np.nan, np.float32), np.full((len(draws), TOP), -7, np.int32),
           np.full((len(draws), TOP), np.nan, np.float32))
    kept = [np.ascontiguousarray(logits, np.float32), rows, np.array(penalties, np.int32), *out]
    host.launch(library, kernel, len(draws), WARPS * 32, [Args(*(a.ctypes.data for a in kept))], seed=3)
    return out


def draw(seed=1, position=5, **params):
    ids = {k: params.pop(k) for k in ("prompt_ids", "output_ids") if k in params}
    return Draw(SamplingParams(**params).resolved({}), seed, position, **ids)


CASES = [dict(temperature=1.0), dict(temperature=0.7, top_p=0.95), dict(temperature=1.3, top_p=0.5, min_p=0.02), dict(temperature=1.0, top_k=50),
         dict(temperature=2.0, top_k=1000, top_p=0.9), dict(temperature=0.3, min_p=0.1), dict(temperature=1.0, top_p=1e-6), dict(temperature=0),
         dict(temperature=1.5, top_k=1)]


def test_against_the_reference(library):
    rng = np.random.default_rng(5)
    logits = (rng.standard_normal((45, VOCAB)) * 3).astype(np.float32)
    logits[:, rng.integers(0, VOCAB, 300)] = 1.5     # ties
    draws = []
    for i in range(len(logits)):
        params = dict(CASES[i % len(CASES)], logprobs=[None, 0, 20][i % 3])
        if i % 2:
            params |= dict(presence_penalty=float(rng.uniform(-2, 2)), frequency_penalty=float(rng.uniform(-2, 2)),
                           repetition_penalty=float(rng.uniform(0.5, 2)), prompt_ids=rng.integers(0, VOCAB, 100), output_ids=rng.integers(0, VOCAB, 200))
        draws.append(draw(seed=int(rng.integers(1 << 63)), position=int(rng.integers(1 << 20)), **params))
    token, logprob, ids, tops = run(library, logits, draws)
    differ = 0
    for i, d in enumerate(draws):
        want = reference.sample_row(logits[i], d)
        differ += token[i] != want.token_id          # the C library's exp and NumPy's may part at a boundary
        if token[i] != want.token_id or d.params.logprobs is None:
            continue
        assert abs(logprob[i] - want.logprob) < 1e-5
        n = d.params.logprobs
        assert ids[i, :n].tolist() == [t for t, _ in want.top_logprobs] and (ids[i, n:] == -7).all()
        assert np.allclose(tops[i, :n], [p for _, p in want.top_logprobs], atol=1e-5)
    assert differ <= 1


def test_greedy_and_not_finite(library):
    rng = np.random.default_rng(6)
    logits = rng.standard_normal((6, VOCAB)).astype(np.float32)
    logits[1, [2999, 40, 1500]] = 9
    logits[2] = np.where(rng.random(VOCAB) < 0.5, -0.0, 0.0)
    logits[3, VOCAB - 1], logits[4, 0], logits[5, 1024] = np.nan, np.inf, -np.inf
    for kernel in ("full", "greedy"):
        token = run(library, logits, [draw(temperature=0)] * 6, kernel)[0]
        assert token.tolist() == [*logits[:3].argmax(1), -1, -1, -1]
