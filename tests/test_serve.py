"""The server as clients see it: the official openai client where it can say what is to be said, httpx elsewhere."""
import json
import re

import pytest
from command import ROOT
from scripted import CLOSED, END, THOUGHT, TOKENIZER, USER, fake  # noqa: F401, the fixture
from serving import serving  # noqa: F401, the fixture

from k3cuda import SamplingParams
from k3cuda.serve.app import ROUTES
from k3cuda.serve.fields import CHAT, COMPLETION

openai = pytest.importorskip("openai")

CALL = '<|open|>tools<|sep|><|open|>call tool="look" index="1"<|sep|><|open|>argument key="at" type="string"<|sep|>a "b"<|close|>argument<|sep|>' \
       '<|close|>call<|sep|><|close|>tools<|sep|>'
SAID = THOUGHT + "Yes. No. é" + CLOSED
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}}


def client(running, key="none"):
    return openai.OpenAI(base_url=running.url + "/v1", api_key=key, max_retries=0, timeout=30)


def test_chat(serving):
    running = serving(SAID, effort="max")
    answer = client(running).chat.completions.create(model="tiny-random", messages=USER)
    choice, usage = answer.choices[0], answer.usage
    assert (choice.message.content, choice.message.role, choice.finish_reason, answer.model) == ("Yes. No. é", "assistant", "stop", "tiny-random")
    assert choice.message.reasoning_content == choice.message.reasoning == "why not" and choice.message.tool_calls is None
    prompt = running.post("/tokenize", messages=USER).json()["count"]
    assert (usage.prompt_tokens, usage.completion_tokens) == (prompt, len(TOKENIZER.encode(SAID, allow_special=True)))
    assert usage.completion_tokens_details.reasoning_tokens == len(TOKENIZER.encode("why not")) and usage.prompt_tokens_details.cached_tokens == 0


def test_streamed_chat(serving):
    stream = client(serving(SAID, effort="max")).chat.completions.create(model="tiny-random", messages=USER, stream=True, stream_options={"include_usage": True})
    *chunks, last = list(stream)
    assert last.choices == [] and last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens and all(c.usage is None for c in chunks)
    deltas = [c.choices[0].delta for c in chunks]
    assert "".join(d.content or "" for d in deltas) == "Yes. No. é"
    assert "".join(getattr(d, "reasoning_content", None) or "" for d in deltas) == "why not"
    assert deltas[0].role == "assistant" and all(d.role is None for d in deltas[1:])
    assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["stop"] and len({c.id for c in chunks}) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_tools(serving, stream):
    script = THOUGHT + "I look.<|close|>response<|sep|>" + CALL + CALL + "<|close|>message<|sep|><|end_of_msg|>"
    api = client(serving(script, effort="max", max_model_len=2048)).chat.completions
    found = api.create(model="tiny-random", messages=USER, tools=[TOOL], tool_choice="required", stream=stream)
    if stream:
        chunks = list(found)
        calls = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or ()]
        assert [c.index for c in calls] == [0, 1] and chunks[-1].choices[0].finish_reason == "tool_calls"
    else:
        calls, message = found.choices[0].message.tool_calls, found.choices[0].message
        assert (message.content, found.choices[0].finish_reason) == ("I look.", "tool_calls")
        turn = [*USER, message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": calls[0].id, "content": "1"},
                {"role": "tool", "tool_call_id": calls[1].id, "content": "2"}]
        assert api.create(model="tiny-random", messages=turn, tools=[TOOL]).usage.prompt_tokens > found.usage.prompt_tokens   # and back it goes
    assert all(json.loads(c.function.arguments) == {"at": 'a "b"'} and c.function.name == "look" for c in calls) and calls[0].id != calls[1].id


def test_completions_are_the_librarys(serving, fake):
    prompts, llm = ["ab", "c"], fake()
    api = client(serving()).completions
    want = [o.text for o in llm.generate(prompts, SamplingParams(max_tokens=9, seed=5, temperature=0.8, ignore_eos=True))]
    body = {"model": "tiny-random", "max_tokens": 9, "seed": 5, "temperature": 0.8, "extra_body": {"ignore_eos": True}}
    assert [c.text for c in api.create(prompt=prompts, **body).choices] == want
    assert [c.text for c in api.create(prompt=[TOKENIZER.encode(p) for p in prompts], **body).choices] == want
    assert api.create(prompt=TOKENIZER.encode("ab"), **body).choices[0].text == want[0]
    shown = ["", ""]
    for chunk in api.create(prompt=prompts, stream=True, **body):
        shown[chunk.choices[0].index] += chunk.choices[0].text
    assert shown == want


def test_echo_gives_the_log_probabilities_of_the_prompt(serving, fake):
    """Those of `LLM.logits`, and for a token that was generated those the sampler reported."""
    import numpy as np
    llm, running = fake(), serving(max_logits=3)
    ids = TOKENIZER.encode("a log, long prompt")
    whole = client(running).completions.create(model="tiny-random", prompt="a log, long prompt", echo=True, max_tokens=4, logprobs=2, temperature=0)
    lists, text = whole.choices[0].logprobs, whole.choices[0].text
    made = TOKENIZER.encode(text)[len(ids):] if len(TOKENIZER.encode(text)) == len(ids) + 4 else None
    rows = llm.logits(ids)[:-1].astype(np.float64)
    want = [r[t] - r.max() - np.log(np.exp(r - r.max()).sum()) for r, t in zip(rows, ids[1:])]
    assert lists.token_logprobs[0] is lists.top_logprobs[0] is None and len(lists.tokens) == len(ids) + 4
    assert np.allclose(lists.token_logprobs[1:len(ids)], want, atol=1e-5)
    assert all(2 <= len(top) <= 3 and list(top.values())[:2] == sorted(top.values(), reverse=True)[:2] for top in lists.top_logprobs[1:])
    assert "".join(lists.tokens[:len(ids)]) == "a log, long prompt" and lists.text_offset[:len(ids)] == [len(TOKENIZER.decode(ids[:i])) for i in range(len(ids))]
    generated = llm.generate("a log, long prompt", SamplingParams(temperature=0, max_tokens=4, logprobs=2))[0]
    assert [d.logprob for d in generated.logprobs] == lists.token_logprobs[len(ids):]
    again = running.post("/v1/completions", prompt=ids + list(generated.token_ids), echo=True, max_tokens=0, logprobs=2).json()["choices"][0]
    assert again["logprobs"]["token_logprobs"] == lists.token_logprobs and again["logprobs"]["top_logprobs"] == lists.top_logprobs
    assert (again["text"], again["finish_reason"]) == (text, "length") or made is None
    assert running.engine.scheduler.free[0] == 4


def test_echo_of_a_batch_beside_others_with_one_slot(serving):
    running = serving(num_slots=1)
    body = {"prompt": ["ab", "b", "abc" * 30], "echo": True, "max_tokens": 2, "logprobs": 0, "temperature": 0}
    alone = running.post("/v1/completions", **body).json()
    assert [len(c["logprobs"]["tokens"]) for c in alone["choices"]] == [4, 3, 92] and alone["usage"]["completion_tokens"] == 6
    events = [json.loads(line[6:]) for line in running.post("/v1/completions", **body, stream=True).text.splitlines() if line.startswith("data: {")]
    for choice in alone["choices"]:
        mine = [e["choices"][0] for e in events if e["choices"][0]["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        assert sum((c["logprobs"]["token_logprobs"] for c in mine), []) == choice["logprobs"]["token_logprobs"]


def test_logprobs_of_a_chat(serving):
    api = client(serving(SAID, effort="max")).chat.completions
    whole = api.create(model="tiny-random", messages=USER, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert [e.token for e in whole][:len(TOKENIZER.encode("why not"))] == [TOKENIZER.decode([i]) for i in TOKENIZER.encode("why not")]
    assert whole[-1].token == "<|end_of_msg|>" and whole[-1].bytes is None and all(len(e.top_logprobs) == 2 for e in whole)
    chunks = api.create(model="tiny-random", messages=USER, logprobs=True, top_logprobs=2, stream=True)
    assert [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content] == whole


def test_ways_to_say_how_much_to_think(serving):
    running = serving(effort="max")

    def prompt_of(**body):
        return running.post("/tokenize", messages=USER, **body).json()["tokens"]

    off, low, high, most = (prompt_of(reasoning_effort=e) for e in ("none", "low", "high", "max"))
    assert len({tuple(x) for x in (off, low, high, most)}) == 4 and prompt_of() == most
    assert prompt_of(reasoning_effort="minimal") == low and prompt_of(reasoning_effort="medium") == high and prompt_of(reasoning_effort="xhigh") == most
    assert prompt_of(chat_template_kwargs={"enable_thinking": False}) == prompt_of(chat_template_kwargs={"thinking": False}) == off
    assert prompt_of(thinking={"type": "disabled"}) == off and prompt_of(thinking={"type": "enabled"}) == most
    assert prompt_of(chat_template_kwargs={"thinking_effort": "low"}) == low


def test_models_and_tokens(serving):
    running = serving(names=("k3", "other/name"), max_model_len=448)
    api = client(running)
    assert [(m.id, m.max_model_len) for m in api.models.list()] == [("k3", 448), ("other/name", 448)] and api.models.retrieve("other/name").id == "other/name"
    assert running.post("/v1/completions", prompt="a", model="other/name", max_tokens=1).json()["model"] == "other/name"
    assert running.post("/v1/completions", prompt="a", max_tokens=1).json()["model"] == "k3"
    with pytest.raises(openai.NotFoundError, match="'gpt-5' is not served here"):
        api.chat.completions.create(model="gpt-5", messages=USER)
    found = running.post("/tokenize", prompt="hi <|sep|>é", return_token_strs=True).json()
    assert found["tokens"] == TOKENIZER.encode("hi <|sep|>é") and found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert running.post("/detokenize", tokens=found["tokens"]).json() == {"prompt": "hi <|sep|>é"}
    info = running.http.get("/tokenizer_info").json()
    assert (info["bos_token"], info["eos_token"]) == ("[BOS]", "<|end_of_msg|>")
    ids_of = {text: running.post("/tokenize", prompt=text, add_special_tokens=False).json()["tokens"] for text in ("[BOS]", "[BOS] ", "<|end_of_msg|>")}
    assert ids_of.pop("[BOS]") == [TOKENIZER.special["[BOS]"]]   # how a client asks for its id; everything else is text
    assert all(ids == TOKENIZER.encode(text) and max(ids) < TOKENIZER.num_base for text, ids in ids_of.items())


def test_metrics_count_what_happened(serving):
    running = serving("ok<|end_of_msg|>")
    made = running.post("/v1/completions", prompt=["ab", "abc"], temperature=0).json()["usage"]
    running.post("/v1/completions", prompt="x", max_tokens=1, temperature=0)
    lines = dict(line.rsplit(" ", 1) for line in running.http.get("/metrics").text.splitlines() if not line.startswith("#"))
    label = '{model_name="tiny-random"'
    assert float(lines[f"vllm:generation_tokens_total{label}}}"]) == made["completion_tokens"] + 1
    assert float(lines[f"vllm:prompt_tokens_total{label}}}"]) == made["prompt_tokens"] + 1
    assert [lines[f'vllm:request_success_total{label},finished_reason="{r}"}}'] for r in ("stop", "length")] == ["2", "1"]
    assert lines[f'vllm:time_to_first_token_seconds_bucket{label},le="+Inf"}}'] == lines[f"vllm:time_to_first_token_seconds_count{label}}}"] == "3"
    assert lines[f"vllm:num_requests_running{label}}}"] == lines[f"vllm:num_requests_waiting{label}}}"] == "0"
    steps = sum(float(v) for k, v in lines.items() if k.startswith("k3cuda:steps_total"))
    assert steps == len(running.backend.row_counts)


def test_a_seed_of_the_server_is_that_of_requests_without_one(serving):
    texts = []
    for seed in (5, 5, 6):
        running = serving(seed=seed)
        texts.append([running.post("/v1/completions", prompt="ab", max_tokens=8).json()["choices"][0]["text"] for _ in range(2)])
    assert texts[0] == texts[1] != texts[2] and texts[0][0] != texts[0][1]


def test_shared_beginnings_are_told_in_usage_and_metrics(serving):
    running, text = serving(prefix_cache=2, num_slots=4), TOKENIZER.encode("a beginning that many have, of more than a page and less than two " * 3)[:100]
    body = {"model": "tiny-random", "max_tokens": 3, "seed": 1, "extra_body": {"ignore_eos": True}}
    first, second = (client(running).completions.create(prompt=text, **body) for _ in range(2))
    assert first.choices[0].text == second.choices[0].text
    assert [x.usage.prompt_tokens_details.cached_tokens for x in (first, second)] == [0, 64]
    scored = running.post("/v1/completions", prompt=text, echo=True, logprobs=1, max_tokens=1).json()
    assert len(scored["choices"][0]["logprobs"]["tokens"]) == first.usage.prompt_tokens + 1
    lines = running.http.get("/metrics").text.splitlines()
    assert f'vllm:prefix_cache_queries_total{{model_name="tiny-random"}} {3 * first.usage.prompt_tokens}' in lines
    assert 'vllm:prefix_cache_hits_total{model_name="tiny-random"} 128' in lines


def test_a_checkpoint_without_a_tokenizer_takes_ids(serving):
    running = serving(tokenizer=None)
    found = running.post("/v1/completions", prompt=[5, 6], max_tokens=2, logprobs=1, temperature=0).json()["choices"][0]
    assert found["text"] == "" and all(t.startswith("token_id:") for t in found["logprobs"]["tokens"])
    assert running.post("/v1/completions", prompt="a").status_code == running.post("/v1/chat/completions", messages=USER).status_code == 400


def test_end_tokens(serving):
    found = serving("ok<|end_of_msg|>").post("/v1/completions", prompt="a", temperature=0, stop_token_ids=[TOKENIZER.encode("k")[0]]).json()["choices"][0]
    assert END not in TOKENIZER.encode("k") and (found["text"], found["finish_reason"], found["stop_reason"]) == ("o", "stop", TOKENIZER.encode("k")[0])


def test_the_page_has_routes_fields_and_an_example_that_runs(serving, capsys):
    page = (ROOT / "docs/serve.md").read_text(encoding="utf-8")
    for route in ROUTES:
        assert f" {route.path.replace(':path', '')}`" in page, route.path
    for field in CHAT | COMPLETION:
        assert f"`{field}" in page or field == "user", field
    example, = re.findall(r"```python\n(.*?)```", page, re.S)
    running = serving(SAID.removeprefix(THOUGHT), names=("demo",))
    exec(example.replace("http://127.0.0.1:8000", running.url), {})
    assert capsys.readouterr().out == "Yes. No. é 0\n"


def test_a_page_that_may_not_ask_is_logged(serving, caplog):
    running = serving(allowed_origins=("https://page.example",))
    asks = {"Origin": "https://other.example\x1b[31m", "Access-Control-Request-Method": "DELETE"}
    with caplog.at_level("INFO", "k3cuda"):
        assert running.http.options("/v1/completions", headers=asks).status_code == 400
    said, = (r.getMessage() for r in caplog.records if "may not ask" in r.getMessage())   # written before the answer goes out
    assert "https://other.example\\x1b" in said and "Disallowed CORS origin, method" in said


def test_scripts_of_allowed_pages_may_ask(serving):
    page, key = {"Origin": "https://page.example"}, {"Authorization": "Bearer secret"}
    before = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, x-stainless-os"}
    body, name = {"prompt": "a", "max_tokens": 2}, "access-control-allow-origin"
    running = serving(api_key="secret", allowed_origins=("https://page.example",))
    asked = running.http.options("/v1/completions", headers=page | before)
    assert asked.status_code == 200 and asked.headers[name] == page["Origin"] and "x-stainless-os" in asked.headers["access-control-allow-headers"]
    for more, headers, status in ((body, page | key, 200), (body | {"stream": True}, page | key, 200), (body, page, 401)):
        answer = running.http.post("/v1/completions", json=more, headers=headers)
        assert answer.status_code == status and answer.headers[name] == page["Origin"]
    assert name not in running.http.post("/v1/completions", json=body, headers=key | {"Origin": "https://other.example"}).headers
    everybody, nobody = serving(allowed_origins=("*",)), serving()
    assert everybody.http.post("/v1/completions", json=body, headers=page).headers[name] == "*"
    assert name not in nobody.http.post("/v1/completions", json=body, headers=page).headers
    assert nobody.http.options("/v1/completions", headers=page | before).status_code == 405
