"""`bench serve` against servers that behave, on a clock of its own, and against servers that do not. Ours is in test_bench_own_server.py."""
import asyncio
import json
import signal
import socket
import threading
import time

import numpy as np
import pytest
from click.testing import CliRunner
from command import k3, k3_json, start
from fake_server import OK, document, event, fake_server, on_virtual_time, text
from hypothesis import given, settings
from hypothesis import strategies as st

from k3cuda.bench import answers
from k3cuda.bench.answers import read_answer, times_of
from k3cuda.bench.http_client import Address, Failed
from k3cuda.bench.load import arrivals, run
from k3cuda.bench.target import WORDS, Target, draft_counts, drafts_between
from k3cuda.cli.bench_serve import serve
from k3cuda.errors import UsageError
from k3cuda.runtime.request_times import summary

DONE = b"data: [DONE]\n\n"
MODELS = document("200 OK", b'{"data": [{"id": "a-model"}]}')
GOOD = OK + text("a", "b", finish_reason="length") + event(choices=[], usage={"prompt_tokens": 5, "completion_tokens": 2}) + DONE


def played(*parts):
    """Pieces of a stream, and between them seconds that pass."""
    async def pieces():
        for part in parts:
            if isinstance(part, bytes):
                yield part
            else:
                await asyncio.sleep(part)
    return pieces()


def answered(*parts, sent=0.0, prompt_tokens=4):
    async def work(clock):
        return times_of(await read_answer(played(*parts), clock), sent, prompt_tokens)
    return on_virtual_time(work)


# ---- times, by hand ----

def test_one_stream_by_hand():
    usage = event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 6, "prompt_tokens_details": {"cached_tokens": 3}})
    t = answered(0.5, text("a"), 0.25, text("b", "c"), 0.75, text("d"), 0.5, text("", finish_reason="stop"), usage + DONE)
    assert t.outputs == [(0.5, 1), (0.75, 2), (1.5, 1)] and t.ended == 2.0   # what arrives together is one output; one without text is none
    assert (t.ttft, t.e2el, t.itl, t.tokens, t.prompt_tokens, t.cached_tokens) == (0.5, 2.0, [0.25, 0.75], 6, 7, 3)
    assert t.tpot == 1.5 / 5   # of the five tokens after the first, to the end of the answer


def test_without_usage_an_event_is_a_token():
    t = answered(1.0, text("a", "b"), 1.0, text("c"), DONE)   # nor a finish reason
    assert (t.tokens, t.counted, t.prompt_tokens, t.cached_tokens, t.e2el, t.tpot) == (3, None, 4, None, 2.0, 0.5)


def test_reasoning_calls_and_ids_are_outputs_and_a_role_is_none():
    def delta(**d):
        return event(choices=[{"delta": d, "finish_reason": None}])
    t = answered(1.0, delta(role="assistant", content=""), 1.0, delta(reasoning_content="hm"), 1.0, delta(tool_calls=[{}]), 1.0, delta(content="a"),
                 event(choices=[{"delta": {}, "finish_reason": "stop"}]), DONE)
    assert (t.ttft, t.itl) == (2.0, [1.0, 1.0])
    t = answered(1.0, event(choices=[{"text": "", "token_ids": [3], "finish_reason": None}]), 1.0, text("", finish_reason="length"), DONE)
    assert (t.ttft, t.tokens) == (1.0, 1)


def test_an_answer_of_which_nothing_can_be_seen_comes_with_its_end():
    t = answered(1.0, text("", finish_reason="length"), event(choices=[], usage={"completion_tokens": 2}), DONE)
    assert (t.ttft, t.e2el, t.tokens, t.tpot) == (1.0, 1.0, 2, 0.0)
    with pytest.raises(Failed, match="no token"):
        answered(text("", finish_reason="stop"), event(choices=[], usage={"completion_tokens": 0}), DONE)


def test_events_are_read_wherever_a_stream_is_cut():
    whole = b": a comment\r\nevent: x\r\n" + text("\u00e9", "b").replace(b"\n", b"\r\n") + b"data: {\"choices\":\ndata: []}\n\n" + text("c", finish_reason="stop") + DONE
    for cut in range(1, len(whole)):
        assert answered(whole[:cut], whole[cut:]).tokens == 3, cut
    assert answered(*(bytes([b]) for b in whole)).tokens == 3


@pytest.mark.parametrize("stream, reason", [
    (b"data: {nonsense\n\n", "an event is no JSON"), (b"data: \xff\n\n", "an event is no UTF-8"), (b"data: 3\n\n", "an event is no JSON object"),
    (event(choices=[3]), "a choice that is no object"), (event(choices=[{"delta": 3}]), "a choice that is no object"),
    (event(error={"message": "out of luck"}), "out of luck"), (event(object="error", message="no"), "an error: no"),
    (text("a", finish_reason="error"), "ended with 'error'"), (text("a"), "ended before the answer did"), (b"", "ended before the answer did"),
    (b"data: " + b"[" * 200_000 + b"\n\n", "an event is no JSON")])
def test_streams_that_fail(stream, reason):
    with pytest.raises(Failed, match=reason):
        answered(stream)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.binary(max_size=40), st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(
        ["choices", "delta", "text", "content", "finish_reason", "usage", "completion_tokens", "prompt_tokens_details", "cached_tokens", "error", "message", "object"]), inner, max_size=4)),
    max_leaves=12)), max_size=5))
def test_whatever_a_server_says_is_an_answer_or_a_failure(parts):
    stream = b"".join(part if isinstance(part, bytes) else b"data: " + json.dumps(part).encode() + b"\n\n" for part in parts)
    try:
        assert answered(stream, text("a", finish_reason="stop")).tokens >= 1
    except Failed:
        pass


def test_a_line_without_end(monkeypatch):
    monkeypatch.setattr(answers, "LONGEST_LINE", 1000)
    with pytest.raises(Failed, match="more than 1000 bytes"):
        answered(*[b"x" * 400] * 3)


def test_a_last_event_without_its_empty_line_counts_and_half_a_line_does_not():
    assert answered(text("a"), DONE[:-1]).tokens == 1
    with pytest.raises(Failed, match="ended before the answer did"):
        answered(text("a"), DONE[:-2])


def test_arrivals():
    rng = np.random.default_rng(3)
    assert arrivals(3, float("inf"), 1.0, rng) == [0, 0, 0]
    many = np.diff(arrivals(20_001, 4.0, 1.0, np.random.default_rng(3)))
    assert abs(many.mean() - 0.25) < 0.01 and abs(many.std() - 0.25) < 0.01   # exponential: the deviation is the mean
    even = np.diff(arrivals(20_001, 4.0, 100.0, np.random.default_rng(3)))
    assert abs(even.mean() - 0.25) < 0.01 and abs(even.std() - 0.025) < 0.002   # gamma: mean / sqrt(shape)
    assert arrivals(5, 2.0, 1.0, np.random.default_rng(7)) == arrivals(5, 2.0, 1.0, np.random.default_rng(7))


def test_a_load_by_hand():
    """Four requests that take 1, 2, 3 and 4 seconds for 2, 3, 4 and 5 tokens, two at a time; the last one arrives at 10 s."""
    async def work(clock):
        async def ask(i):
            sent = clock()
            parts = [x for n in range(i + 2) for x in (1 if n else 0, text("a"))]
            return times_of(await read_answer(played(*parts, text("", finish_reason="length"), DONE), clock), sent, 4)
        return await run([lambda i=i: ask(i) for i in range(4)], [0, 0, 0, 10], 2, clock)

    times, seconds = on_virtual_time(work)
    assert [t.sent for t in times] == [0, 0, 1, 10] and seconds == 14   # the third waits until the first has ended; it was not sent before
    found = summary(times, seconds, (50, 75))
    assert found["total_output_tokens"] == 14 and found["output_throughput"] == 1 and found["request_throughput"] == 4 / 14
    assert (found["median_e2el_ms"], found["p75_e2el_ms"], found["median_ttft_ms"]) == (2500, 3250, 0)   # of 1, 2, 3, 4 s
    assert found["p50_interactivity"] == 1 and found["p50_e2e_normalized_interactivity"] == pytest.approx(1 / np.mean([2 / 3, 3 / 4]))


def test_numbers_of_drafts_are_the_difference_of_two_pages():
    def page(drafts, tokens, accepted, *places):
        lines = [f'vllm:spec_decode_num_{name}_total{{model_name="m"}} {n}' for name, n in (("drafts", drafts), ("draft_tokens", tokens), ("accepted_tokens", accepted))]
        return "\n".join([*lines, *(f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{model_name="m",position="{i}"}} {n}' for i, n in enumerate(places))])
    found = drafts_between(draft_counts(page(10, 20, 5, 4, 1)), draft_counts(page(14, 28.0, 11, 8, 3)))
    assert (found["spec_decode_num_drafts"], found["spec_decode_draft_tokens"], found["spec_decode_accepted_tokens"]) == (4, 8, 6)
    assert (found["spec_decode_acceptance_rate"], found["spec_decode_acceptance_length"]) == (0.75, 2.5)
    assert found["spec_decode_per_position_acceptance_rates"] == [1.0, 0.5]
    assert drafts_between(draft_counts(page(10, 20, 5)), draft_counts(page(1, 2, 1)))["spec_decode_num_drafts"] is None   # another start of the server
    assert draft_counts("vllm:spec_decode_num_drafts_total e\nvllm:spec_decode_num_accepted_tokens_per_pos_total 3\n") is None
    assert draft_counts("# nothing") is None and drafts_between(None, None)["spec_decode_num_drafts"] is None


# ---- servers that fail, over sockets ----

def asked(url, **options):
    target = Target(Address.of(url), "/v1/completions", "m", **{"timeout_s": 20, "stall_s": 10} | options)
    times, answer = asyncio.run(target.ask([1, 2, 3], 3, 8))
    assert (times.error is None) == (answer is not None)
    return times


@pytest.mark.parametrize("parts, reason", [
    ([], "the connection was lost"), ([b"HTTP/1.1 200"], "the connection was lost"), ([b"garbage\r\n\r\n"], "what arrived is no HTTP"),
    ([b"x" * 100_000], "what arrived is no HTTP"), ([document("500 Internal Server Error", b"oh")], "status 500"),
    ([document("429 Too Many", b'{"error": {"message": "come again"}}')], "status 429: come again"), ([document("422 No", b'{"detail": "bad"}')], "status 422: bad"),
    ([document("302 Found", b"", "text/html")], "status 302"), ([document("200 OK", b"{}")], "the answer is application/json, wanted text/event-stream"),
    ([b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"], "what arrived is no HTTP"),
    ([b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n40\r\n" + text("a")[:20]], "the connection was lost"),
    ([b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 9999\r\n\r\n" + text("a")], "the connection was lost"),
    ([OK + text("a")], "the stream ended before the answer did"), ([OK + b"data: {\n\n"], "an event is no JSON")])
def test_what_a_server_does_wrong_is_said(parts, reason):
    with fake_server(parts) as (url, _):
        assert asked(url).error == reason


def test_a_server_that_stalls_or_dawdles_is_given_up():
    with fake_server([OK + text("a"), None]) as (url, _):
        assert asked(url, stall_s=0.2).error == "nothing arrived for 0.2 s"
    with fake_server([None]) as (url, _):
        assert asked(url, stall_s=0.2).error == "nothing arrived for 0.2 s"
    with fake_server([OK, *[b": still here\n\n", 0.05] * 100]) as (url, _):
        assert asked(url, timeout_s=0.3).error == "it took more than 0.3 s"


def test_a_server_that_is_not_there():
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    assert asked(f"http://127.0.0.1:{port}").error == "connection refused"
    for host in ("no-such-host.invalid", "a..b"):
        assert asked(f"http://{host}").error.startswith("no connection: ")
    with socket.create_server(("127.0.0.1", 0)) as plain:
        threading.Thread(target=lambda: plain.accept()[0].sendall(b"HTTP/1.1 400 no TLS here\r\n\r\n"), daemon=True).start()
        assert asked(f"https://127.0.0.1:{plain.getsockname()[1]}").error.startswith("TLS: ")


@pytest.mark.parametrize("stream", [GOOD, GOOD.replace(b"200 OK", b"200 OK\r\nconnection: close"), b"HTTP/1.1 100 Continue\r\n\r\n" + GOOD,
                                    GOOD.replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\n\r\n%x;ext=1\r\n" % len(GOOD.partition(b"\r\n\r\n")[2]), 1) + b"\r\n0\r\n\r\n"])
def test_bodies_by_length_by_chunks_and_to_the_end(stream):
    with fake_server([stream]) as (url, _):
        times = asked(url)
        assert times.error is None and (times.prompt_tokens, times.tokens) == (5, 2)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://", "http://x:99999", "http://a b", "http://x\r\nEvil: 1"])
def test_what_is_no_address(url):
    with pytest.raises(UsageError, match="wanted a URL"):
        Address.of(url)


# ---- the command ----

def bench(url, *flags, **options):
    return k3_json("bench", "serve", "--base-url", url, "--num-prompts", 3, *flags, **options)


def test_the_command_against_another_server():
    """One without usage, tokenizer page or metrics; it takes a key, and the fields that it is to get."""
    with fake_server([OK + text("a"), 0.1, text("b", finish_reason="stop") + DONE], v1_models=MODELS) as (url, bodies):
        found = bench(url + "/v1/", "--max-concurrency", "1,2", "--output-len", 7, "--ignore-eos", "--temperature", 0, "--save-detailed", "--num-warmups", 1,
                      "--metric-percentiles", "25,99.5", "--extra-body", '{"stream_options": null, "top_k": 5}', "--dataset-name", "random", "--backend", "openai",
                      env={"OPENAI_API_KEY": "secret"})
    assert [r["max_concurrency"] for r in found["runs"]] == [1, 2] and len(bodies) == 8
    assert {name: bodies[0][name] for name in ("model", "max_tokens", "ignore_eos", "temperature", "top_k", "stream")} == {
        "model": "a-model", "max_tokens": 7, "ignore_eos": True, "temperature": 0, "top_k": 5, "stream": True} and "stream_options" not in bodies[0]
    assert "Authorization: Bearer secret" in bodies[0]["head"] and "secret" not in json.dumps(found)
    assert all(len(b["prompt"]) == 32 and max(b["prompt"]) < 1000 for b in bodies) and len({str(b["prompt"]) for b in bodies}) == 8
    one = found["runs"][0]
    assert one["tokens_counted_by"] == {"usage": 0, "events": 3} and one["failures"] == [] and one["requests"]["total_output_tokens"] == 6
    assert one["requests"]["p25_itl_ms"] > 5 and "p99.5_tpot_ms" in one["requests"] and one["requests"]["spec_decode_num_drafts"] is None
    assert one["detail"]["output_lens"] == [2, 2, 2] and len(one["detail"]["itls"]) == 3


def test_failures_make_code_8_and_are_listed():
    with fake_server([document("503 Busy", b'{"error": {"message": "no room"}}')], v1_models=MODELS) as (url, _):
        found = bench(url, code=8)
        run, = found["runs"]
        assert run["failures"] == [{"reason": "status 503: no room", "requests": 3}] and run["requests"]["failed"] == 3 and run["requests"]["mean_ttft_ms"] is None
        assert bench(url, "--allow-failures", 3)["runs"][0]["requests"]["failed"] == 3
        assert b"3 of 3 requests failed, the first one: status 503: no room" in k3("bench", "serve", "--base-url", url, "--num-prompts", 3, "--model", "m", code=8).stderr
    assert b"connection refused" in k3("bench", "serve", "--base-url", url, code=8).stderr


@pytest.mark.parametrize("flags, words", [
    (["--base-url", "nowhere"], "wanted a URL"), (["--endpoint", "v1"], "wanted a path"), (["--metric-percentiles", "101"], "from 0 to 100"),
    (["--extra-body", "[1]"], "wanted a JSON object"), (["--extra-body", "{"], "no JSON"), (["--request-rate", "0"], "requests a second, or inf"),
    (["--host", "127.0.0.1", "--port", "1"], "127.0.0.1:1/v1/models: connection refused"), (["--seed", "-1"], "x>=0"), (["--dataset-name", "sharegpt"], "random"), (["--max-concurrency", "0"], "integers from 1"), (["--api-key", "\n"], "no header can carry"),
    (["--text-prompts", "--endpoint", "/v1/chat/completions"], "takes text anyway")])
def test_flags_that_are_refused(flags, words):
    found = CliRunner().invoke(serve, flags)
    assert words in found.output + str(found.exception) and found.exit_code


def test_words_are_as_long_as_the_server_counts_them():
    with fake_server([GOOD], tokenize=document("200 OK", b'{"count": %d}' % (2 * len(WORDS)))) as (url, bodies):   # two tokens a word
        found = bench(url, "--model", "m", "--endpoint", "/v1/chat/completions", "--input-len", 12)
    assert found["setup"]["tokens_a_word"] == 2 and found["setup"]["prompts"] == "words"
    assert [len(b["messages"][0]["content"].split()) for b in bodies] == [6] * 3


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_without_a_word_of_tracebacks(number, code):
    with fake_server([OK + text("a"), None]) as (url, bodies):
        process = start("bench", "serve", "--base-url", url, "--model", "m", "--num-prompts", 3)
        while len(bodies) < 3:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        out, said = process.communicate(timeout=30)
    assert (process.returncode, out, said) == (code, b"", b"")
