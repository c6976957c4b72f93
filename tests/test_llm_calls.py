"""Calls of an LLM: what may be passed as a prompt, streams, interrupts, and callers that get in each other's way."""
import gc
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from fake_backend import fake_logits
from scripted import CLOSED, END, GREEDY, THOUGHT, TOKENIZER, USER, fake  # noqa: F401, the fixture

from k3cuda import SamplingParams
from k3cuda.errors import PromptTooLong, UsageError

# What may be passed as a prompt

class OnlyArray:
    def __array__(self, dtype=None, copy=None):
        return np.array([5, 6, 7])


class OnlyDlpack:
    def __init__(self, array):
        self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__


class OnGpu:
    __cuda_array_interface__ = {}


@pytest.mark.parametrize("prompts, want", [
    ([5, 6, 7], [[5, 6, 7]]), ((5, 6, 7), [[5, 6, 7]]), ([[5, 6], [7]], [[5, 6], [7]]), ([(5, 6), np.array([7])], [[5, 6], [7]]),
    (np.array([5, 6, 7], np.uint16), [[5, 6, 7]]), (np.array([[5, 6], [7, 8]]), [[5, 6], [7, 8]]), ([np.int32(5), 6], [[5, 6]]),
    (OnlyArray(), [[5, 6, 7]]), (OnlyDlpack(np.array([5, 6])), [[5, 6]]), ([], []), (np.zeros((0, 3), int), []),
    ("ab", [TOKENIZER.encode("ab")]), (["ab", [5]], [TOKENIZER.encode("ab"), [5]]),
    ("<|end_of_msg|>", [TOKENIZER.encode("<|end_of_msg|>")])])  # a marker's name is ordinary text
def test_prompts(fake, prompts, want):
    outputs = fake().generate(prompts, GREEDY)
    assert [list(o.prompt_token_ids) for o in outputs] == want
    assert END not in sum(want, [])


def test_arrays_on_a_gpu_come_over_through_cupy(fake, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(UsageError, match="CuPy is not installed"):
        fake().generate(OnGpu(), GREEDY)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(asnumpy=lambda x: np.array([5, 6], np.int32)))
    assert [o.prompt_token_ids for o in fake().generate(OnGpu(), GREEDY)] == [(5, 6)]
    assert [o.prompt_token_ids for o in fake().generate([OnGpu(), "ab"], GREEDY)] == [(5, 6), tuple(TOKENIZER.encode("ab"))]


@pytest.mark.parametrize("prompts, error", [
    ("", PromptTooLong), ([[]], PromptTooLong), (["ab", ""], PromptTooLong), (np.zeros(0, int), PromptTooLong), ([[5], [5] * 512], PromptTooLong),
    (5, UsageError), (None, UsageError), (b"ab", UsageError), ([5, "ab"], UsageError), ([True, False], UsageError), ([[5.0]], UsageError),
    (np.array([0.5]), UsageError), (np.array([True]), UsageError), (np.array(5), UsageError), (np.zeros((1, 1, 1), int), UsageError),
    ([[[5]]], UsageError), ([None], UsageError), ([-1], UsageError), ([TOKENIZER.vocab_size], UsageError), ({5: 6}, UsageError),
    ([2**70], UsageError), ([np.zeros((1, 1), int)], UsageError)])
def test_prompts_that_are_refused_before_anything_runs(fake, prompts, error):
    llm = fake()
    with pytest.raises(error):
        llm.generate(prompts, GREEDY)
    assert llm.backend.calls == 0 and not llm._collectors
    assert llm.generate("ab", GREEDY)[0].finish_reason == "length"


# Streams

@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0, stop=["Yes. N"]), SamplingParams(temperature=0)])
def test_streamed_answers_are_the_whole_ones(fake, params):
    llm = fake(THOUGHT + "Yes. No. é" + CLOSED)
    for whole, stream in ((llm.chat(USER, params), llm.stream_chat(USER, params)), (llm.generate("a", params)[0], llm.stream("a", params))):
        chunks = list(stream)
        assert "".join(c.text for c in chunks) == whole.text and "".join(c.reasoning for c in chunks) == (whole.reasoning or "")
        assert sum((c.token_ids for c in chunks), ()) == whole.token_ids and all(c.finish_reason is None for c in chunks[:-1])
        last = chunks[-1]
        assert (last.finish_reason, last.output.text, last.stats) == (whole.finish_reason, whole.text, last.output.stats)
        assert not any(c.from_draft for c in chunks)
        assert next(stream, None) is None and next(stream, None) is None
    assert not llm._collectors and llm._engine.scheduler.free[0] == 4


def test_streams_share_the_engine_with_everything(fake):
    llm, free = fake(), SamplingParams(max_tokens=20, ignore_eos=True, seed=3)
    want = {p: llm.generate(p, free)[0].token_ids for p in "abc"}
    first, second = llm.stream("a", free), llm.stream("b", free)
    got = {"a": next(first).token_ids, "b": next(second).token_ids}
    assert llm.generate("c", free)[0].token_ids == want["c"]  # pumps the streams too
    assert llm.logits([1, 2]).shape == (2, TOKENIZER.vocab_size)
    for name, stream in (("b", second), ("a", first)):
        for chunk in stream:
            got[name] += chunk.token_ids
    assert got == {name: want[name] for name in "ab"}


def test_closing_or_losing_a_stream_aborts_it(fake):
    llm, free = fake(num_slots=1), SamplingParams(ignore_eos=True)
    stream = llm.stream("a", free)
    next(stream)
    stream.close()
    stream.close()
    assert list(stream) == [] and llm._engine.scheduler.free[0] == 1
    with llm.stream("a", free) as stream:
        next(stream)
    assert llm._engine.scheduler.free[0] == 1
    llm.stream("a", free)
    stream = llm.stream("a", free)
    del stream
    gc.collect()
    assert llm.generate("b", GREEDY)[0].finish_reason == "length"  # would wait for ever behind a lost stream
    assert not llm._collectors


def test_closing_the_llm_ends_its_streams(fake):
    llm = fake()
    stream = llm.stream("a", SamplingParams(ignore_eos=True))
    first = next(stream)
    with llm:
        pass
    llm.close()
    last, = stream
    assert last.finish_reason == "abort" and last.output.token_ids == first.token_ids
    for call in (lambda: llm.generate("a"), lambda: llm.stream("a"), lambda: llm.logits([1]), lambda: llm.max_model_len):
        with pytest.raises(UsageError, match="closed"):
            call()


def test_a_stream_is_of_one_prompt(fake):
    with pytest.raises(UsageError, match="found 2 prompts"):
        fake().stream(["a", "b"])
    with pytest.raises(PromptTooLong):  # at once, not at the first chunk
        fake().stream("")


# Trouble

def test_an_interrupt_leaves_nothing_behind(fake):
    llm = fake(fail={9: KeyboardInterrupt()})  # in the middle of a step
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], SamplingParams(ignore_eos=True))
    assert not llm._collectors and llm._engine.scheduler.free[0] == 4
    assert llm.generate("a", GREEDY)[0].finish_reason == "length"
    llm.backend.fail = {llm.backend.calls + 4: KeyboardInterrupt()}
    stream = llm.stream("a", SamplingParams(ignore_eos=True))
    with pytest.raises(KeyboardInterrupt):
        list(stream)
    assert [c.finish_reason for c in stream] == ["abort"]


def test_a_failing_step_is_the_outputs_too(fake):
    out, = fake(fail={5: RuntimeError("lost")}).generate("a", GREEDY)
    assert out.finish_reason == "error" and "RuntimeError: lost" in str(out.error)


def test_calls_from_inside_a_call_are_refused(fake):
    llm, found = fake(), []

    def reenter(tokens):
        try:
            llm.generate("b", GREEDY)
        except UsageError as e:
            found.append(str(e))
        return False

    llm.backend.bad = reenter
    assert llm.generate("a", GREEDY)[0].finish_reason == "length"
    assert len(found) == 12 and all("one caller at a time" in text for text in found)


def test_calls_from_another_thread_are_refused(fake):
    llm, entered, leave, results = fake(), threading.Event(), threading.Event(), []

    def wait(tokens):
        entered.set()
        assert leave.wait(10)  # seconds; far beyond what the other thread needs
        return False

    llm.backend.bad = wait
    thread = threading.Thread(target=lambda: results.append(llm.generate("a", GREEDY)[0].finish_reason))
    thread.start()
    assert entered.wait(10)
    for call in (lambda: llm.generate("b"), lambda: llm.stream("b"), lambda: llm.logits([1]), llm.close):
        with pytest.raises(UsageError, match="one caller at a time"):
            call()
    leave.set()
    thread.join()
    assert results == ["length"]


def test_progress_goes_to_stderr(fake, capsys):
    fake().generate(["a", "b"], GREEDY, use_progress=True)
    assert capsys.readouterr().err.endswith(" tok/s\n")
    fake().generate(["a", "b"], GREEDY)
    assert capsys.readouterr() == ("", "")


def test_logits_are_teacher_forced(fake):
    llm = fake()
    assert llm.logits(np.array([3, 4])).tobytes() == np.stack([fake_logits(ids, TOKENIZER.vocab_size) for ids in ([3], [3, 4])]).tobytes()
    for ids in ("ab", [1.0], [[1]], None):
        with pytest.raises(UsageError):
            llm.logits(ids)
