"""The Python interface, on a backend that says what it is told to and on the demo model."""
import gc
import logging
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from fake_backend import FakeBackend, fake_logits
from hypothesis import given, settings, strategies as st

import k3cuda
from k3cuda import LLM, SamplingParams, llm as llm_module
from k3cuda.errors import CheckpointError, ConfigError, DeviceError, NumericalError, PromptTooLong, RequestError, UsageError
from k3cuda.runtime.answer import AnswerParser
from k3cuda.runtime.open_model import Model
from k3cuda.runtime.reasoning_stops import ReasoningStops
from k3cuda.runtime.tokenizer import DEMO_TOKENIZER_DIR, Tokenizer

TOKENIZER = Tokenizer.from_dir(DEMO_TOKENIZER_DIR)
END = TOKENIZER.end_of_msg_id
GREEDY = SamplingParams(temperature=0, max_tokens=12)
USER = [{"role": "user", "content": "hi"}]


class Scripted(FakeBackend):
    """Says `script` from the end of the prompt on, then end of message for ever; without a script, what the hash says."""

    script = None

    def _law(self, slot, position):
        tokens = (self.slots[slot].tokens + self.pending[slot])[:position + 1]
        if self.script is None or self.bad(tokens):
            return super()._law(slot, position)
        start = self.starts.setdefault(slot, position)
        row = np.zeros(self.cfg.vocab_size, np.float32)
        row[self.script[position - start] if position - start < len(self.script) else END] = 50  # far above all others
        return row

    def open_slot(self, slot, pages):
        super().open_slot(slot, pages)
        self.starts = getattr(self, "starts", {})
        self.starts.pop(slot, None)


@pytest.fixture
def fake(monkeypatch):
    """Makes LLMs on a scripted backend."""
    made = []

    def make(script=None, *, tokenizer=TOKENIZER, generation_config=None, seed=None, eos_ids=(END,), **backend):
        opened = Scripted(TOKENIZER.vocab_size, eos_ids=eos_ids, **backend)
        opened.script = None if script is None else TOKENIZER.encode(script, allow_special=True)
        model = Model(opened, tokenizer, generation_config or {}, eos_ids, CheckpointError("no tokenizer here"))
        monkeypatch.setattr(llm_module, "open_model", lambda *_, **__: model)
        made.append(LLM(seed=seed))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


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


def test_parameters_one_for_all_or_one_each(fake):
    llm = fake()
    outputs = llm.generate(["a", "b", "c"], [SamplingParams(max_tokens=n, temperature=0) for n in (1, 2, 3)])
    assert [len(o.token_ids) for o in outputs] == [1, 2, 3]
    assert llm.generate(["a", "b"], [GREEDY, None])[1].sampling.temperature == 1.0
    for wrong in ([GREEDY], {"temperature": 0}, [GREEDY, 3]):
        with pytest.raises(UsageError, match="sampling_params"):
            llm.generate(["a", "b"], wrong)


def test_defaults_come_from_the_checkpoint(fake):
    llm = fake(generation_config={"temperature": 0.0, "top_k": 4})
    used = llm.generate("a", SamplingParams(max_tokens=2, top_k=3))[0].sampling
    assert (used.temperature, used.top_k, used.max_tokens) == (0.0, 3, 2)
    assert llm.generate("a")[0].sampling.max_tokens == 512 - 1  # the rest of the context


def test_an_open_limit_is_announced_once_where_it_is_long(fake, caplog):
    llm = fake("ok<|end_of_msg|>", max_model_len=33_000)
    with caplog.at_level(logging.WARNING, "k3cuda"):
        llm.generate(["a", "b"], SamplingParams(temperature=0))
        llm.generate("a", GREEDY)
    assert [r.getMessage() for r in caplog.records] == ["max_tokens is open: an answer may have 32,999 tokens, the rest of the context"]


# Answers

def test_generate_shows_everything_but_the_end(fake):
    out, = fake("Hello <|open|>think<|sep|>there<|end_of_msg|>").generate("a", SamplingParams(temperature=0, logprobs=1))
    assert (out.text, out.reasoning, out.tool_calls, out.finish_reason, out.stop_reason) == ("Hello thinkthere", None, (), "stop", None)
    assert out.token_ids[-1] == END and out.stats.completion_tokens == len(out.token_ids) == len(out.logprobs)
    assert [d.token_id for d in out.logprobs] == list(out.token_ids) and out.logprobs[0].top_logprobs[0][0] == out.token_ids[0]


CALL = ('<|open|>tools<|sep|><|open|>call tool="look" index="1"<|sep|><|open|>argument key="at" type="number"<|sep|>3<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|>")
THOUGHT = "why not<|close|>think<|sep|><|open|>response<|sep|>"
CLOSED = "<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"


def test_chat_separates_channels(fake):
    out = fake(THOUGHT + "Yes." + CLOSED).chat(USER, SamplingParams(temperature=0))
    assert (out.reasoning, out.text, out.finish_reason, out.stats.reasoning_tokens) == ("why not", "Yes.", "stop", len(TOKENIZER.encode("why not")))
    out = fake("Yes." + CLOSED).chat(USER, SamplingParams(temperature=0), reasoning_effort="none")
    assert (out.reasoning, out.text, out.stats.reasoning_tokens) == (None, "Yes.", 0)


def test_chat_reports_calls(fake):
    llm = fake(THOUGHT + "Look:<|close|>response<|sep|>" + CALL + "<|close|>message<|sep|><|end_of_msg|>", max_model_len=2000)
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    out = llm.chat(USER, SamplingParams(temperature=0), tools=tools)
    assert out.finish_reason == "tool_calls" and [(c.name, c.arguments) for c in out.tool_calls] == [("look", {"at": 3})]
    # Cut behind the call: the calls are there, and so is the truth about the end.
    cut = llm.chat(USER, SamplingParams(temperature=0, max_tokens=len(out.token_ids) - 4), tools=tools)
    assert cut.finish_reason == "length" and len(cut.tool_calls) == 1


def test_the_end_of_the_message_closes_what_is_open(fake):
    begun = CALL[:CALL.index("<|close|>call")]
    out = fake("x<|close|>response<|sep|>" + begun + "<|end_of_msg|>").chat(USER, SamplingParams(temperature=0), reasoning_effort="none")
    assert out.finish_reason == "tool_calls" and out.tool_calls[0].arguments == {"at": 3}


def test_stop_strings_are_looked_for_in_the_content_unless_asked(fake):
    llm = fake(THOUGHT.replace("why", "well, why") + "Oh well, yes." + CLOSED)
    out = llm.chat(USER, SamplingParams(temperature=0, stop="well"))
    assert (out.reasoning, out.text, out.finish_reason, out.stop_reason) == ("well, why not", "Oh ", "stop", "well")
    out = llm.chat(USER, SamplingParams(temperature=0, stop="well", stop_in_reasoning=True))
    assert (out.reasoning, out.text, out.finish_reason, out.stop_reason) == (None, "", "stop", "well")
    out = llm.chat(USER, SamplingParams(temperature=0, stop=["Oh ", "x"], stop_in_reasoning=True))
    assert (out.reasoning, out.text, out.stop_reason) == ("well, why not", "", "Oh ")


@settings(deadline=None, max_examples=100)
@given(st.text("ab", max_size=12), st.text("ab", max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_stops_in_reasoning_are_the_first_match_of_either_channel(reasoning, content, stops):
    ids = TOKENIZER.encode(f"{reasoning}<|close|>think<|sep|><|open|>response<|sep|>{content}{CLOSED}", allow_special=True)
    stream = ReasoningStops(AnswerParser(TOKENIZER, True, stops), stops)
    deltas = [stream.feed(i) for i in ids] + [stream.finish()]

    def cut(text):  # the match that ends first, of several the longest
        ends = [(text.index(s) + len(s), -len(s)) for s in stops if s in text]
        end, length = min(ends, default=(None, 0))
        return (text, False) if end is None else (text[:end + length], True)

    want_reasoning, is_over = cut(reasoning)
    assert "".join(d.reasoning for d in deltas) == want_reasoning
    assert "".join(d.content for d in deltas) == ("" if is_over else cut(content)[0])
    assert (stream.stop_reason is not None) == (is_over or cut(content)[1])
    assert (stream.result().reasoning or "") == want_reasoning


def test_a_list_of_conversations_gives_a_list(fake):
    llm = fake("Yes." + CLOSED)
    outputs = llm.chat([USER, USER + USER], SamplingParams(temperature=0), reasoning_effort="none")
    assert [o.text for o in outputs] == ["Yes.", "Yes."] and len(outputs[1].prompt_token_ids) > len(outputs[0].prompt_token_ids)
    assert isinstance(llm.chat([USER], GREEDY), list)
    with pytest.raises(RequestError):
        llm.chat([{"role": "nobody", "content": "x"}], GREEDY)
    with pytest.raises(UsageError, match="reasoning_effort: found 'medium', wanted none, low, high, max"):
        llm.chat(USER, GREEDY, reasoning_effort="medium")
    long, short = (len(llm.chat(USER, GREEDY, reasoning_effort=e).prompt_token_ids) for e in (None, "none"))
    assert long > short  # None is the checkpoint's own effort, max


def test_chat_ends_with_the_message_whatever_the_config_says(fake):
    llm = fake("Yes." + CLOSED, eos_ids=())
    assert llm.chat(USER, SamplingParams(temperature=0), reasoning_effort="none").finish_reason == "stop"
    assert llm.generate("a", SamplingParams(temperature=0, max_tokens=40))[0].finish_reason == "length"


def test_a_checkpoint_without_tokenizer_takes_ids(fake):
    llm = fake(tokenizer=None)
    out, = llm.generate([1, 2], GREEDY)
    assert (out.text, len(out.token_ids)) == ("", 12)
    for call in (lambda: llm.generate("a"), lambda: llm.chat(USER), lambda: llm.generate([1], SamplingParams(stop="x")), lambda: llm.tokenizer):
        with pytest.raises(CheckpointError, match="no tokenizer here"):
            call()


def test_a_numerical_failure_is_the_outputs(fake):
    llm = fake(bad=lambda tokens: tokens[0] == 9 and len(tokens) > 2)
    sick, well = llm.generate([[9], [8]], GREEDY)
    assert (sick.finish_reason, len(sick.token_ids), well.finish_reason, well.error) == ("error", 2, "length", None)
    assert isinstance(sick.error, NumericalError) and sick.error.code == 7
    *_, last = llm.stream([9], GREEDY)
    assert last.finish_reason == "error" and isinstance(last.output.error, NumericalError)


def test_seeds(fake):
    free = SamplingParams(max_tokens=20, ignore_eos=True)
    a, b = fake(seed=4).generate(["x", "x"], free), fake(seed=4).generate(["x", "x"], free)
    assert [o.token_ids for o in a] == [o.token_ids for o in b] and a[0].token_ids != a[1].token_ids
    again = fake().generate("x", SamplingParams(max_tokens=20, ignore_eos=True, seed=a[1].sampling.seed))[0]
    assert again.token_ids == a[1].token_ids
    assert fake().generate("x", free)[0].sampling.seed != fake().generate("x", free)[0].sampling.seed


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


# Opening

@pytest.mark.parametrize("arguments, error, words", [
    ({"decode_backend": "fast"}, UsageError, "auto, reference, standard, latency_specialized"), ({"decode_backend": None}, UsageError, "wanted auto"),
    ({"decode_backend": "standard"}, DeviceError, "no CUDA backend yet"), ({"decode_backend": "latency_specialized"}, DeviceError, "'auto'"),
    ({"tp": 0}, UsageError, "tp: found 0"), ({"tp": True}, UsageError, "tp: found True"), ({"tp": "2"}, UsageError, "tp: found '2'"),
    ({"tp": 3}, CheckpointError, "1, 2, 4"), ({"max_batch": 65}, UsageError, "from 1 to 64"), ({"max_batch": 0}, UsageError, "max_batch"),
    ({"max_model_len": 0}, UsageError, "max_model_len"), ({"max_model_len": 10**9}, ConfigError, "max_model_len"),
    ({"kv_cache_dtype": "int4"}, UsageError, "auto, f32, bf16, fp8_e4m3"), ({"activation_dtype": "f16"}, UsageError, "f32, bf16"),
    ({"draft_model": "x"}, UsageError, "draft_model"), ({"seed": -1}, UsageError, "seed: found -1"), ({"model": 3}, UsageError, "model: found int"),
    ({"model": "moonshotai/Kimi-K3"}, CheckpointError, "hf download moonshotai/Kimi-K3 --local-dir Kimi-K3"),
    ({"model": "/no/such/folder"}, CheckpointError, "/no/such/folder")])
def test_what_cannot_be_opened(arguments, error, words):
    with pytest.raises(error) as e:
        LLM(**arguments)
    assert words in str(e.value)


def test_public_names():
    code = "import sys, k3cuda; light = 'numpy' not in sys.modules; k3cuda.LLM, k3cuda.SamplingParams, k3cuda.UsageError; print(light)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "True"
    assert all(hasattr(k3cuda, name) for name in k3cuda.__all__) and set(k3cuda.__all__) <= set(dir(k3cuda))
    with pytest.raises(AttributeError):
        k3cuda.no_such_name


# The demo model

@pytest.fixture(scope="module")
def demo():
    with LLM("demo", max_batch=4, max_model_len=256) as llm:
        yield llm


def test_demo_gives_the_same_alone_and_in_a_batch(demo):
    prompts = ["Hello", "a", [1] * 70, "Kimi"]  # 70 tokens: two chunks beside three decoding rows
    params = [SamplingParams(seed=i, max_tokens=8, top_p=0.9, logprobs=1, ignore_eos=True) for i in range(4)]
    together = demo.generate(prompts, params)
    for i in (0, 2):
        alone, = demo.generate([prompts[i]], params[i])
        assert alone.token_ids == together[i].token_ids and alone.logprobs == together[i].logprobs


def test_demo_logits_say_what_generate_does(demo):
    out, = demo.generate("Hello", SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    rows = demo.logits(out.prompt_token_ids + out.token_ids)
    assert rows.dtype == np.float32 and rows.shape == (len(out.prompt_token_ids) + 6, demo.cfg.vocab_size)
    assert tuple(rows.argmax(1)[len(out.prompt_token_ids) - 1:-1]) == out.token_ids


def test_demo_chats(demo):
    out = demo.chat(USER, SamplingParams(seed=1, max_tokens=4, ignore_eos=True), reasoning_effort="low")
    assert out.stats.completion_tokens == 4 and out.finish_reason == "length"
    assert demo.backend.counts.steps["reference"] > 0 and demo.load_s > 0
