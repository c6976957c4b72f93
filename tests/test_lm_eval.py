"""The lm-evaluation-harness recipe of docs/eval.md. scripts/lm_eval_recipe.py ran lm-eval itself and recorded its requests; here they are
made again, and what lm-eval would read in the answers is held against the library. Another model, task or version of lm-eval: record again."""
import asyncio
import json
import sys

import pytest
from command import ROOT
from serving import httpx

from k3cuda import LLM
from k3cuda.cli import main
from k3cuda.serve import server as server_module
from k3cuda.serve.app import make_app

sys.path.insert(0, str(ROOT / "scripts"))
import lm_eval_recipe as recipe  # noqa: E402

RECORDED = json.loads((ROOT / "tests/data/lm_eval/recorded.json").read_text(encoding="utf-8"))
TOLERANCE = 1e-3   # of a sum of log-probabilities of some 100: BLAS of the recording machine against that of this one


@pytest.fixture(scope="module")
def llm():
    with LLM("tiny-random", max_model_len=256) as opened:
        yield opened


@pytest.fixture(scope="module")
def answers():
    """The answer to every recorded request, in their order; all of them at a time."""
    service = server_module.open_service("tiny-random", {"max_batch": 4, "max_model_len": 256}, names=("tiny-random",), effort="none", max_queue=64)

    async def ask_all():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(make_app(service)), base_url="http://here", timeout=120) as client:
            return await asyncio.gather(*(client.request(r["method"], r["path"], json=r["body"]) for r in RECORDED["requests"]))

    try:
        found = asyncio.run(ask_all())
    finally:
        service.worker.stop()
    assert {a.status_code for a in found} == {200}, [a.text for a in found if a.status_code != 200]
    return [a.json() for a in found]


def choice_for(answers, path, name, value):
    """The one choice in the answer to the request at `path` whose field `name` is `value`."""
    asked = [i for i, r in enumerate(RECORDED["requests"]) if r["path"] == path and r["body"][name] == value]
    assert asked, f"lm-eval did not ask for {value!r}"
    choice, = answers[asked[-1]]["choices"]
    return choice


def read(llm, answers, sample):
    """What lm-eval 0.4.13 reads (`parse_logprobs`, `parse_generations`): the last token is the one that had to be generated."""
    if sample["kind"] == "loglikelihood":
        ids, start = recipe.cut(llm.tokenizer, *sample["given"])
        lists = choice_for(answers, "/v1/completions", "prompt", [ids])["logprobs"]
        scores, top = lists["token_logprobs"][start:-1], lists["top_logprobs"][start:-1]
        assert len(scores) == len(ids) - start
        return [sum(scores), all(s == max(t.values()) for s, t in zip(scores, top))]
    if sample["kind"] == "chat":
        return choice_for(answers, "/v1/chat/completions", "messages", sample["given"])["message"]["content"]
    return choice_for(answers, "/v1/completions", "prompt", [llm.tokenizer.encode(sample["given"])])["text"]


@pytest.mark.parametrize("sample", RECORDED["samples"], ids=lambda s: f"{s['kind']}-{s['given'][-1] if s['kind'] == 'loglikelihood' else ''}")
def test_what_lm_eval_reads_is_what_the_library_says(llm, answers, sample):
    found = read(llm, answers, sample)
    assert found == recipe.ours(llm, sample)
    if sample["kind"] == "loglikelihood":
        assert found[1] == sample["read"][1] and found[0] == pytest.approx(sample["read"][0], abs=TOLERANCE)


def test_the_tokenizer_routes_are_those_that_lm_eval_asks(llm, answers):
    asked = [(r["path"], r["body"], a) for r, a in zip(RECORDED["requests"], answers) if r["path"].startswith("/tokenize")]
    info = {json.dumps(a) for path, _, a in asked if path == "/tokenizer_info"}
    texts = {body["prompt"]: a["tokens"] for path, body, a in asked if path == "/tokenize"}
    assert len(info) == 1 and json.loads(info.pop())["bos_token"] == recipe.BOS
    assert texts.pop(recipe.BOS) == [llm.tokenizer.special[recipe.BOS]]
    assert texts and all(ids == llm.tokenizer.encode(text) for text, ids in texts.items())


def test_an_end_that_is_generated_behind_a_scored_text_is_a_token_too(llm):
    """lm-eval leaves out the last entry, whatever it is: without one for the end it would leave out a scored token."""
    end = next((ids for ids in ([i] for i in range(llm.tokenizer.num_base)) if llm.logits(ids)[-1].argmax() == llm.tokenizer.end_of_msg_id), None)
    assert end is not None, "no token of tiny-random is followed by an end"
    service = server_module.open_service("tiny-random", {"max_model_len": 256}, names=("tiny-random",), effort="none", max_queue=4)

    async def ask():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(make_app(service)), base_url="http://here") as client:
            return await client.post("/v1/completions", json={"prompt": [end], "temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True, "seed": 1234})

    try:
        choice, = asyncio.run(ask()).json()["choices"]
    finally:
        service.worker.stop()
    assert choice["finish_reason"] == "stop" and choice["logprobs"]["tokens"][len(end):] == ["<|end_of_msg|>"]


def test_the_recorded_requests_are_those_of_the_page():
    """Model, tasks and lm-eval's version in the commands of the page; the server's words are words of the command line."""
    install, (program, command, *words), runs = recipe.recipe()
    assert "lm-eval[api]==0.4.13" in install and program == "k3cuda"
    main.commands[command].make_context(command, list(words))
    paths = []
    for run in runs:
        settings = dict(pair.split("=", 1) for pair in run[run.index("--model_args") + 1].split(","))
        base, _, route = settings["base_url"].partition(recipe.RECIPE_PORT)
        paths.append(route)
        folder = ROOT / run[run.index("--include_path") + 1]
        assert base == "http://" and settings["model"] == words[0]
        tasks = {line.removeprefix("task: ") for file in folder.glob("*.yaml") for line in file.read_text(encoding="utf-8").splitlines() if line.startswith("task: ")}
        assert set(run[run.index("--tasks") + 1].split(",")) <= tasks
    assert set(paths) | {"/tokenize", "/tokenizer_info"} == {r["path"] for r in RECORDED["requests"]}
