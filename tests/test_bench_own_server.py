"""The benchmarks that ask a server, against ours: what they say is what the server did."""
import json
import re

from command import ROOT, k3_json
from serving import serving  # noqa: F401, the fixture
from test_serve_command import Process

PAGE = (ROOT / "docs/bench.md").read_text(encoding="utf-8")


def test_serve_counts_what_the_server_counts(serving):  # noqa: F811
    running = serving(num_slots=2, num_pages=400)
    words, = re.findall(r"^k3cuda (bench serve .+)$", PAGE, re.M)
    found = k3_json(*words.split(), "--base-url", running.url + "/v1")
    shown = json.loads(re.findall(r"```json serve\n(.*?)```", PAGE, re.S)[0])
    assert shown["setup"].keys() == found["setup"].keys() and shown["runs"][0].keys() == found["runs"][0].keys()
    assert [run["max_concurrency"] for run in found["runs"]] == [1, 2, 4] and found["setup"]["model"] == "tiny-random"
    assert found["setup"]["vocab_size"] == running.service.tokenizer.vocab_size
    for run in found["runs"]:
        numbers = run["requests"]
        assert run["tokens_counted_by"] == {"usage": 8, "events": 0} and run["failures"] == []
        assert (numbers["completed"], numbers["total_input_tokens"], numbers["total_output_tokens"], numbers["total_cached_tokens"]) == (8, 8 * 32, 8 * 8, 0)
        assert 0 < numbers["median_ttft_ms"] <= numbers["median_e2el_ms"] and numbers["spec_decode_num_drafts"] == 0   # a busy client reads a whole answer at once
    metrics = running.http.get("/metrics").text
    assert 'vllm:generation_tokens_total{model_name="tiny-random"} 192' in metrics


def test_chats_of_a_length_in_tokens(serving):  # noqa: F811
    running = serving()
    found = k3_json("bench", "serve", "--base-url", running.url, "--endpoint", "/v1/chat/completions", "--num-prompts", 2, "--input-len", 100, "--output-len", 4,
                    "--ignore-eos")
    numbers, = [run["requests"] for run in found["runs"]]
    assert numbers["completed"] == 2 and 150 < numbers["total_input_tokens"] < 400 and numbers["total_output_tokens"] == 8


def test_a_server_that_wants_a_key(serving):  # noqa: F811
    running = serving(num_slots=1, api_key="secret")
    found = k3_json("bench", "serve", "--base-url", running.url, "--num-prompts", 2, "--model", "tiny-random", "--output-len", 2, code=8)
    assert found["runs"][0]["failures"][0]["reason"].startswith("status 401: no or a wrong API key")


def test_an_agent_finds_what_it_said_before(serving, tmp_path):  # noqa: F811
    (tmp_path / "trace.jsonl").write_text(re.findall(r"```jsonl trace\n(.*?)```", PAGE, re.S)[0])
    running = serving("fine<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>", num_slots=6, prefix_cache=4, num_pages=400)
    _, words = re.findall(r"^k3cuda (bench replay .+)$", PAGE, re.M)
    found = k3_json(*words.replace("http://127.0.0.1:8000", running.url).split(), cwd=tmp_path)
    numbers = found["requests"]
    assert numbers["completed"] == 5 and found["failures"] == [] and found["tokens_counted_by"] == {"usage": 5, "events": 0}
    assert numbers["total_output_tokens"] == 5 * 8 and found["setup"]["tokens_a_word"] > 1
    first, second, _ = found["turns"]
    assert second["cached_tokens"] >= first["input_tokens"] - 2 * 128 > 0   # all whole pages of both first prompts
    assert found["cached_share"] == numbers["total_cached_tokens"] / numbers["total_input_tokens"]


def test_drafts_of_a_server_are_those_of_its_metrics():
    """Synthetic acceptance of length 3 gives 3 tokens in every verify step, two of them drafts."""
    running = Process("--draft-model", "tiny-random-draft", "-k", 4, "--acceptance-length", 3, "--max-batch", 2, "--max-model-len", 128)
    try:
        found = k3_json("bench", "serve", "--base-url", running.url, "--num-prompts", 2, "--input-len", 4, "--output-len", 13, "--ignore-eos", "--temperature", 0,
                        "--num-warmups", 1, "--max-concurrency", 2)
    finally:
        running.end()
    numbers = found["runs"][0]["requests"]
    assert (numbers["spec_decode_num_drafts"], numbers["spec_decode_accepted_tokens"], numbers["spec_decode_acceptance_length"]) == (8, 16, 3.0)   # 12 tokens behind the first, twice
    assert numbers["spec_decode_per_position_acceptance_rates"] == [1, 1, 0, 0] and numbers["total_output_tokens"] == 26
    assert numbers["median_itl_ms"] > numbers["median_tpot_ms"]   # an output has several tokens
