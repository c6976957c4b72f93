"""Acceptance's kernels on the CPU against reference/accept.py, and the law of what they emit; a cluster of one block."""
import ctypes
from dataclasses import replace

import numpy as np
import pytest
from drafts import VERDICTS, golden, golden_step
from shim import host

from k3cuda.reference import accept as reference
from k3cuda.reference.sample import draft_token, law
from k3cuda.runtime.accept_records import JUDGE, AcceptArgs, judge_records, judged
from k3cuda.runtime.backend import AS_DRAFTED, Judge
from k3cuda.runtime.drafting import BLOCK, STANDARD, SYNTHETIC
from k3cuda.runtime.sampling import Draw, SamplingParams
from k3cuda.runtime.step_records import PENALTY, ROW, Answers, SampleArgs, penalty_entries, row_record

pytestmark = pytest.mark.skipif(host.COMPILER is None, reason="needs g++")
WARPS = 2
VOCAB = {"large": 1500, "small": 4, "golden": 128}
MARK = -7


class Host:
    """Where the kernels run: here on arrays of the host; on a GPU (tests/gpu/test_draft.py) `put` uploads and `get` brings back."""

    def __init__(self, vocab, library):
        self.library, self.threads = library, -(-vocab // 1024) * 32

    def put(self, array):
        return array.ctypes.data

    def get(self, array):
        pass

    def launch(self, kernel, clusters, args, seed):
        host.launch(self.library, kernel, clusters, self.threads, [args], seed=seed)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    """Size -> the machine that has the kernels."""
    return {name: Host(vocab, host.build(f'{host.GIVEN_DICE * (name == "golden")}#include "accept_core.cuh"\nK3_ACCEPT({vocab}, 1, {-(-vocab // 1024)})\n',
                                         ["k_laws", "k_draft_laws", "k_judge"], tmp_path_factory.mktemp(name)))
            for name, vocab in VOCAB.items()}


def run(machine, vocab, logits, judges, draft_logits, acceptance, length=None, num_drafts=7, seed=3, different=None, unread=False, kept=None):
    """list[Judged]. logits [rows, vocab]; draft_logits [rows, vocab] at the row that judges the draft, or None where drafts were not drawn.

    unread: the kernels take the drafts from where a draft model has left them.
    kept: takes the arrays that the kernels leave for one another.
    different: rows after which logits and parameters repeat, so that the laws of these are the laws of all.
    """
    draws = [d for j in judges for d in j.draws]
    rows, entries, used = np.zeros(len(draws), ROW), [], 0
    for i, d in enumerate(draws):
        entries.append(penalty_entries(d))
        rows[i] = row_record(d, used, len(entries[-1]), -1)
        used += len(entries[-1])
    entries.append(np.zeros(1, PENALTY))
    n = len(draws)
    memory = np.zeros(Answers.nbytes(n), np.uint8)
    answers = Answers(n, memory)
    for name, array in answers.arrays.items():
        array[:] = np.nan if array.dtype == np.float32 else 0 if name == "ended" else MARK
    records = judge_records(judges, acceptance, length, num_drafts, draft_logits is not None)
    draft_row = np.full(n, -1, np.int32)
    for r in records:
        if draft_logits is not None:
            draft_row[r["first_row"]:][:r["num_drafts"]] = np.arange(r["first_row"], r["first_row"] + r["num_drafts"])
    left = np.concatenate([r["ids"][:r["num_drafts"]] for r in records] + [np.full(1, MARK, np.int32)])
    if unread:
        places = iter(AS_DRAFTED - np.arange(len(left)))
        for r in records:
            r["ids"][:r["num_drafts"]] = [next(places) for _ in range(r["num_drafts"])]
    work = {f"{which}_{name}": np.full((n, *shape), np.nan, np.float32) for which in ("target", "draft") for name, shape in (("weight", (vocab,)), ("log_mass", ()))}
    work |= {"best": np.full(n, MARK, np.int32),
            "raw_top": np.full(n, np.nan, np.float32), "log_sum": np.full(n, np.nan, np.float32), "accepted": np.full(len(judges), MARK, np.int32)}
    asked = [np.ascontiguousarray(logits, np.float32), rows, np.concatenate(entries), np.zeros(1, np.int32)]
    base = machine.put(memory)
    sample = SampleArgs(*map(machine.put, asked), *(base + a.ctypes.data - memory.ctypes.data for a in answers.arrays.values()))
    draft_logits = np.zeros((1, vocab), np.float32) if draft_logits is None else np.ascontiguousarray(draft_logits, np.float32)
    args = AcceptArgs(sample=sample, draft_logits=machine.put(draft_logits), draft_ids=machine.put(left), draft_row=machine.put(draft_row), judges=machine.put(records),
                      **{name: machine.put(a) for name, a in work.items()})
    for kernel in ("k_laws", "k_draft_laws"):
        machine.launch(kernel, different or n, args, seed)
    for name in (n for n in work if different and n != "accepted"):
        machine.get(work[name])
        work[name][:] = np.resize(work[name][:different], work[name].shape)
        setattr(args, name, machine.put(work[name]))
    machine.launch("k_judge", len(judges), args, seed)
    for array in (memory, work["accepted"]):
        machine.get(array)
    if kept is not None:
        kept |= work
    return judged(judges, work["accepted"], answers, vocab)


def test_structures_have_the_compiled_sizes(tmp_path):
    source = '#include "accept_core.cuh"\nextern "C" int sizes[3];\nint sizes[3] = {sizeof(AcceptArgs), sizeof(JudgeRow), sizeof(SampleArgs)};\n'
    library = host.build(source, [], tmp_path)
    assert host.constants(library, "sizes", 3) == (ctypes.sizeof(AcceptArgs), JUDGE.itemsize, ctypes.sizeof(SampleArgs))


PARAMS = [dict(temperature=1.0), dict(temperature=0.7, top_p=0.95), dict(temperature=1.3, top_k=40, min_p=0.01), dict(temperature=0),
          dict(temperature=0.8, presence_penalty=0.7, frequency_penalty=0.4, repetition_penalty=1.2), dict(temperature=1.0, logprobs=3),
          dict(temperature=0, logprobs=0, repetition_penalty=1.5)]


def cases(acceptance, drawn, rng, count, vocab):
    """Sequences whose drafts are near the target, so that some stand, with rows that are not finite in a few."""
    judges, logits, draft_logits = [], [], []
    for i in range(count):
        params = SamplingParams(**PARAMS[i % len(PARAMS)]).resolved({})
        k, seed, position = int(rng.integers(0, 8)), int(rng.integers(1 << 63)), int(rng.integers(1, 1 << 20))
        p = (rng.standard_normal((k + 1, vocab)) * 2).astype(np.float32)
        q = (p[:k] + rng.standard_normal((k, vocab)) * 0.4).astype(np.float32)
        ids = tuple(draft_token(z, params.temperature if drawn else 0.0, seed, position + j, j) for j, z in enumerate(q))
        if i % 5 == 4:
            p[rng.integers(0, k + 1), rng.integers(vocab)] = np.nan
        prompt, output = rng.integers(0, vocab, 30), rng.integers(0, vocab, 40).tolist()
        judges.append(Judge(i, ids, tuple(Draw(params, seed, position + j, prompt_ids=prompt, output_ids=[*output, *ids[:j]]) for j in range(k + 1))))
        logits.append(p)
        draft_logits += [q, np.zeros((1, vocab), np.float32)]
    return judges, logits, np.concatenate(draft_logits)


@pytest.mark.parametrize("acceptance, drawn", [(STANDARD, True), (STANDARD, False), (BLOCK, True), (BLOCK, False), (SYNTHETIC, True)])
def test_against_the_reference(libraries, acceptance, drawn):
    rng, vocab, length = np.random.default_rng(len(acceptance) + drawn), VOCAB["large"], 3.6 if acceptance == SYNTHETIC else None
    judges, logits, q = cases(acceptance, drawn, rng, 40, vocab)
    found = run(libraries["large"], vocab, np.concatenate(logits), judges, q if drawn else None, acceptance, length)
    assert run(libraries["large"], vocab, np.concatenate(logits), judges, q if drawn else None, acceptance, length, unread=True) == found
    first, differ, accepted = 0, 0, set()
    for j, p, got in zip(judges, logits, found):
        own = q[first:first + len(j.draft_ids)] if drawn and j.draft_ids else None
        first += len(p)
        with np.errstate(all="ignore"):
            count, drawn_ones = reference.judge(p, j.draws, j.draft_ids, own, acceptance, length)
        accepted.add((count, len(j.draft_ids)))
        same = got.num_accepted == count and [d.token_id for d in got.drawn] == [d.token_id for d in drawn_ones]
        differ += not same          # the C library's exp and log and NumPy's may part at a boundary
        for d, want in zip(got.drawn, drawn_ones) if same else ():
            assert d.from_draft == want.from_draft and (d.logprob is None) == (want.logprob is None)
            if want.logprob is not None:
                assert abs(d.logprob - want.logprob) < 1e-5 and [t for t, _ in d.top_logprobs] == [t for t, _ in want.top_logprobs]
    assert differ <= 1 and any(0 < n < k for n, k in accepted) and any(n == k > 0 for n, k in accepted)


def test_drafts_behind_one_without_a_token_are_as_if_they_had_not_been_verified(libraries):
    rng, vocab = np.random.default_rng(5), VOCAB["large"]
    judges, logits, q = cases(STANDARD, True, rng, 12, vocab)
    cut, rows, first, short = [], [], 0, []
    for i, (j, p) in enumerate(zip(judges, logits)):
        k = min(i % 3, len(j.draft_ids))
        cut.append(replace(j, draft_ids=(*j.draft_ids[:k], *[-1] * (len(j.draft_ids) - k))))
        short.append(replace(j, draft_ids=j.draft_ids[:k], draws=j.draws[:k + 1]))
        rows += range(first, first + k + 1)
        first += len(p)
    logits = np.concatenate(logits)
    found = run(libraries["large"], vocab, logits, cut, q, STANDARD, unread=True)
    assert found == run(libraries["large"], vocab, logits[rows], short, q[rows], STANDARD) and any(j.num_accepted for j in found)


@pytest.mark.parametrize("row", VERDICTS)
@pytest.mark.parametrize("r", [0, 1])
def test_the_golden_s_verdicts(libraries, r, row):
    machine, (inputs, laws), kept = libraries["golden"], golden(), {}
    asked, acceptance, drawn_from, dice, want = golden_step(r, row)
    for stream, numbers in dice.items():
        host.throw(machine.library, stream, numbers)
    q = None if drawn_from is None else np.pad(drawn_from, ((0, 1), (0, 0)))
    found, = run(machine, VOCAB["golden"], inputs[f"round{r}.target_logits"], [asked], q, acceptance, kept=kept)
    assert [found.num_accepted, *(d.token_id for d in found.drawn)] == want
    for which, law in (("target", "target_probs"), ("draft", "sampled.probs"))[:0 if row == "greedy" else 1 if q is None else 2]:
        rows = laws[f"round{r}.{law}"]
        got = kept[f"{which}_weight"][:len(rows)] / np.exp(kept[f"{which}_log_mass"][:len(rows), None])
        np.testing.assert_allclose(got, rows, rtol=1e-5, atol=1e-9)


def test_synthetic_length_six_with_seven_drafts_is_six_tokens_in_every_step(libraries):
    rng, vocab = np.random.default_rng(1), VOCAB["small"]
    params = SamplingParams(temperature=1.0).resolved({})
    judges = [Judge(i, (0, 1, 2, 3, 0, 1, 2), tuple(Draw(params, i, 10 * i + j) for j in range(8))) for i in range(50)]
    logits = rng.standard_normal((400, vocab))
    assert {len(j.drawn) for j in run(libraries["small"], vocab, logits, judges, logits, SYNTHETIC, 6.0)} == {6}


DRAWN, ONE_POINT = 12_500, 2_500   # sequences of four tokens: 10^5 draws of both rules together, and some where drafts are not drawn
CHI_SQUARE = 44.3    # of 15 degrees of freedom: passed by chance once in 10,000 times; seeds are fixed


@pytest.mark.parametrize("acceptance, drawn", [(STANDARD, True), (BLOCK, True), (STANDARD, False), (BLOCK, False)])
def test_what_is_emitted_has_the_targets_law(libraries, acceptance, drawn):
    """Of a target that forgets, so that the joint law of two places is the product of theirs. How many tokens a step gives may depend on what they
    are; so what is missing to four tokens is drawn from the target, as later steps would."""
    vocab, k, rng = VOCAB["small"], 3, np.random.default_rng(7)
    params, sequences = SamplingParams(temperature=0.9, top_p=0.97).resolved({}), DRAWN if drawn else ONE_POINT
    p, q = (rng.standard_normal((k + 1, vocab)).astype(np.float32) for _ in range(2))
    judges = []
    for i, seed in enumerate(rng.integers(0, 1 << 62, sequences).tolist()):
        ids = tuple(draft_token(q[j], 0.9 if drawn else 0.0, seed, 5 + j, j) for j in range(k))
        judges.append(Judge(i, ids, tuple(Draw(params, seed, 5 + j) for j in range(k + 1))))
    found = run(libraries["small"], vocab, np.tile(p, (sequences, 1)), judges, np.tile(q, (sequences, 1)) if drawn else None, acceptance, num_drafts=k, seed=0, different=k + 1)
    laws = [w / w.sum() for w in (law(row, params).astype(np.float64) for row in p)]
    tokens = np.stack([rng.choice(vocab, sequences, p=w) for w in laws], axis=1)
    for row, j in zip(tokens, found):
        row[:len(j.drawn)] = [d.token_id for d in j.drawn]
    assert sum(len(j.drawn) for j in found) > 1.5 * sequences
    for place in range(k):
        counts = np.zeros((vocab, vocab))
        np.add.at(counts, (tokens[:, place], tokens[:, place + 1]), 1)
        want = sequences * np.outer(laws[place], laws[place + 1])
        assert not counts[want == 0].any()
        chi = ((counts - want)[want > 0] ** 2 / want[want > 0]).sum()
        assert chi < CHI_SQUARE, (place, chi)
