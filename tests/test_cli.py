"""`k3cuda generate` and `chat`: results, streams, flags and exit codes, in processes of their own."""
import importlib
import json
import os

import click
import pytest
from command import ENVIRONMENT, k3, k3_json

from k3cuda import LLM, SamplingParams
from k3cuda.cli import main


@pytest.fixture(scope="module")
def llm():
    with LLM("tiny-random") as llm:
        yield llm


def test_text_is_the_librarys(llm):
    want = llm.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=12, seed=5), reasoning_effort="none").text
    done = k3("generate", "tiny-random", "-p", "hi", "-n", 12, "--seed", 5)
    assert done.stdout.decode() == want + "\n" * (not want.endswith("\n"))
    assert done.stderr == b""   # in a pipe: warnings and errors only
    assert k3("generate", "tiny-random", "-p", "hi", "-n", 12, "--seed", 5, "--stream").stdout == done.stdout


def test_raw_text_is_sent_to_the_byte(llm):
    want, = llm.generate("Once\n", SamplingParams(max_tokens=6, temperature=0))
    found = k3_json("generate", "--raw", "--json", "-n", 6, "-t", 0, stdin=b"Once\n", env={"K3CUDA_MODEL": "tiny-random"})
    assert (found["text"], found["prompt_tokens"]) == (want.text, len(want.prompt_token_ids))


def test_a_drawn_seed_is_printed_and_repeats_the_answer():
    first = k3("generate", "tiny-random", "-p", "hi", "-n", 10)
    seed = first.stderr.decode().split()[1].rstrip(";")
    assert f"--seed {seed}" in first.stderr.decode()
    assert k3("generate", "tiny-random", "-p", "hi", "-n", 10, "-s", seed).stdout == first.stdout


def test_json(llm):
    found = k3_json("generate", "tiny-random", "-p", "hi", "-n", 6, "-s", 3, "--ignore-eos", "--logprobs", 2, "--reasoning-effort", "low", "--json")
    want = llm.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=6, seed=3, ignore_eos=True), reasoning_effort="low")
    assert found["token_ids"] == list(want.token_ids) and found["reasoning"] == want.reasoning and found["text"] == ""
    assert (found["prompt_tokens"], found["completion_tokens"], found["reasoning_tokens"]) == (
        len(want.prompt_token_ids), 6, want.stats.reasoning_tokens)
    assert (found["finish_reason"], found["stop_reason"], found["sampling"]["seed"]) == ("length", None, 3)
    assert [x["token_id"] for x in found["logprobs"]] == found["token_ids"]
    assert all(len(x["top_logprobs"]) == 2 and x["logprob"] <= 0 for x in found["logprobs"])
    assert found["speculative"] is None and found["engine"]["gpu"] is None and found["engine"]["decode_backend"] == "reference"


def test_jsonl_ends_with_the_whole_document():
    lines = [json.loads(line) for line in k3("generate", "tiny-random", "-p", "hi", "-n", 5, "-s", 1, "--jsonl").stdout.splitlines()]
    start, *deltas, end = lines
    assert (start["event"], end["event"], {d["event"] for d in deltas}) == ("start", "end", {"delta"})
    assert "".join(d["text"] for d in deltas) == end["text"] and sum((d["token_ids"] for d in deltas), []) == end["token_ids"]
    assert start["id"] == end["id"] and end["finish_reason"] == "length"


def test_stop_string_is_not_shown():
    whole = k3_json("generate", "tiny-random", "-p", "hi", "-n", 30, "-t", 0, "--ignore-eos", "--json")["text"]
    stop = whole[8:11]
    found = k3_json("generate", "tiny-random", "-p", "hi", "-n", 30, "-t", 0, "--ignore-eos", "--json", env={"K3CUDA_GENERATE_STOP": f"{stop}\nno such text"})
    assert found["text"] == whole[:whole.index(stop)] and (found["finish_reason"], found["stop_reason"]) == ("stop", stop)


def test_thinking_on_stderr_only_where_asked_for():
    request = ["generate", "tiny-random", "-p", "hi", "-n", 8, "-s", 3, "--ignore-eos", "--reasoning-effort", "low"]
    shown, hidden = k3(*request, "--show-thinking"), k3(*request)
    assert shown.stdout == hidden.stdout == b""
    assert hidden.stderr.startswith(b"warning: the answer is empty: all 8 tokens went into reasoning")
    assert shown.stderr.endswith(b"\n\n" + hidden.stderr) and len(shown.stderr) > len(hidden.stderr) + 2 and b"\x1b" not in shown.stderr


def test_messages_and_tools(tmp_path):
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
    (tmp_path / "m.json").write_text(json.dumps({"messages": messages, "tools": [tool]}))
    (tmp_path / "t.json").write_text(json.dumps([tool]))
    by_file = k3_json("tokenize", "tiny-random", "--chat", "--messages", tmp_path / "m.json", "--json")
    by_flags = k3_json("generate", "tiny-random", "-p", "hi", "-S", "s", "--tools", tmp_path / "t.json", "-n", 1, "--json")
    assert "# Tools" in by_file["text"] and by_file["count"] == by_flags["prompt_tokens"]


def test_output_file(tmp_path):
    path = tmp_path / "answer.txt"
    path.write_text("old " * 100)
    assert k3("tokenize", "tiny-random", "-p", "hi", "--output", path).stdout == b""
    assert path.read_bytes() == k3("tokenize", "tiny-random", "-p", "hi").stdout


def test_names_of_other_programs_work(llm):
    want = llm.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=3, temperature=0), reasoning_effort="none")
    found = k3_json("generate", "--model-path", "tiny-random", "-p", "hi", "--max_new_tokens", 3, "--temp", 0, "--no-think", "-tp", 2, "--ctx-size", 300,
                    "--max-num-seqs", 1, "--attention-backend", "ref", "--disable-tqdm", "--json")
    assert found["token_ids"] == list(want.token_ids) and found["engine"]["tp"] == 2


def test_variables():
    done = k3("generate", "-p", "hi", "-v", env={"K3CUDA_MODEL": "tiny-random", "K3CUDA_GENERATE_MAX_TOKENS": "2", "K3CUDA_GENERATE_SEED": "1",
                                                 "K3CUDA_CACHE_DIR": "/x", "K3CUDA_GENERATE_TEMPERTURE": "0", "K3CUDA_LOG_FORMAT": "json"})
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    warnings = [line["message"] for line in lines if line["level"] == "warning"]
    assert warnings == ["ignored unknown variables: K3CUDA_GENERATE_TEMPERTURE (did you mean K3CUDA_GENERATE_TEMPERATURE?)"]
    assert any("answer 2 tokens" in line["message"] and "seed 1" in line["message"] for line in lines)


def test_every_flag_has_a_variable_of_its_own_name():
    assert k3_json("generate", "tiny-random", "-p", "hi", "-n", 1, env={"K3CUDA_GENERATE_JSON": "1"})["completion_tokens"] == 1
    for command, arguments in main.commands.items():
        for option in arguments.params:
            shown = [o.lstrip("-") for o in option.opts if o.startswith("--")]
            if isinstance(option, click.Option) and shown and option.name != "help":
                assert f"K3CUDA_{command}_{shown[0]}".replace("-", "_").upper() in main.variables()


def test_variables_of_commands_inside_commands_are_known():
    done = k3("bench", "step", "--tp", "1", "--rank", "1", code=2, env={"K3CUDA_BENCH_STEP_ROWS": "1", "K3CUDA_GENERATE_SEED": "1"})
    assert b"ignored" not in done.stderr and b"--rank: found 1" in done.stderr


@pytest.mark.parametrize("args", [["nonsense"], ["generate", "tiny-random", "--nonsense"], ["generate", "tiny-random", "-p"], ["generate", "tiny-random", "-p", "hi", "-t", "x"]])
def test_errors_of_the_command_line_itself_are_json_too(args):
    for flag, env in (["--log-format=json"], None), (["--log_format", "json"], None), ([], {"K3CUDA_LOG_FORMAT": "json"}):
        line = json.loads(k3(args[0], *flag, *args[1:], code=2, env=env).stderr)
        assert (line["level"], line["code"]) == ("error", 2) and line["message"]


def test_a_conversation_that_cannot_be_rendered_is_told_before_a_model_is_looked_for(tmp_path):
    (tmp_path / "m.json").write_text('[{"role": "robot", "content": "x"}]')
    assert b"messages[0].role: found 'robot'" in k3("generate", "/no/such", "--messages", tmp_path / "m.json", code=2).stderr


USAGE = {   # arguments -> exit code, and what stderr must say
    "no model": (["generate", "-p", "x"], 2, "no model"),
    "no prompt on a closed stdin": (["generate", "tiny-random"], 6, "the prompt is empty"),
    "empty prompt": (["generate", "tiny-random", "-p", ""], 6, "the prompt is empty"),
    "stdin twice": (["generate", "tiny-random", "--messages", "-", "--tools", "-"], 2, "--messages and --tools would both read stdin"),
    "stdin is the prompt": (["generate", "tiny-random", "--tools", "-"], 2, "the prompt and --tools would both read stdin"),
    "a configuration is no checkpoint": (["generate", "kimi-k3", "-p", "x"], 3, "without weights, for plan and bench only"),
    "two prompts": (["generate", "tiny-random", "-p", "x", "-f", "y"], 2, "--prompt and --file"),
    "two models": (["generate", "tiny-random", "-m", "other", "-p", "x"], 2, "two models"),
    "no such file": (["generate", "tiny-random", "-f", "/no/such"], 2, "/no/such: cannot be read"),
    "unknown flag": (["generate", "tiny-random", "-p", "x", "--nonsense"], 2, "--nonsense"),
    "less of a GPU": (["generate", "tiny-random", "-p", "x", "--gpu-memory-utilization", "0.5"], 2, "found '0.5', wanted 0.9 to 1, since this version has no budget for GPU memory"),
    "range": (["generate", "tiny-random", "-p", "x", "-t", "2.5"], 2, "temperature: found 2.5, wanted a number from 0 to 2"),
    "not a number": (["generate", "tiny-random", "-p", "x", "--top-p", "nan"], 2, "top_p: found nan"),
    "raw with effort": (["generate", "tiny-random", "-p", "x", "--raw", "--no-think"], 2, "--raw and --no-think"),
    "raw with system": (["generate", "tiny-random", "-p", "x", "--raw", "-S", "s"], 2, "--raw sends text as it is"),
    "json twice": (["generate", "tiny-random", "-p", "x", "--json", "--jsonl"], 2, "--json and --jsonl"),
    "logprobs as text": (["generate", "tiny-random", "-p", "x", "--logprobs", "1"], 2, "add --json"),
    "output nowhere": (["generate", "tiny-random", "-p", "x", "--output", "/no/such/f"], 2, "/no/such/f"),
    "backend names": (["generate", "tiny-random", "-p", "x", "--decode-backend", "fast"], 2, "wanted auto, reference, standard, latency_specialized"),
    "rows beyond a step": (["bench", "step", "--rows", "8,65"], 2, "wanted integers from 1 to 64"),
    "no such stage": (["bench", "stage", "--stage", "attn_exchange"], 2, "--stage: found 'attn_exchange', wanted one of embed"),
    "rows of no sequence": (["bench", "step", "--rows", "1,7", "--sequences", "2"], 2, "--sequences: found 2, which does not divide 1 rows"),
    "more experts than rows can choose": (["bench", "step", "--rows", "1,8", "--experts", "16,129"], 2, "--experts: found 129, wanted 16 to 128"),
    "no delay": (["bench", "stage", "--hop-delay-us", "-1"], 2, "wanted microseconds"),
    "bench of the reference": (["bench", "step", "--decode-backend", "reference"], 2, "found 'reference', wanted standard, latency_specialized"),
    "no checkpoint": (["generate", "/no/such", "-p", "x"], 3, "/no/such"),
    "uncuttable": (["generate", "tiny-random", "-p", "x", "--tp", "3"], 3, "1, 2, 4"),
    "too long": (["generate", "tiny-random", "-p", "x" * 99, "-c", "60"], 6, "the context holds 60"),
}


@pytest.mark.parametrize("name", USAGE)
def test_refusals(name):
    args, code, text = USAGE[name]
    done = k3(*args, code=code)
    assert text in done.stderr.decode() and done.stdout == b""


def test_prompt_that_is_no_utf8():
    assert "stdin: byte 1 is no UTF-8" in k3("generate", "tiny-random", code=2, stdin=b"a\xff").stderr.decode()


def test_an_argument_that_is_no_utf8_is_no_reason_to_fail():
    assert k3("generate", "tiny-random", "-p", b"a\xff".decode(errors="surrogateescape"), "-n", 1, "-s", 1).stdout


def test_chat_from_a_pipe_keeps_the_conversation():
    done = k3("chat", "tiny-random", "-n", 6, "-s", 1, "--ignore-eos", "-v", stdin=b"hello\n\nand now\n")
    answers = done.stdout.decode().splitlines()
    assert len(answers) >= 2
    prompts = [int(line.split()[1]) for line in done.stderr.decode().splitlines() if line.startswith("prompt ")]
    assert len(prompts) == 2 and prompts[1] > prompts[0] + 6   # the first turn, its answer and the second
    assert k3("chat", "tiny-random", stdin=b"").stdout == b""
    assert k3("chat", "tiny-random", "-c", 60, "-s", 1, stdin=b"x" * 99 + b"\n", code=6).stdout == b""


@pytest.mark.parametrize("module, wanted", [("cupy.cuda.memory", "not enough GPU memory: allocating 5 bytes"), ("builtins", "not enough host memory")])
def test_which_memory_is_full_is_told(monkeypatch, capsys, module, wanted):
    """CuPy's error is a MemoryError too: a full GPU was called a full machine."""
    def full(*args):
        raise type("Full", (MemoryError,), {"__module__": module})("allocating 5 bytes")

    monkeypatch.setattr(importlib.import_module("k3cuda.cli.bench"), "config_of", full)   # by name: the package has a group of that name
    assert main(["bench", "step", "--rank", "3"], standalone_mode=False) == 4
    assert capsys.readouterr().err.startswith(f"Error: {wanted}\n")


def test_unexpected_errors_are_pointed_at_and_shown_with_v(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys, k3cuda.cli\n"
                                               "def broken(*a, **k): raise ZeroDivisionError('oh')\n"
                                               "sys.modules['k3cuda.cli.generate'].read_prompt = broken\n")
    path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), ENVIRONMENT["PYTHONPATH"]])}
    quiet = k3("generate", "tiny-random", "-p", "x", code=1, env=path)
    assert quiet.stderr.decode().startswith("Error: internal error: ZeroDivisionError: oh\n  run again with -v")
    loud = k3("generate", "tiny-random", "-p", "x", "-v", code=1, env=path, may_trace=True)
    assert b"Traceback" in loud.stderr and b"in broken" in loud.stderr


def commands(group=None, path=()):
    for name, command in (group or main).commands.items():
        yield [*path, name], command
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))


@pytest.mark.parametrize("value", ["nan", "inf", "-nan", "1e999"])
def test_a_range_has_only_numbers(value):
    """nan is neither below nor above anything: a duration of it never ends."""
    tried = set()
    for path, command in commands():
        for option in command.params:
            if isinstance(option.type, click.FloatRange):
                tried.add(option.opts[0])
                with pytest.raises(click.BadParameter, match="wanted a finite number"):
                    option.type_cast_value(click.Context(command), value)
    assert {"--duration", "--idle-gap-cap", "--timeout", "--stall-timeout", "--burstiness", "--experts", "--shutdown-grace", "--rendezvous-timeout"} <= tried
