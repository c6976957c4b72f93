"""The engine on a backend that overlaps: a step is launched before the tokens of the one before it are read, and nothing else differs.

tests/test_engine.py draws `overlaps` too: any schedule gives every request what it gives alone. Here is when what happens.
"""
from dataclasses import replace

import pytest
from engine_oracle import EOS, VOCAB, a_failure_ends_what_runs, collect, drive, request, run, text_of
from fake_backend import FakeBackend, FakePending

from k3cuda.errors import K3Error, NumericalError, OutOfMemory
from k3cuda.runtime.backend import AS_SAMPLED
from k3cuda.runtime.engine import Engine


class Watched(FakeBackend):
    """Writes down in `log` what is launched, as lists of (slot, token), and when its tokens are read."""

    def __init__(self, *args, **options):
        super().__init__(*args, overlaps=True, **options)
        self.log = []

    def open_slot(self, slot, pages):
        self.log.append(("open", slot))
        super().open_slot(slot, pages)

    def launch(self, rows, draws):
        self.log.append(("launch", list(zip(rows.slots.tolist(), rows.token_ids.tolist()))))
        number, log, inner = sum(kind == "launch" for kind, _ in self.log), self.log, super().launch(rows, draws)

        class Pending:
            def drawn(self):
                log.append(("read", number))
                return FakePending.drawn(inner)
        return Pending()


def both(requests, **backend):
    """The answers without and with overlap, which must be the same; of the second run also the engine."""
    plain, _, _ = run([replace(r, text=r.text and text_of(r.params)) for r in requests], **backend)
    ahead, last, engine = run([replace(r, text=r.text and text_of(r.params)) for r in requests], **backend, overlaps=True)
    assert ahead == plain
    return ahead, last, engine


def test_the_next_step_is_launched_before_tokens_are_read():
    engine = Engine(Watched(VOCAB))
    engine.add(request("a", [4, 5], ignore_eos=True, max_tokens=3))
    engine.step()
    kinds = [("open", 0), ("launch", [(0, 4), (0, 5)]), ("launch", [(0, AS_SAMPLED)]), ("read", 1)]
    assert engine.backend.log == kinds
    engine.step()
    kinds += [("launch", [(0, AS_SAMPLED)]), ("read", 2)]
    assert engine.backend.log == kinds
    engine.step()   # the third token is the last, which is known before it is read: no fourth launch
    assert engine.backend.log == kinds + [("read", 3)]
    assert not engine.has_work


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
@pytest.mark.parametrize("prompt", [1, 64, 65, 150])
def test_limits_launch_no_step_too_many(prompt, max_tokens):
    for many in (1, 3):
        _, _, engine = both([request(str(i), [7] * prompt, ignore_eos=True, max_tokens=max_tokens) for i in range(many)])
        assert sum(engine.backend.row_counts) == many * (prompt + max_tokens - 1)


def test_the_context_is_exact():
    for length in (29, 30, 66):
        answers, _, engine = both([request("r", [1] * length, max_tokens=None, ignore_eos=True)], max_model_len=67)
        assert len(answers["r"][0]) == 67 - length and sum(engine.backend.row_counts) == 66


def stopping(seed, **params):
    """A request that ends at a token nobody could foresee, and how many it has."""
    for s in range(seed, seed + 100):
        r = request(f"s{s}", [s % VOCAB, 3], seed=s, temperature=1.5, max_tokens=40, **params)
        ids, _, reason, _ = run([replace(r, text=text_of(r.params))])[0][r.request_id]
        if reason == "stop" and 4 < len(ids) < 40:
            return r, len(ids)
    raise AssertionError("no such request")


@pytest.mark.parametrize("params", [{}, {"stop_token_ids": [2], "ignore_eos": True}, {"stop": ["abc"], "ignore_eos": True},
                                    {"frequency_penalty": 1.0, "repetition_penalty": 1.3}], ids=["end token", "stop id", "stop string", "penalties"])
def test_a_stop_in_the_middle_costs_one_row_and_touches_nobody(params):
    stop, length = stopping(5, **params)
    others = [request(f"o{i}", [i, 2, 9], ignore_eos=True, max_tokens=30, seed=i, **{k: v for k, v in params.items() if "penalty" in k}) for i in range(2)]
    answers, last, engine = both([others[0], stop, others[1]])
    assert len(answers[stop.request_id][0]) == length and last[stop.request_id].stats.completion_tokens == length
    assert sum(engine.backend.row_counts) == 2 * (3 + 29) + 2 + length   # the prompt, a row a token, and the row behind the last one


def test_a_slot_is_used_again_while_a_row_of_its_last_sequence_is_on_its_way():
    stop, _ = stopping(5)
    engine = Engine(Watched(VOCAB, num_slots=1))
    engine.add(stop)
    after = request("after", [8, 9, 10], ignore_eos=True, max_tokens=5)
    engine.add(after)
    answers, last = drive(engine)
    assert answers["after"] == run([replace(after, text=text_of(after.params))])[0]["after"]
    log = engine.backend.log
    second = [i for i, entry in enumerate(log) if entry == ("open", 0)][1]
    launched = sum(kind == "launch" for kind, _ in log[:second])
    assert ("read", launched - 1) in log[:second] and ("read", launched) not in log   # nobody looks at the row behind the end
    assert engine.scheduler.free == (1, engine.scheduler.num_pages)


def test_prompts_enter_beside_what_runs():
    engine, answers, last = Engine(Watched(VOCAB, max_rows=5)), {}, {}
    requests = [request(f"r{i}", [(3 * i + j) % VOCAB for j in range(1 + 4 * i)], temperature=1.2, max_tokens=25, seed=i) for i in range(5)]
    for r in requests:
        engine.add(r)
        for _ in range(2):
            collect(engine.step(), answers, last)
    answers_, last_ = {}, {}
    while engine.has_work:
        collect(engine.step(), answers_, last_)
    for r in requests:
        want = run([replace(r, text=text_of(r.params))])[0][r.request_id]
        ids, text = (answers.get(r.request_id, ([], ""))[k] + answers_.get(r.request_id, ([], ""))[k] for k in (0, 1))
        assert (ids, text) == want[:2]


def test_a_row_that_is_not_finite_ends_its_own_request_alone():
    bad = lambda tokens: len(tokens) == 7 and tokens[0] == 4   # noqa: E731
    requests = [request("bad", [4, 5], ignore_eos=True), request("well", [6, 5], ignore_eos=True)]
    answers, last, engine = both(requests, bad=bad)
    assert answers["bad"][2] == "error" and isinstance(last["bad"].error, NumericalError) and "position 7" in str(last["bad"].error)
    assert len(answers["bad"][0]) == 5 and answers["well"][2] == "length"


def test_an_abort_while_a_step_is_on_its_way():
    engine = Engine(Watched(VOCAB, num_slots=2))
    for name in "abc":
        engine.add(request(name, [1, 2], ignore_eos=True, max_tokens=9, seed=3))
    answers, last = {}, {}
    collect(engine.step(), answers, last)
    engine.abort("a")
    assert engine.scheduler.free[0] == 1
    for _ in range(30):
        collect(engine.step(), answers, last)
    assert last["a"].finish_reason == "abort" and last["a"].stats.completion_tokens == 1
    assert answers["b"] == answers["c"] == run([request("x", [1, 2], ignore_eos=True, max_tokens=9, seed=3)])[0]["x"]
    assert not engine.has_work and engine.step() == []


# A first step on two requests: two slots opened, three calls of a launch twice, then the tokens are read.
@pytest.mark.parametrize("call", range(13))
@pytest.mark.parametrize("raised, want", [(RuntimeError("lost"), K3Error), (MemoryError("full"), OutOfMemory)])
def test_a_failing_backend_ends_what_runs_and_nothing_else(call, raised, want):
    a_failure_ends_what_runs(call, raised, want, overlaps=True)


def test_an_interrupt_is_raised_and_then_told():
    engine = Engine(FakeBackend(VOCAB, num_slots=1, fail={9: KeyboardInterrupt()}, overlaps=True))
    for name in "ab":
        engine.add(request(name, [1], ignore_eos=True))
    answers, last = {}, {}
    with pytest.raises(KeyboardInterrupt):
        for _ in range(9):
            collect(engine.step(), answers, last)
    more, ends = drive(engine)
    assert ends["a"].finish_reason == "abort" and ends["b"].finish_reason == "length"
    assert more["b"] == run([request("b", [1], ignore_eos=True)])[0]["b"]


def test_logits_are_forced_while_a_step_is_on_its_way():
    engine, alone = Engine(Watched(VOCAB, num_slots=2)), Engine(FakeBackend(VOCAB))
    engine.add(request("r", [4, 5], ignore_eos=True))
    answers, last = {}, {}
    collect(engine.step(), answers, last)
    ids = [i % VOCAB for i in range(70)]
    assert engine.by_hand.logits(ids).tobytes() == alone.by_hand.logits(ids).tobytes()
    while engine.has_work:
        collect(engine.step(), answers, last)
    assert answers["r"] == run([request("r", [4, 5], ignore_eos=True)])[0]["r"]


def test_end_tokens_are_met_by_these_requests():
    """What the tests above call a stop is one that only the tokens tell."""
    r, _ = stopping(5)
    assert run([replace(r, text=text_of(r.params))])[0][r.request_id][0][-1] in EOS
