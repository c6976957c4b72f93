"""The sampler's kernel on the CPU against reference/sample.py: a cluster of one block."""
import ctypes
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from k3cuda.reference import sample as reference
from k3cuda.runtime.backend import AS_DRAFTED, AS_SAMPLED
from k3cuda.runtime.step_records import PENALTY, ROW, Answers, SampleArgs, StepLoad, penalty_entries, row_record
from k3cuda.runtime.sampling import Draw, SamplingParams

sys.path[:0] = [str(Path(__file__).resolve().parent / "shim")]
import host  # noqa: E402

pytestmark = pytest.mark.skipif(host.COMPILER is None, reason="no C++ compiler")
VOCAB, WARPS, TOP, SLOTS = 3004, 3, 20, 64
MARK = -7   # what nobody wrote


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    source = f'''#include "step_io.cuh"
using S = SampleShape<{VOCAB}, 1, {WARPS}>;
void sample(SampleArgs a) {{ __shared__ SampleSmem<S> m; sample_row<S>(a, m, blockIdx.x); }}
'''
    return host.build(source, ["sample", "k_load"], tmp_path_factory.mktemp("sample"))


def run(library, logits, draws, slots=None, slot_tokens=None):
    """Answers as the kernel left them, and slot_tokens."""
    rows, entries = np.zeros(len(draws), ROW), [np.zeros(1, PENALTY)]
    for i, d in enumerate(draws):
        own = penalty_entries(d)
        rows[i] = row_record(d, sum(map(len, entries)), len(own), slots[i] if slots else -1)
        entries.append(own)
    memory = np.zeros(Answers.nbytes(len(draws)), np.uint8)
    answers = Answers(len(draws), memory)
    for name, array in answers.arrays.items():
        array[:] = np.nan if array.dtype == np.float32 else 0 if name == "ended" else MARK
    slot_tokens = np.full(SLOTS, MARK, np.int32) if slot_tokens is None else slot_tokens
    kept = [np.ascontiguousarray(logits, np.float32), rows, np.concatenate(entries), slot_tokens, *answers.arrays.values()]
    host.launch(library, "sample", len(draws), WARPS * 32, [SampleArgs(*(a.ctypes.data for a in kept))], seed=3)
    return answers, slot_tokens


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
    answers, _ = run(library, logits, draws)
    token, logprob, ids, tops = (answers.arrays[n] for n in ("token", "logprob", "top_ids", "top_logprobs"))
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
    answers, slot_tokens = run(library, logits, [draw(temperature=0)] * 6, slots=[5, 9, -1, 2, -1, 0])
    want = [*logits[:3].argmax(1), -1, -1, -1]
    assert answers.arrays["token"].tolist() == want
    assert [d.token_id for d in answers.drawn([draw(temperature=0)] * 6, VOCAB)] == [*want[:3], None, None, None]
    kept = np.full(SLOTS, MARK)
    kept[[5, 9, 2, 0]] = want[0], want[1], want[3], want[5]
    assert slot_tokens.tolist() == kept.tolist()


@pytest.mark.parametrize("params", [dict(frequency_penalty=1.5), dict(presence_penalty=-2), dict(repetition_penalty=1.7, frequency_penalty=0.5)], ids=str)
def test_a_token_that_the_host_has_not_read_counts(library, params):
    """Among the entries, only in the prompt, or new; the first of a subtree of the sums and the last."""
    rng = np.random.default_rng(7)
    logits = rng.standard_normal((1, VOCAB)).astype(np.float32)
    prompt, output = [3, 1024, 2047, 2999], [5, 5, 1024, 3003]
    changed = 0
    for token in (5, 1024, 3003, 3, 2047, 0, 1023, 2048, 77):
        row = np.array(logits)
        row[0, token] = row.max() + 1          # it would win, were it not for its penalty
        d = draw(temperature=0, prompt_ids=prompt, output_ids=output, **params)
        after = replace(d, after_sampled=True)
        slot_tokens = np.full(SLOTS, MARK, np.int32)
        slot_tokens[4] = token
        answers, slot_tokens = run(library, row, [after], slots=[4], slot_tokens=slot_tokens)
        want = reference.sample_row(row[0], after.following(token)).token_id
        assert answers.arrays["token"].tolist() == [want] and slot_tokens[4] == want
        changed += want != reference.sample_row(row[0], d).token_id
    assert changed or params.get("presence_penalty"), "the token makes no difference: this test is blind"


@pytest.mark.parametrize("first", [0, 2])
def test_inputs_are_loaded_and_sampled_tokens_looked_up(library, first):
    """Into two arenas; from word `first` on, and tokens only where they are loaded too."""
    rng = np.random.default_rng(8)
    inputs = rng.integers(0, 99, 24).astype(np.int32)     # token_ids [8], row_slot [8], and more
    inputs[8:16] = rng.permutation(8)
    inputs[[1, 3, 7]] = AS_SAMPLED
    inputs[[0, 5]] = AS_DRAFTED - 2, AS_DRAFTED
    draft_ids = np.array([-1, 50, 51], np.int32)          # the first has no token
    arenas = [np.full(40, MARK, np.int32) for _ in range(2)]
    slot_tokens = np.arange(100, 108, dtype=np.int32)
    slot_tokens[inputs[8 + 3]] = -1                       # a row that was not finite
    draws, draws_to = rng.integers(0, 99, 16).astype(np.int32), np.full(20, MARK, np.int32)
    penalties, penalties_to, words, began = np.arange(40, dtype=np.int32), np.full(40, MARK, np.int32), np.array([6, 0, 0, 0], np.int32), np.zeros(1, np.uint64)
    pointers = np.array([a.ctypes.data for a in arenas], np.uint64)
    at = lambda a: a.ctypes.data   # noqa: E731
    args = StepLoad(at(inputs), at(pointers), 2, first, 6, 0, 32, 8, at(slot_tokens), at(draft_ids), at(draws), at(penalties), at(draws_to), at(penalties_to), 4, at(words), at(began))
    host.launch(library, "k_load", 5, 64, [args], seed=3)
    want = np.full(40, MARK)
    want[4 * first:24] = inputs[4 * first:]
    if first == 0:
        want[1], want[3], want[7] = slot_tokens[inputs[9]], 0, slot_tokens[inputs[15]]
        want[0], want[5] = 51, 0
    for arena in arenas:
        assert arena.tolist() == want.tolist()
    assert draws_to.tolist() == [*draws, *[MARK] * 4] and penalties_to.tolist() == [*range(24), *[MARK] * 16] and began[0] == 1
