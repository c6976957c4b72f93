"""The benchmarks that ask a server, against ours: what they say is what the server did."""
import json
import re

from command import ROOT, k3_json
from serving import serving  # noqa: F401, the fixture

PAGE = (ROOT / "docs/bench.md").read_text(encoding="utf-8")


def test_serve_counts_what_the_server_counts(serving):  # noqa: F811
    running = serving(num_slots=2, num_pages=400)
    words, = re.findall(r"^k3cuda (bench serve .+)$", PAGE, re.M)
    found = k3_json(*words.split(), "--base-url", running.url + "/v1")
    shown = json.loads(re.findall(r"```json serve\n(.*?)```", PAGE, re.S)[0])
    assert shown["setup"].keys() == found["setup"].keys() and shown["runs"][0].keys() == found["runs"][0].keys()
    assert [run["max_concurrency"] for run in found["runs"]] == [1, 2, 4] and found["setup"]["model"] == "demo"
    assert found["setup"]["vocab_size"] == running.service.tokenizer.vocab_size
    for run in found["runs"]:
        numbers = run["requests"]
        assert run["tokens_counted_by"] == {"usage": 8, "events": 0} and run["failures"] == []
        assert (numbers["completed"], numbers["total_input_tokens"], numbers["total_output_tokens"], numbers["total_cached_tokens"]) == (8, 8 * 32, 8 * 8, 0)
        assert 0 < numbers["median_ttft_ms"] < numbers["median_e2el_ms"] and numbers["spec_decode_num_drafts"] == 0
    metrics = running.http.get("/metrics").text
    assert 'vllm:generation_tokens_total{model_name="demo"} 192' in metrics


def test_chats_of_a_length_in_tokens(serving):  # noqa: F811
    running = serving()
    found = k3_json("bench", "serve", "--base-url", running.url, "--endpoint", "/v1/chat/completions", "--num-prompts", 2, "--input-len", 100, "--output-len", 4,
                    "--ignore-eos")
    numbers, = [run["requests"] for run in found["runs"]]
    assert numbers["completed"] == 2 and 150 < numbers["total_input_tokens"] < 400 and numbers["total_output_tokens"] == 8


def test_a_crowded_server_has_failures(serving):  # noqa: F811
    running = serving(num_slots=1, max_queue=0, api_key="secret")
    found = k3_json("bench", "serve", "--base-url", running.url, "--num-prompts", 2, "--model", "demo", "--output-len", 2, code=8)
    assert found["runs"][0]["failures"][0]["reason"].startswith("status 401: no or a wrong API key")
