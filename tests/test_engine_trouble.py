"""The engine when something fails, is aborted or interrupted; its times; teacher forcing beside running requests."""
from dataclasses import replace

import numpy as np
import pytest
from engine_oracle import VOCAB, Letters, a_failure_ends_what_runs, collect, drive, request, run
from fake_backend import FakeBackend, fake_logits

from k3cuda.errors import K3Error, NumericalError, OutOfMemory, PromptTooLong, UsageError
from k3cuda.runtime.engine import Engine
from k3cuda.runtime.text_stream import TextStream


# Calls of a step on one running request: step, sample, commit; the first step opens two slots before them.
@pytest.mark.parametrize("call", range(8))
@pytest.mark.parametrize("raised, want", [(RuntimeError("lost"), K3Error), (MemoryError("full"), OutOfMemory), (NumericalError("own"), NumericalError)])
def test_a_failing_backend_ends_what_runs_and_nothing_else(call, raised, want):
    a_failure_ends_what_runs(call, raised, want)


def test_an_interrupt_is_raised_and_then_told():
    engine = Engine(FakeBackend(VOCAB, num_slots=1, fail={3: KeyboardInterrupt()}))
    engine.add(request("a", [1], ignore_eos=True))
    engine.add(request("b", [2], ignore_eos=True))
    answers, last = {}, {}
    with pytest.raises(KeyboardInterrupt):
        for _ in range(9):
            collect(engine.step(), answers, last)
    more, ends = drive(engine)
    assert ends["a"].finish_reason == "abort" and ends["b"].finish_reason == "length"
    assert more["b"] == run([request("b", [2], ignore_eos=True)])[0]["b"]


def test_a_reader_that_fails_is_its_own_requests_trouble():
    class Broken(TextStream):
        def feed(self, token_id):
            raise ValueError("cannot read this")

    class BrokenAtTheEnd(TextStream):
        def finish(self):
            raise ValueError("cannot finish this")

    requests = [replace(request("feed", [1]), text=Broken(Letters)), replace(request("finish", [1]), text=BrokenAtTheEnd(Letters)), request("well", [1])]
    answers, last, _ = run(requests)
    assert [last[n].finish_reason for n in ("feed", "finish")] == ["error", "error"]
    assert "cannot read this" in str(last["feed"].error) and "cannot finish this" in str(last["finish"].error)
    assert answers["well"] == run([request("well", [1])])[0]["well"]


def test_abort_frees_at_once_and_is_told_once():
    engine = Engine(FakeBackend(VOCAB, num_slots=1))
    for name in "ab":
        engine.add(request(name, [1], ignore_eos=True))
    engine.step()
    engine.abort("a")
    assert engine.scheduler.free == (1, engine.scheduler.num_pages)
    engine.abort("a")
    engine.abort("unknown")
    engine.abort("b")
    events = engine.step()
    assert [(e.request_id, e.finish_reason) for e in events] == [("a", "abort"), ("b", "abort")]
    assert events[0].stats.completion_tokens == 1 and events[1].stats.ttft_s is None
    assert not engine.has_work and engine.step() == []


def test_close_ends_everything_and_may_be_repeated():
    engine = Engine(FakeBackend(VOCAB))
    engine.add(request("a", [1]))
    engine.close()
    engine.close()
    assert engine.backend.closed and [e.finish_reason for e in engine.step()] == ["abort"]


# Measures

def test_times_are_those_of_the_clock():
    # Calls: two arrivals, admission of a, end of step 1 (a's prompt of 100 needs two), of 2, 3, 4, then b.
    times = iter([1.0, 2.0, 4.0, 5.0, 8.0, 9.0, 11.0, 20.0, 21.0])
    engine = Engine(FakeBackend(VOCAB, num_slots=1), clock=lambda: next(times))
    engine.add(request("a", [1] * 100, max_tokens=3, ignore_eos=True))
    engine.add(request("b", [1], max_tokens=1))
    last = drive(engine)[1]
    a, b = last["a"].stats, last["b"].stats
    assert (a.ttft_s, a.decode_s, a.tpot_ms, a.tok_per_s, a.prefill_tok_per_s) == (8 - 1, 11 - 8, 1500.0, 2 / 3, 100 / (8 - 4))
    assert (b.ttft_s, b.decode_s, b.tpot_ms, b.tok_per_s, b.prefill_tok_per_s) == (21 - 2, 0, None, None, 1.0)


# Teacher forcing

def test_logits_are_forced_beside_what_runs():
    engine = Engine(FakeBackend(VOCAB, num_slots=2, max_model_len=100))
    engine.add(request("r", [4, 5], ignore_eos=True))
    answers, last = {}, {}
    collect(engine.step(), answers, last)
    ids = [i % VOCAB for i in range(70)]  # more than a page
    got = engine.by_hand.logits(ids)
    assert got.dtype == np.float32 and got.tobytes() == np.stack([fake_logits(ids[:i + 1], VOCAB) for i in range(70)]).tobytes()
    while engine.has_work:
        collect(engine.step(), answers, last)
    assert answers["r"] == run([request("r", [4, 5], ignore_eos=True)])[0]["r"]
    assert engine.scheduler.free[0] == 2


def test_logits_refuse_what_does_not_fit():
    engine = Engine(FakeBackend(VOCAB, num_slots=1, max_model_len=10))
    assert engine.by_hand.logits([1] * 10).shape == (10, VOCAB)
    for ids, error in (([], PromptTooLong), ([1] * 11, PromptTooLong), ([VOCAB], UsageError)):
        with pytest.raises(error):
            engine.by_hand.logits(ids)
    engine.add(request("r", [1]))
    engine.step()
    with pytest.raises(UsageError, match="no slot"):
        engine.by_hand.logits([1])
