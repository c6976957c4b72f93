"""Every example runs as its own text says, and what it computes is right; the blocks of docs/scripting.md run too."""
import importlib.util
import re
import shlex
import subprocess
import sys

import numpy as np
import pytest
from command import ENVIRONMENT, ROOT

from k3cuda import LLM, SamplingParams

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PAGE = (ROOT / "docs/scripting.md").read_text(encoding="utf-8")
PROMPT = "Why is the sky blue?"


def example(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def llm():
    with LLM("tiny-random", max_batch=8, max_model_len=128) as opened:
        yield opened


def run(*words):
    return subprocess.run([sys.executable, *words], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_examples_run(path):
    assert f"    python examples/{path.name} [MODEL [BACKEND]]\n" in path.read_text(encoding="utf-8")
    assert len(run(str(path), "tiny-random", "reference")) > 20
    assert f"(../examples/{path.name})" in PAGE


def test_greedy(llm):
    output, = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    assert tuple(example("greedy").greedy(llm, PROMPT, 9)) == output.token_ids


def test_beams_of_width_one_are_greedy(llm):
    (_, ids), = example("beam_search").beam_search(llm, PROMPT, 9, width=1)
    assert ids == example("greedy").greedy(llm, PROMPT, 9)


def plain_beams(llm, prompt, num_tokens, width):
    """Beam search that runs every beam's whole text again."""
    beams = [(0.0, [])]
    for _ in range(num_tokens):
        grown = []
        for total, ids in beams:
            row = llm.logits(prompt + ids)[-1].astype(np.float64)
            logprobs = row - row.max() - np.log(np.exp(row - row.max()).sum())
            grown += [(total + logprobs[t], ids + [int(t)]) for t in np.argsort(-logprobs)[:width]]
        beams = sorted(grown, key=lambda beam: -beam[0])[:width]
    return beams


@pytest.mark.parametrize("width", [2, 5])
def test_beams_are_those_of_plain_search(llm, width):
    prompt = llm.tokenizer.encode("sky")
    got, want = example("beam_search").beam_search(llm, prompt, 6, width), plain_beams(llm, prompt, 6, width)
    assert [ids for _, ids in got] == [ids for _, ids in want]
    assert len({ids[0] for _, ids in want}) < width, "no two beams share a past: no fork was made"
    np.testing.assert_allclose([total for total, _ in got], [total for total, _ in want], atol=1e-4)
    assert llm._engine.scheduler.free[0] == 8


def test_buffers_are_those_of_the_last_layer_and_of_each(llm):
    """Against what an observer of every operation saw."""
    seen, step, module = {}, llm.backend.step, example("read_buffers")

    def observe(op, arenas):
        seen[op.stage.name, op.layer] = {name: arenas[0][name].copy() for name in op.stage.outputs}

    with llm.prefill([3, 4]) as session:
        llm.backend.step = lambda rows: step(rows, observe)
        try:
            session.step([5, 6, 7])
        finally:
            llm.backend.step = step
        ids, weights = module.experts_of_last_layer(llm, 3)
        kept = module.kept_after_a_token(llm, 3)
    last = seen["route", llm.cfg.num_hidden_layers - 1]
    assert ids.tobytes() == last["expert_ids"][:3].tobytes() and weights.tobytes() == last["expert_weights"][:3].tobytes()
    decays = [out["kda_decay"][i, :3] for i, out in enumerate(out for (stage, _), out in seen.items() if stage == "kda_mix")]
    np.testing.assert_allclose(kept, [np.exp(decay).mean() for decay in decays], rtol=1e-5)


def test_python_of_the_page_runs():
    space = {"print": lambda *values: printed.append(values)}
    printed = []
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.S):
        exec(block, space)
    llm = space["llm"]
    assert printed == [(len(llm.tokenizer.encode("The sky is")) + 204, len(llm.tokenizer.encode("The sky is")) + 205)]
    assert space["rows"].shape == (3, llm.cfg.vocab_size) and space["cached"].any() and space["ids"].shape == (2, llm.cfg.num_experts_per_token)
    llm.close()


def test_commands_of_the_page_run():
    lines = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.S) for line in block.splitlines()]
    assert lines
    for line in lines:
        words = shlex.split(line)
        assert words[0] == "python" and run(*words[1:])
