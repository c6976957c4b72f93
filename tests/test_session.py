"""Sessions: a script feeds sequences by hand, beside requests. Who holds what, and what errors leave behind; on the fake backend."""
import gc
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from fake_backend import fake_logits
from hypothesis import HealthCheck, given, settings, strategies as st
from scripted import GREEDY, TOKENIZER, fake  # noqa: F401, the fixture

from k3cuda import Session
from k3cuda.config import PAGE_SIZE
from k3cuda.errors import K3Error, PromptTooLong, UsageError

VOCAB = TOKENIZER.vocab_size
FREE_RUN = GREEDY.__class__(temperature=0, max_tokens=20, ignore_eos=True)


def says(session, tokens):
    """Whether a session stands behind exactly these tokens."""
    return session.logits.tobytes() == fake_logits(tokens, VOCAB).tobytes() and session.position == len(session) == len(tokens)


def free(llm):
    llm._clear_dropped()
    return llm._engine.scheduler.free


# What it says

@pytest.mark.parametrize("prompt", [[5, 6, 7], (5, 6, 7), np.array([5, 6, 7], np.uint16), [[5, 6, 7]]], ids=repr)
def test_prefill_takes_what_generate_takes(fake, prompt):
    assert says(fake().prefill(prompt), [5, 6, 7])
    assert says(fake().prefill("hi"), TOKENIZER.encode("hi"))


def test_logits_have_the_shape_of_the_ids(fake):
    session = fake().prefill([5])
    tokens = [5]
    for ids in (6, np.int64(7), np.array(8), [9], (1, 2), np.array([3, 4], np.int32), np.arange(5)):
        out, shape = session.step(ids), np.shape(ids)
        new = np.reshape(ids, -1).tolist()
        want = [fake_logits(tokens + new[:i + 1], VOCAB) for i in range(len(new))]
        tokens += new
        assert out.shape == (*shape, VOCAB) and out.dtype == np.float32 and out.tobytes() == np.stack(want).tobytes() and says(session, tokens)


def test_ids_on_a_gpu_come_over_through_cupy(fake, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(asnumpy=lambda x: x.values))
    token, several = (SimpleNamespace(__cuda_array_interface__={}, values=np.array(x)) for x in (6, [7, 8]))
    session = fake().prefill([5])
    assert session.step(token).shape == (VOCAB,) and session.step(several).shape == (2, VOCAB) and says(session, [5, 6, 7, 8])


def test_arrays_are_the_callers_own(fake):
    """Changing them changes nothing in the session, and later steps change nothing in them."""
    llm = fake()
    session = llm.prefill([5])
    first, out = session.logits, session.step(6)
    want = out.copy()
    out[:] = 0
    assert says(session, [5, 6]) and first.tobytes() == fake_logits([5], VOCAB).tobytes()
    child, kept = session.fork(), session.logits
    kept[:] = 0
    assert says(child, [5, 6])
    session.step([7, 8])
    llm.generate("ab", GREEDY)
    assert not kept.any() and not out.any() and want.tobytes() == fake_logits([5, 6], VOCAB).tobytes()


@pytest.mark.parametrize("max_rows, max_logits", [(1, 1), (3, 3), (64, 64), (32, 7)])
def test_more_tokens_than_a_step_has_rows(fake, max_rows, max_logits):
    llm, tokens = fake(max_rows=max_rows, max_logits=max_logits), list(range(10, 100))
    session = llm.prefill(tokens[:40])
    assert says(session, tokens[:40]) and llm.backend.row_counts == [min(max_rows, 40 - i) for i in range(0, 40, max_rows)]
    session.feed(tokens[40:50])
    assert says(session, tokens[:50])
    out = session.step(tokens[50:])
    assert out.tobytes() == np.stack([fake_logits(tokens[:i + 1], VOCAB) for i in range(50, 90)]).tobytes()


OPERATIONS = st.lists(st.tuples(st.sampled_from(["prefill", "step", "step", "feed", "fork", "fork", "close", "lose", "generate", "stream", "next"]),
                                st.integers(0, 7), st.integers(1, 70), st.integers(0, 2**31)), max_size=40)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(OPERATIONS, st.booleans())
def test_any_use_in_any_order(fake, operations, overlaps):
    """Sessions, their forks, requests and streams together: each says what its own tokens say, and at the end all is free again."""
    llm = fake(num_slots=4, num_pages=15, max_rows=13, max_model_len=200, overlaps=overlaps)
    all_free, sessions, streams = free(llm), [], []
    for what, which, count, seed in operations:
        ids = np.random.default_rng(seed).integers(0, VOCAB, count).tolist()
        try:
            if what == "prefill":
                sessions.append((llm.prefill(ids), ids))
            elif what == "generate":
                output, = llm.generate([ids], FREE_RUN)
                assert output.finish_reason == "length"
            elif what == "stream":
                streams.append(llm.stream(ids, FREE_RUN))
            elif what == "next":
                if streams:
                    next(streams[which % len(streams)], None)
            elif sessions:
                session, tokens = sessions[which % len(sessions)]
                if what in ("close", "lose"):
                    del sessions[which % len(sessions)]
                    if what == "close":
                        session.close()
                elif what == "fork":
                    sessions.append((session.fork(), list(tokens)))
                else:
                    getattr(session, what)(ids)
                    tokens += ids
                del session
        except (UsageError, PromptTooLong) as e:
            assert any(text in str(e) for text in ("a session needs a slot", "open sessions hold", "the context holds")), e
        for session, tokens in sessions:
            assert says(session, tokens)
    for stream in streams:
        list(stream)
    sessions.clear()
    session = None
    gc.collect()
    assert free(llm) == all_free and not any(llm._engine.scheduler._holders)


# Slots and pages

def test_a_fork_shares_pages_that_are_full(fake):
    llm = fake(max_model_len=4 * PAGE_SIZE)
    pages = free(llm)[1]
    for length, shared in ((PAGE_SIZE - 1, 0), (PAGE_SIZE, 1), (2 * PAGE_SIZE + 5, 2)):
        with llm.prefill([3] * length) as parent:
            child = parent.fork()
            assert [a == b for a, b in zip(parent.pages, child.pages)] == [i < shared for i in range(4)] and parent.slot != child.slot
            assert free(llm) == (2, pages - 8 + shared)
        assert free(llm) == (3, pages - 4) and says(child, [3] * length)
        child.step([4] * PAGE_SIZE)   # into and over the page that was copied
        child.close()
        assert free(llm) == (4, pages)


def test_no_slot_is_free(fake):
    llm = fake(num_slots=2)
    first, second = llm.prefill([1]), llm.prefill([2])
    for call in (lambda: llm.prefill([3]), first.fork, lambda: llm.logits([1])):
        with pytest.raises(UsageError, match="close"):
            call()
    for call in (lambda: llm.generate([3], GREEDY), lambda: llm.stream([3], GREEDY)):
        with pytest.raises(UsageError, match="open sessions hold"):   # it would wait for ever
            call()
    assert says(first, [1]) and says(second, [2]) and not llm._collectors
    second.close()
    assert llm.generate([3], GREEDY)[0].finish_reason == "length" and says(first.fork(), [1])


def test_no_session_takes_what_a_waiting_request_needs(fake):
    llm = fake(num_slots=1)
    stream = llm.stream([3], FREE_RUN)   # waits: nothing has run yet
    with pytest.raises(UsageError, match="1 requests wait"):
        llm.prefill([1])
    assert len(list(stream)) == 20 and says(llm.prefill([1]), [1])


def test_no_request_waits_for_pages_that_sessions_hold(fake):
    llm = fake(num_slots=3, num_pages=9, max_model_len=4 * PAGE_SIZE)
    sessions = [llm.prefill([1]), llm.prefill([2])]
    long = GREEDY.__class__(temperature=0, max_tokens=2 * PAGE_SIZE, ignore_eos=True)
    with pytest.raises(UsageError, match="open sessions hold"):
        llm.generate([3], long)
    assert llm.generate([3], GREEDY)[0].finish_reason == "length"   # one page is enough for that
    sessions.pop().close()
    assert llm.generate([3], long)[0].finish_reason == "length"


def test_losing_a_session_frees_it(fake):
    llm = fake(num_slots=1)
    session = llm.prefill([1])
    del session
    gc.collect()
    session = llm.prefill([2])
    session.me = session   # lost in a cycle
    del session
    gc.collect()
    assert llm.generate("b", GREEDY)[0].finish_reason == "length"


# Errors that lose nothing

@pytest.mark.parametrize("ids, error, text", [
    ([], PromptTooLong, "no token to feed"), (np.zeros(0, int), PromptTooLong, "no token to feed"), ([VOCAB], UsageError, "outside the vocabulary"),
    (-1, UsageError, "outside the vocabulary"), ([1, 2, -3], UsageError, "token id -3"), (2**70, UsageError, "token ids"), ("hi", UsageError, "found text"),
    (1.0, UsageError, "float"), ([1.0], UsageError, "wanted integers"), (np.array(1.5), UsageError, "float64"), (True, UsageError, "bool"),
    (None, UsageError, "NoneType"), ([[1, 2]], UsageError, "wanted integers"), (np.zeros((1, 2), int), UsageError, "shape"),
    ([1] * 507, PromptTooLong, "found 507 tokens behind 6, the context holds 512")], ids=str)
@pytest.mark.parametrize("call", ["step", "feed"])
def test_ids_that_are_refused(fake, call, ids, error, text):
    session = fake().prefill([1, 2, 3, 4, 5, 6])
    calls = session._llm.backend.calls
    with pytest.raises(error, match=text):
        getattr(session, call)(ids)
    assert says(session, [1, 2, 3, 4, 5, 6]) and session._llm.backend.calls == calls
    session.step(7)
    assert says(session, [1, 2, 3, 4, 5, 6, 7])


@pytest.mark.parametrize("prompt, error", [("", PromptTooLong), ([], UsageError), ([[]], PromptTooLong), (["a", "b"], UsageError), ([1] * 513, PromptTooLong),
                                           ([-1], UsageError), (5, UsageError), (None, UsageError)], ids=repr)
def test_prompts_that_are_refused(fake, prompt, error):
    llm = fake(num_slots=1)
    with pytest.raises(error):
        llm.prefill(prompt)
    assert says(llm.prefill([1] * 512), [1] * 512)   # all of the context, in the one slot


def test_a_closed_session(fake):
    llm = fake()
    session = llm.prefill([1])
    child = session.fork()
    with session:
        pass
    session.close()
    for call in (lambda: session.step(1), lambda: session.feed([1]), session.fork, lambda: session.slot, lambda: session.pages):
        with pytest.raises(UsageError, match="this session is closed"):
            call()
    assert says(session, [1]) and says(child, [1])   # what was computed is there
    child.step(2)
    llm.close()
    with pytest.raises(UsageError, match="this LLM is closed"):
        child.step(3)
    child.close()
    assert isinstance(child, Session) and says(child, [1, 2])


@pytest.mark.parametrize("raised", [RuntimeError("lost"), KeyboardInterrupt()], ids=repr)
def test_a_step_that_fails_changes_nothing(fake, raised):
    llm = fake(num_slots=2)
    session = llm.prefill([1, 2])
    llm.backend.fail = {llm.backend.calls: raised}   # the step itself
    with pytest.raises(type(raised)):
        session.step([3, 4])
    assert says(session, [1, 2])
    session.step([3, 4])
    assert says(session, [1, 2, 3, 4])
    llm.backend.fail = {llm.backend.calls: raised}   # the copy
    with pytest.raises(type(raised)):
        session.fork()
    assert free(llm)[0] == 1
    with session.fork() as child:
        assert says(child, [1, 2, 3, 4])
    for call in range(2):   # opening the slot, the step
        llm.backend.fail = {llm.backend.calls + call: raised}
        with pytest.raises(type(raised)):
            llm.prefill([5])
        assert free(llm)[0] == 1


def test_a_commit_that_fails_is_known(fake):
    llm = fake(num_slots=2)
    session = llm.prefill([1, 2])
    llm.backend.fail = {llm.backend.calls + 1: KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        session.step(3)
    for call in (lambda: session.step(3), session.fork):
        with pytest.raises(K3Error, match="commit behind 2 tokens broke off"):
            call()
    session.close()
    assert free(llm)[0] == 2


def test_a_long_text_that_breaks_off(fake):
    """What ran is committed; there are no logits for it, and the rest can follow."""
    llm, tokens = fake(max_rows=4), list(range(20, 30))
    session = llm.prefill([1])
    llm.backend.fail = {llm.backend.calls + 2: KeyboardInterrupt()}   # step, commit, and the second step
    with pytest.raises(KeyboardInterrupt):
        session.feed(tokens)
    assert session.position == 5
    with pytest.raises(UsageError, match="broke off behind 5 tokens"):
        session.logits
    child = session.fork()
    with pytest.raises(UsageError, match="broke off behind 5 tokens"):
        child.logits
    for each in (session, child):
        each.feed(tokens[4:])
        assert says(each, [1, *tokens])


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_failing_request_touches_no_session(fake, overlaps):
    llm = fake(overlaps=overlaps)
    session = llm.prefill([1])
    llm.backend.fail = {llm.backend.calls + 1: RuntimeError("lost")}
    output, = llm.generate([2], GREEDY)
    assert output.finish_reason == "error" and says(session, [1])
    session.step(2)
    assert says(session, [1, 2])


# Callers that get in each other's way

def test_calls_from_another_thread_or_from_inside_are_refused(fake):
    llm, entered, leave, found = fake(), threading.Event(), threading.Event(), []
    session = llm.prefill([1])

    def wait(tokens):
        entered.set()
        assert leave.wait(10)   # seconds; far beyond what the other thread needs
        try:
            session.step(9)
        except UsageError as e:
            found.append(str(e))
        return False

    llm.backend.bad = wait
    thread = threading.Thread(target=lambda: found.append(session.step(2)))
    thread.start()
    assert entered.wait(10)
    for call in (lambda: session.step(3), lambda: session.feed([3]), session.fork, session.close, lambda: llm.prefill([1]), lambda: llm.buffer("logits"),
                 lambda: llm.generate("b")):
        with pytest.raises(UsageError, match="one caller at a time"):
            call()
    leave.set()
    thread.join()
    assert len(found) == 2 and "one caller at a time" in found[0] and says(session, [1, 2])


def test_threads_that_take_turns(fake):
    llm, lock, done = fake(), threading.Lock(), []

    def work(first):
        with lock:
            session = llm.prefill([first])
        tokens = [first]
        for token in range(20):
            with lock:
                session.step(token)
                tokens.append(token)
        done.append(says(session, tokens))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done == [True] * 4
