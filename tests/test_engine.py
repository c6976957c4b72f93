"""The engine on a backend without a model: every request must give what it gives alone, whatever runs beside it."""
import random
from dataclasses import replace

import numpy as np
import pytest
from engine_oracle import EOS, VOCAB, Letters, alone, collect, drive, request, run, text_of
from fake_backend import FakeBackend, fake_logits
from hypothesis import given, settings, strategies as st

from k3cuda.config import PAGE_SIZE
from k3cuda.errors import NumericalError, PromptTooLong, UsageError
from k3cuda.reference.sample import sample_row
from k3cuda.runtime.engine import Engine
from k3cuda.runtime.request import Request
from k3cuda.runtime.sampling import Draw, SamplingParams
from k3cuda.runtime.scheduler import MIXED_ROWS
from k3cuda.runtime.text_stream import TextStream

prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=150)
parameters = st.fixed_dictionaries({"seed": st.integers(0, 2**64 - 1), "max_tokens": st.integers(1, 30), "ignore_eos": st.booleans()}, optional={
    "temperature": st.sampled_from([0, 0.5, 1.5]), "top_k": st.integers(0, 8), "top_p": st.sampled_from([0.3, 0.9]),
    "min_p": st.sampled_from([0.1]), "repetition_penalty": st.sampled_from([0.8, 1.4]), "frequency_penalty": st.sampled_from([-1, 0.7]),
    "stop": st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), "stop_token_ids": st.lists(st.integers(0, VOCAB - 1), max_size=2)})
# Few slots, pages and rows, so that all three run short.
machines = st.fixed_dictionaries({"num_slots": st.integers(1, 6), "max_rows": st.sampled_from([1, 2, 5, 64]), "num_pages": st.integers(3, 12), "overlaps": st.booleans(),
                                  "page_tokens": st.sampled_from([PAGE_SIZE, 2 * PAGE_SIZE])})
CONTEXT = 190  # no multiple of a page; the longest prompt of the strategies fits, its answer may not


# One request

@settings(deadline=None, max_examples=150)
@given(prompts, parameters, machines)
def test_a_request_gives_what_the_definition_says(prompt, given_, machine):
    r = request("r", prompt, **given_)
    context = min(CONTEXT, machine["num_pages"] * machine["page_tokens"])
    answers, last, engine = run([r], max_model_len=CONTEXT, **machine)
    assert answers["r"] == alone(prompt, r.params, context=context)
    stats = last["r"].stats
    assert (stats.prompt_tokens, stats.completion_tokens) == (len(prompt), len(answers["r"][0]))
    assert last["r"].sampling == replace(r.params, max_tokens=min(r.params.max_tokens, context - len(prompt)))


@pytest.mark.parametrize("length", [1, 63, 64, 65, 128, 180])
def test_chunks_of_a_prompt_never_change_the_answer(length):
    prompt = [(7 * i + length) % VOCAB for i in range(length)]
    answers = {rows: run([request("r", prompt)], max_rows=rows, max_model_len=200)[0]["r"] for rows in (1, 3, 7, 63, 64)}
    assert len(set(map(str, answers.values()))) == 1
    engine = run([request("r", prompt, ignore_eos=True)], max_rows=64, max_model_len=200)[2]
    assert engine.backend.row_counts == [64] * (length // 64) + [length % 64] * (length % 64 > 0) + [1] * 11  # 12 tokens, one behind the prompt


def test_prompts_fill_a_step_but_beside_decoding_sequences():
    """Who decodes waits for no more than MIXED_ROWS rows a step."""
    long = request("long", [1] * 1000, max_tokens=1, ignore_eos=True)
    assert run([long], max_rows=1024, max_model_len=1010)[2].backend.row_counts == [1000]
    engine = Engine(FakeBackend(VOCAB, max_rows=1024, max_model_len=1010))
    engine.add(request("short", [2], max_tokens=8, ignore_eos=True))
    engine.step()
    engine.add(long)
    while engine.has_work:
        engine.step()
    assert engine.backend.row_counts == [1, MIXED_ROWS, MIXED_ROWS, MIXED_ROWS, 1000 - 3 * (MIXED_ROWS - 1) + 1, 1, 1, 1]


@pytest.mark.parametrize("max_tokens, want", [(1, 1), (2, 2), (36, 36), (37, 37), (38, 37), (None, 37)])
def test_limits_are_exact(max_tokens, want):
    # A context of 67 leaves 37 tokens behind a prompt of 30; 67 is no multiple of a page.
    answers, last, _ = run([request("r", [1] * 30, max_tokens=max_tokens, ignore_eos=True)], max_model_len=67)
    assert len(answers["r"][0]) == want and answers["r"][2:] == ("length", None)
    assert last["r"].sampling.max_tokens == want


def test_pages_limit_the_context_where_they_are_fewer():
    answers, _, engine = run([request("r", [1] * 60, max_tokens=None, ignore_eos=True)], max_model_len=500, num_pages=2)
    assert engine.context == 2 * PAGE_SIZE and len(answers["r"][0]) == 2 * PAGE_SIZE - 60


def test_stop_ids_that_can_never_come_are_refused_at_once():
    engine = Engine(FakeBackend(VOCAB))
    with pytest.raises(UsageError, match=f"stop_token_ids: found {VOCAB}, wanted ids below the vocabulary of {VOCAB}"):
        engine.add(request("r", [1], stop_token_ids=(2, VOCAB)))
    assert not engine.has_work


@pytest.mark.parametrize("prompt, error, words", [
    ([], PromptTooLong, "empty"), (np.zeros(0, np.int32), PromptTooLong, "empty"), ([0] * 67, PromptTooLong, "67 tokens"),
    ([VOCAB], UsageError, f"token id {VOCAB}"), ([-1], UsageError, "token id -1"), ([1.0], UsageError, "float"), ([[1]], UsageError, "shape"),
    ("abc", UsageError, "token ids"), ([2**70], UsageError, "token ids"), ([[1], [1, 2]], UsageError, "token ids")])
def test_prompts_that_can_never_run_are_refused_at_once(prompt, error, words):
    engine = Engine(FakeBackend(VOCAB, max_model_len=67))
    with pytest.raises(error, match=words):
        engine.add(Request("r", prompt))
    assert not engine.has_work
    engine.add(Request("r", [0] * 66))  # one token fits behind it
    assert len(drive(engine)[0]["r"][0]) == 1


def test_ids_are_unique_while_they_run():
    engine = Engine(FakeBackend(VOCAB))
    engine.add(request("r", [1]))
    with pytest.raises(UsageError, match="'r' is in use"):
        engine.add(request("r", [1]))
    drive(engine)
    engine.add(request("r", [1]))


def test_end_tokens():
    prompt, free = [5, 6], dict(temperature=1.5, max_tokens=40)
    ids = run([request("r", prompt, ignore_eos=True, **free)])[0]["r"][0]
    at = next(i for i, t in enumerate(ids) if t in EOS)  # the answer meets an end token by itself
    assert run([request("r", prompt, **free)])[0]["r"][0::2] == (ids[:at + 1], "stop")
    both = request("r", prompt, stop_token_ids=EOS, **free)
    assert run([both])[0]["r"][2:] == ("stop", None)  # the model's own end is no stop_reason
    stopped = run([request("r", prompt, stop_token_ids=EOS, ignore_eos=True, **free)])[0]["r"]
    assert stopped[0] == ids[:at + 1] and stopped[2:] == ("stop", ids[at])
    assert stopped[1] == b"".join(map(Letters.token_bytes, ids[:at])).decode()


@settings(deadline=None, max_examples=150)
@given(prompts, st.integers(0, 99), st.data())
def test_stop_strings_across_tokens_end_exactly(prompt, seed, data):
    free = dict(seed=seed, max_tokens=25, temperature=1.5, ignore_eos=True)
    ids, text, _, _ = run([request("r", prompt, **free)])[0]["r"]
    if not text:
        return
    start = data.draw(st.integers(0, len(text) - 1))
    stop = text[start:start + data.draw(st.integers(1, 6))]
    answer, last, _ = run([request("r", prompt, stop=[stop, "never said"], **free)])
    assert answer["r"][2:] == ("stop", stop)
    assert answer["r"][1] == text[:text.index(stop)]
    used = answer["r"][0]
    assert used == ids[:len(used)] and last["r"].stats.completion_tokens == len(used)
    spoken = b"".join(map(Letters.token_bytes, used)).decode()
    assert stop in spoken and stop not in b"".join(map(Letters.token_bytes, used[:-1])).decode()  # the token that completes it is the last


def test_a_stop_beats_the_limit_it_meets():
    prompt = [1, 2, 3]
    ids, text, _, _ = run([request("r", prompt, ignore_eos=True)])[0]["r"]
    at_end = run([request("r", prompt, ignore_eos=True, stop_token_ids=[ids[11]], max_tokens=ids.index(ids[11]) + 1)])[0]["r"]
    assert at_end[2:] == ("stop", ids[11])


def test_half_a_character_is_shown_at_the_end_and_may_complete_a_stop_string():
    class Bytes:
        token_bytes = staticmethod(lambda i: b"\xe2")  # opens a character that is never finished

    params = SamplingParams(seed=1, max_tokens=3, stop=["\ufffd" * 3]).resolved({})
    answer = run([Request("r", [1], params, (), TextStream(Bytes, params.stop))])[0]["r"]
    assert answer[1:] == ("", "stop", "\ufffd" * 3)
    params = replace(params, stop=())
    assert run([Request("r", [1], params, (), TextStream(Bytes))])[0]["r"][1:] == ("\ufffd" * 3, "length", None)


def test_logprobs_come_with_their_tokens():
    answers, last, _ = run([request("r", [1], temperature=0, logprobs=2, max_tokens=1)])
    drawn, = last["r"].drawn
    assert drawn == sample_row(fake_logits([1], VOCAB), Draw(last["r"].sampling, 1, 1))
    assert drawn.top_logprobs[0] == (drawn.token_id, drawn.logprob)


# Many requests

def test_a_seed_gives_the_same_answer_alone_and_in_a_batch_of_64():
    requests = [request(str(i), [(i * 5 + j) % VOCAB for j in range(1 + i * 3 % 100)], seed=i % 7, temperature=1.2, top_p=0.95, max_tokens=20)
                for i in range(64)]
    together = run(requests, num_slots=64)[0]
    for r in requests:
        again = replace(r, text=text_of(r.params))
        assert run([again], num_slots=1)[0][r.request_id] == together[r.request_id]
    same = run([replace(request(str(i), [9, 9], seed=5)) for i in range(64)], num_slots=64)[0]
    assert len(set(map(str, same.values()))) == 1


def test_missing_seeds_are_drawn_and_reported():
    free = dict(seed=None, max_tokens=30, temperature=2, ignore_eos=True)
    answers, last, _ = run([request(str(i), [1], **free) for i in range(3)])
    assert len({e.sampling.seed for e in last.values()}) == 3  # 53 random bits
    for name, event in last.items():
        assert run([request("r", [1], **free | {"seed": event.sampling.seed})])[0]["r"][0] == answers[name][0]
    engine = [Engine(FakeBackend(VOCAB), seeds=random.Random(4)) for _ in range(2)]
    for e in engine:
        e.add(request("r", [1], seed=None))
    assert drive(engine[0])[0] == drive(engine[1])[0]


schedule = st.lists(st.one_of(st.tuples(st.just("add"), prompts, parameters), st.tuples(st.just("step"), st.integers(1, 6)),
                              st.tuples(st.just("abort"), st.integers(0, 20))), max_size=25)


@settings(deadline=None, max_examples=250)
@given(schedule, machines, st.integers(0, 40))
def test_any_schedule_gives_every_request_its_own_answer(schedule, machine, poison):
    """Adds, aborts and steps in any order, with NaN after some prefixes: nobody notices anybody else."""
    bad = (lambda tokens: sum(tokens) % 41 == 0) if poison < 10 else (lambda tokens: False)
    engine, answers, last, added, aborted = Engine(FakeBackend(VOCAB, max_model_len=CONTEXT, bad=bad, **machine)), {}, {}, {}, set()
    for action, *arguments in schedule:
        if action == "add":
            r = request(f"r{len(added)}", arguments[0], **arguments[1])
            if len(r.prompt_ids) < engine.context:
                engine.add(r)
                added[r.request_id] = r
        elif action == "step":
            for _ in range(arguments[0]):
                collect(engine.step(), answers, last)
        else:
            name = f"r{arguments[0]}"
            engine.abort(name)
            if name in added and name not in last:
                aborted.add(name)
        slots, pages = engine.scheduler.free
        held = engine.scheduler.running
        assert slots == engine.scheduler.num_slots - len(held) and pages == machine["num_pages"] - sum(len(s.pages) for s in held)
    more, ends = drive(engine) if engine.has_work else ({}, {})
    for name, (ids, text, *end) in more.items():
        before = answers.get(name, ([], ""))
        answers[name] = (before[0] + ids, before[1] + text, *end)
    last |= ends
    assert set(last) == set(added)
    assert engine.scheduler.free == (engine.scheduler.num_slots, machine["num_pages"])
    for name, r in added.items():
        ids, text, finish_reason, stop_reason = alone(r.prompt_ids, r.params, context=engine.context, bad=bad)
        if name in aborted:
            assert answers[name][0] == ids[:len(answers[name][0])] and last[name].finish_reason == "abort"
        else:
            assert answers[name] == (ids, text, finish_reason, stop_reason)
        assert isinstance(last[name].error, NumericalError) == (last[name].finish_reason == "error")


def test_decoding_goes_on_in_every_step_while_a_long_prompt_is_read():
    engine = Engine(FakeBackend(VOCAB, num_slots=3, max_model_len=600))
    engine.add(request("short", [1], max_tokens=20, ignore_eos=True))
    engine.step()
    engine.add(request("long", [2] * 500))
    engine.add(request("late", [3] * 100))
    tokens = [[e.request_id for e in engine.step()] for _ in range(10)]
    assert all("short" in t for t in tokens)
    assert engine.backend.row_counts[1:9] == [64] * 8  # 63 rows of the long prompt beside the decoding row
    assert "long" in tokens[7] and "late" not in tokens[7]  # 500 rows in eight steps of 63; the rest of the eighth went to the late one


def test_a_request_that_needs_many_pages_is_not_overtaken():
    engine = Engine(FakeBackend(VOCAB, num_slots=3, num_pages=4))
    for name, prompt, tokens in (("a", [1] * 130, 10), ("b", [1] * 200, 10), ("c", [1], 10)):
        engine.add(request(name, prompt, max_tokens=tokens, ignore_eos=True))
    engine.step()
    assert [s.request.request_id for s in engine.scheduler.running] == ["a"]  # c would fit beside a, but b came first
    order = []
    while engine.has_work:
        order += [e.request_id for e in engine.step() if e.finish_reason]
    assert order == ["a", "b", "c"]


def test_slots_beyond_the_rows_of_a_step_stay_empty():
    answers, _, engine = run([request(str(i), [i], ignore_eos=True) for i in range(6)], num_slots=6, max_rows=2)
    assert len(answers) == 6 and max(engine.backend.row_counts) == 2
    assert engine.scheduler.num_slots == 2  # more could decode so that no row is ever left for a prompt


def test_a_row_that_is_not_finite_ends_only_its_own_request():
    bad = lambda tokens: tokens[0] == 9 and len(tokens) == 5
    names = {"sick": [9, 9], "well": [1, 2], "later": [9, 9, 9, 9, 9, 9]}
    answers, last, engine = run([request(n, p, ignore_eos=True) for n, p in names.items()], bad=bad)
    assert len(engine.backend.slots[0].tokens) == 5  # the row that was not finite stands, and who comes next opens the slot again
    assert answers["sick"][2] == "error" and len(answers["sick"][0]) == 3  # positions 2, 3, 4 were drawn
    assert isinstance(last["sick"].error, NumericalError) and "position 5" in str(last["sick"].error)
    for name in ("well", "later"):
        assert answers[name] == run([request(name, names[name], ignore_eos=True)])[0][name]
        assert last[name].error is None
