"""The Python interface: defaults, answers, opening; on a backend that says what it is told to and on tiny-random."""
import logging
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scripted import CLOSED, END, GREEDY, THOUGHT, TOKENIZER, USER, fake  # noqa: F401, the fixture

import k3cuda
from k3cuda import LLM, SamplingParams
from k3cuda.errors import CheckpointError, ConfigError, K3Error, NumericalError, OutOfMemory, RequestError, StepTimeout, UsageError
from k3cuda.runtime import cuda_driver, open_model, preflight
from k3cuda.runtime.answer import AnswerParser
from k3cuda.runtime.machine import Driver, Gpu
from k3cuda.runtime.numpy_backend import NumpyBackend
from k3cuda.runtime.reasoning_stops import ReasoningStops


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
    for effort in ("medium", ""):
        with pytest.raises(UsageError, match=f"reasoning_effort: found '{effort}', wanted none, low, high, max"):
            llm.chat(USER, GREEDY, reasoning_effort=effort)
    default, without, most = (llm.chat(USER, GREEDY, reasoning_effort=e).prompt_token_ids for e in (None, "none", "max"))
    assert default == most != without
    assert fake("x", model="demo").chat(USER, GREEDY).prompt_token_ids == without   # nobody taught it to end a thought


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


def test_behind_a_step_that_lost_the_model_every_call_says_why(fake):
    """Answers have the error, what a script feeds itself raises it; nothing waits, and the end is an end."""
    llm = fake()
    session, lost = llm.prefill("a"), StepTimeout("block 17 waited", "start the process again")

    def gone(*_):
        raise lost

    for name in ("open_slot", "copy_slot", "step", "sample", "commit", "logits", "new_logits", "copy_logits", "buffer"):
        setattr(llm.backend, name, gone)
    for _ in range(2):
        assert [o.error for o in llm.generate(["a"] * 20, GREEDY)] == [lost] * 20
        assert [chunk.output.error for chunk in llm.stream("a", GREEDY)] == [lost]
        for call in (lambda: session.step(5), lambda: llm.prefill("a"), lambda: llm.logits([5]), lambda: llm.buffer("logits")):
            with pytest.raises(K3Error, match="block 17 waited|commit broke off"):
                call()
    llm.close()
    assert llm.backend.closed


def test_seeds(fake):
    free = SamplingParams(max_tokens=20, ignore_eos=True)
    a, b = fake(seed=4).generate(["x", "x"], free), fake(seed=4).generate(["x", "x"], free)
    assert [o.token_ids for o in a] == [o.token_ids for o in b] and a[0].token_ids != a[1].token_ids
    again = fake().generate("x", SamplingParams(max_tokens=20, ignore_eos=True, seed=a[1].sampling.seed))[0]
    assert again.token_ids == a[1].token_ids
    assert fake().generate("x", free)[0].sampling.seed != fake().generate("x", free)[0].sampling.seed


# Opening

@pytest.mark.parametrize("arguments, error, words", [
    ({"decode_backend": "fast"}, UsageError, "auto, reference, standard, latency_specialized"), ({"decode_backend": None}, UsageError, "wanted auto"),
    ({"decode_backend": "standard", "activation_dtype": "bf16"}, UsageError, "its own precisions"), ({"decode_backend": "latency_specialized", "activation_dtype": "bf16"}, UsageError, "its own precisions"),
    ({"tp": 0}, UsageError, "tp: found 0"), ({"tp": True}, UsageError, "tp: found True"), ({"tp": "2"}, UsageError, "tp: found '2'"),
    ({"tp": 3}, CheckpointError, "1, 2, 4"), ({"max_batch": 65}, UsageError, "from 1 to 64"), ({"max_batch": 0}, UsageError, "max_batch"),
    ({"max_model_len": 0}, UsageError, "max_model_len"), ({"max_model_len": 10**9}, ConfigError, "max_model_len"),
    ({"kv_cache_dtype": "int4"}, UsageError, "auto, f32, bf16, fp8_e4m3"), ({"activation_dtype": "f16"}, UsageError, "f32, bf16"),
    ({"draft_model": "x"}, CheckpointError, "no such folder"), ({"seed": -1}, UsageError, "seed: found -1"), ({"model": 3}, UsageError, "model: found int"),
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


# tiny-random

@pytest.fixture(scope="module")
def tiny():
    with LLM("tiny-random", max_batch=4, max_model_len=256) as llm:
        yield llm


def test_tiny_random_gives_the_same_alone_and_in_a_batch(tiny):
    prompts = ["Hello", "a", [1] * 70, "Kimi"]  # 70 tokens: two chunks beside three decoding rows
    params = [SamplingParams(seed=i, max_tokens=8, top_p=0.9, logprobs=1, ignore_eos=True) for i in range(4)]
    together = tiny.generate(prompts, params)
    for i in (0, 2):
        alone, = tiny.generate([prompts[i]], params[i])
        assert alone.token_ids == together[i].token_ids and alone.logprobs == together[i].logprobs


def test_its_logits_say_what_generate_does(tiny):
    out, = tiny.generate("Hello", SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    rows = tiny.logits(out.prompt_token_ids + out.token_ids)
    assert rows.dtype == np.float32 and rows.shape == (len(out.prompt_token_ids) + 6, tiny.cfg.vocab_size)
    assert tuple(rows.argmax(1)[len(out.prompt_token_ids) - 1:-1]) == out.token_ids


def test_it_chats(tiny):
    out = tiny.chat(USER, SamplingParams(seed=1, max_tokens=4, ignore_eos=True), reasoning_effort="low")
    assert out.stats.completion_tokens == 4 and out.finish_reason == "length"
    assert tiny.backend.counts.steps["reference"] > 0 and tiny.load_s > 0


@pytest.mark.parametrize("name", ["standard", "latency_specialized"])
def test_the_backend_that_was_asked_for_is_the_one_that_runs(monkeypatch, name):
    """Without a GPU: its backend is made, and a host too small for the reference does not keep it from running."""
    def gpu_backend(checkpoint, specialized=False, **options):
        backend = NumpyBackend(checkpoint, **options)
        backend.name = "latency_specialized" if specialized else "standard"
        return backend

    monkeypatch.setattr(cuda_driver, "require_gpu", lambda index: None)
    monkeypatch.setattr(open_model, "probe_driver", lambda: Driver("1", "13.0", (Gpu(0, "A", "9.0", 10 ** 10),)))
    monkeypatch.setitem(sys.modules, "k3cuda.runtime.cuda_backend", SimpleNamespace(CudaBackend=gpu_backend))
    monkeypatch.setattr(preflight, "host", lambda: {"memory_free_bytes": 1, "memory_limit_bytes": None})
    with LLM("tiny-random", decode_backend=name) as llm:
        assert llm.backend.name == name
    with pytest.raises(OutOfMemory, match="reference backend"):
        LLM("tiny-random", decode_backend="reference")


def test_an_open_model_is_taken_as_it_is():
    with LLM("tiny-random", max_batch=1) as first:
        want = first.generate("hi", SamplingParams(temperature=0, max_tokens=3))[0].token_ids
    opened = open_model.open_model("tiny-random", max_batch=3)
    with LLM(opened) as llm:
        assert llm.backend is opened.backend and llm.backend.num_slots == 3
        assert llm.generate("hi", SamplingParams(temperature=0, max_tokens=3))[0].token_ids == want
