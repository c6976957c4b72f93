"""Clients that leave, dawdle, send rubbish or come in crowds, steps that fail, and the end of the server."""
import asyncio
import contextlib
import json
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from command import ENVIRONMENT
from scripted import TOKENIZER, USER
from serving import httpx, raw, serving  # noqa: F401, the fixture

from k3cuda.errors import DeviceError, StepTimeout
from k3cuda.runtime import tokenizer
from k3cuda.runtime.request import Request
from k3cuda.runtime.sampling import SamplingParams
from k3cuda.serve.http import Limits
from k3cuda.serve.refusals import Refusal
from k3cuda.serve.server import _protocol
from k3cuda.serve.worker import Job

ENDLESS = {"prompt": "a", "max_tokens": 400, "ignore_eos": True}
JSON = {"Content-Type": "application/json"}


def until(condition, seconds=5.0):
    """Waits for it, no longer than that."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


def slow(running, seconds=0.02):
    """Every step takes that long, so that there is a middle to be interrupted in."""
    step = running.backend.step
    running.backend.step = lambda rows: (time.sleep(seconds), step(rows))[1]
    return running


def request(path: str, body: bytes, length: int | None = None) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body) if length is None else length}\r\n\r\n".encode() + body


@pytest.mark.parametrize("body", [ENDLESS | {"stream": True}, ENDLESS, ENDLESS | {"prompt": "a" * 400, "echo": True, "logprobs": 0, "max_tokens": 4}],
                         ids=["stream", "whole", "scored"])
def test_a_client_that_vanishes_frees_its_slot_within_a_second(serving, body):
    running = slow(serving(num_slots=1, max_logits=4))
    with raw(running, request("/v1/completions", json.dumps(body).encode())):
        until(lambda: running.engine.scheduler.free[0] == 0 and len(running.backend.row_counts) > 3)
    until(lambda: running.engine.scheduler.free[0] == 1 and running.service.worker.in_flight == 0, 1.0)
    steps = len(running.backend.row_counts)
    time.sleep(0.1)
    assert len(running.backend.row_counts) == steps < 200 and running.post("/v1/completions", prompt="a", max_tokens=2).status_code == 200


def test_one_that_vanishes_while_it_waits_never_runs(serving):
    running = slow(serving(num_slots=1))
    with raw(running, request("/v1/completions", json.dumps(ENDLESS).encode())):
        until(lambda: running.engine.scheduler.free[0] == 0)
        with raw(running, request("/v1/completions", json.dumps(ENDLESS).encode())):
            until(lambda: running.service.worker.in_flight == 2)
        until(lambda: running.service.worker.in_flight == 1, 1.0)
        assert not running.engine.scheduler.waiting


def test_too_many_are_told_to_come_again(serving):
    running = slow(serving(num_slots=1, max_queue=2))
    open_ones = [raw(running, request("/v1/completions", json.dumps(ENDLESS).encode())) for _ in range(3)]
    for one in open_ones:
        one.__enter__()
    until(lambda: running.service.worker.in_flight == 3)
    refused = running.post("/v1/completions", **ENDLESS)
    assert (refused.status_code, refused.json()["error"]["code"], refused.headers["retry-after"]) == (429, "queue_full", "1")
    assert running.http.get("/health").status_code == 200
    wanted = {'vllm:num_requests_running{model_name="tiny-random"} 1', 'vllm:num_requests_waiting{model_name="tiny-random"} 2'}
    until(lambda: wanted <= set(running.http.get("/metrics").text.splitlines()))   # told after the step that admits them
    for one in open_ones:
        one.__exit__(None, None, None)
    until(lambda: running.service.worker.in_flight == 0)
    assert running.post("/v1/completions", prompt=["a"] * 3, max_tokens=1).status_code == 200
    with raw(running, request("/v1/completions", json.dumps(ENDLESS).encode())):
        until(lambda: running.service.worker.in_flight == 1)
        assert running.post("/v1/completions", prompt=["a"] * 3, max_tokens=1).status_code == 429   # all of a batch or none
    never = running.post("/v1/completions", prompt=["a"] * 4, max_tokens=1)
    assert never.status_code == 400 and "found 4 prompts, this server takes at most 3 at a time" in never.json()["error"]["message"]


def test_a_batch_that_can_never_run_is_refused_before_it_is_encoded(serving, monkeypatch):
    running = serving(num_slots=1, max_queue=2)
    monkeypatch.setattr(type(TOKENIZER), "encoded", lambda *_, **__: pytest.fail("encoded"))
    assert running.post("/v1/completions", prompt=["a"] * 4).status_code == 400


def test_a_prompt_that_is_far_too_long_is_not_encoded_whole(serving, monkeypatch):
    running, pieces, split = serving(max_model_len=512), [], tokenizer.split_long_runs
    monkeypatch.setattr(tokenizer, "split_long_runs", lambda text: (pieces.append(len(piece)) or piece for piece in split(text)))
    text = "a b " * 500_000   # five pieces
    for path, body in (("/v1/completions", {"prompt": text}), ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]})):
        pieces.clear()
        refused = running.post(path, **body)
        assert refused.status_code == 400 and "more than 512 tokens" in refused.json()["error"]["message"]
        assert sum(size > 100_000 for size in pieces) == 2, pieces


CHAT = {"messages": USER}
WRONG = {   # path, body, status, what the message says
    "no JSON": ("/v1/completions", b"{", 400, "no JSON"), "no object": ("/v1/completions", b"[]", 400, "wanted an object"),
    "no UTF-8": ("/v1/completions", b'{"prompt": "\xff"}', 400, "no JSON"), "NaN": ("/v1/completions", b'{"prompt": "a", "top_p": NaN}', 400, "NaN"),
    "too deep": ("/v1/completions", b"[" * 100_000, 400, "no JSON"), "empty": ("/v1/chat/completions", b"", 400, "no JSON"),
    "no prompt": ("/v1/completions", {}, 400, "prompt"), "empty prompt": ("/v1/completions", {"prompt": ""}, 400, "empty"),
    "no prompts": ("/v1/completions", {"prompt": []}, 400, "empty list"), "mixed": ("/v1/completions", {"prompt": [1, "a"]}, 400, "prompts"),
    "outside": ("/v1/completions", {"prompt": [10**9]}, 400, "outside the vocabulary"), "huge id": ("/v1/completions", {"prompt": [10**30]}, 400, "token id"),
    "too long": ("/v1/completions", {"prompt": "a" * 512}, 400, "the context holds 512"),
    "too long to score": ("/v1/completions", {"prompt": "a" * 512, "echo": True, "logprobs": 1}, 400, "the context holds 512"),
    "no tokens": ("/v1/completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
    "n": ("/v1/completions", {"prompt": "a", "n": 2}, 400, "n: is not supported"), "suffix": ("/v1/completions", {"prompt": "a", "suffix": "b"}, 400, "suffix"),
    "true is no 1": ("/v1/completions", {"prompt": "a", "n": True}, 400, "n: is not supported"),
    "temperature": ("/v1/completions", {"prompt": "a", "temperature": 3}, 400, "temperature: found 3"),
    "stop id": ("/v1/completions", {"prompt": "a", "stop_token_ids": [10**6]}, 400, "stop_token_ids"),
    "usage alone": ("/v1/completions", {"prompt": "a", "stream_options": {"include_usage": True}}, 400, "stream_options"),
    "stream": ("/v1/completions", {"prompt": "a", "stream": "yes"}, 400, "stream: found 'yes'"),
    "no messages": ("/v1/chat/completions", {}, 400, "messages"), "role": ("/v1/chat/completions", {"messages": [{"role": "robot"}]}, 400, "robot"),
    "image": ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, 400, "image"),
    "effort": ("/v1/chat/completions", CHAT | {"reasoning_effort": "much"}, 400, "'much'"), "bias": ("/v1/chat/completions", CHAT | {"logit_bias": {"5": 1}}, 400, "logit_bias"),
    "top_logprobs alone": ("/v1/chat/completions", CHAT | {"top_logprobs": 2}, 400, "top_logprobs"),
    "no list": ("/v1/chat/completions", CHAT | {"top_logprobs": []}, 400, "top_logprobs"),
    "no number": ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": {}}, 400, "logprobs"),
    "stop ids": ("/v1/completions", {"prompt": "a", "stop_token_ids": {}}, 400, "stop_token_ids"),
    "named tool": ("/v1/chat/completions", CHAT | {"tool_choice": {"type": "function"}}, 400, "named tool"), "tools": ("/v1/chat/completions", CHAT | {"tools": 5}, 400, "tools"),
    "format": ("/v1/chat/completions", CHAT | {"response_format": {"type": "xml"}}, 400, "xml"), "model": ("/v1/chat/completions", CHAT | {"model": "x"}, 404, "'x'"),
    "no such route": ("/v1/embeddings", {}, 404, "no such route"), "method": ("/v1/models", {}, 405, ""),
    "both": ("/tokenize", {"prompt": "a", "messages": USER}, 400, "one of them"), "id": ("/detokenize", {"tokens": [-1]}, 400, "outside"),
}


def test_what_is_wrong_is_said(serving):
    running = serving()
    for name, (path, body, status, words) in WRONG.items():
        found = running.http.post(path, content=body, headers=JSON) if isinstance(body, bytes) else running.post(path, **body)
        error = found.json()["error"]
        assert found.status_code == status and words in error["message"] and error["type"] and set(error) == {"message", "type", "param", "code"}, (name, found.text)
        assert "Traceback" not in found.text and not running.backend.row_counts
    assert running.post("/v1/completions", prompt="a", n=1, logit_bias=None, user="u", unknown=5, max_tokens=1).status_code == 200
    assert running.post("/v1/completions", temperature=3, prompt="a").json()["error"]["param"] == "temperature"


def test_bodies_that_are_too_long(serving):
    running = serving(limits=Limits(max_body=1000))
    assert running.http.post("/tokenize", content=b"x" * 1001).status_code == 413
    assert running.http.post("/tokenize", content=iter([b"x" * 600, b"x" * 600])).status_code == 413   # chunked: nobody said how long it is
    with raw(running, request("/tokenize", b"x", length=10**12)) as connection:
        assert connection.recv(99).startswith(b"HTTP/1.1 413")
    assert running.post("/tokenize", prompt="a").status_code == 200


def test_clients_that_dawdle_are_cut_off(serving):
    running = serving(limits=Limits(body_s=0.3, header_s=0.3))
    with raw(running, request("/tokenize", b'{"prompt"', length=99)) as body, raw(running, b"POST /tokenize HTTP/1.1\r\nHo") as headers, raw(running, b"") as silent:
        assert body.recv(99).startswith(b"HTTP/1.1 408")
        assert headers.recv(99) == silent.recv(99) == b""   # closed
    with raw(running, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n") as second:   # the next request on a connection dawdles no better
        received = b""
        while not received.endswith(b"}"):
            received += second.recv(9999)
        assert received.startswith(b"HTTP/1.1 200")
        second.sendall(b"GET /health")
        assert second.recv(99) == b""
    with raw(running, b"\x16\x03\x01 this is no HTTP\r\n\r\n") as other:
        assert other.recv(99).startswith(b"HTTP/1.1 400")


def test_a_client_that_does_not_read_is_cut_off(serving):
    running = serving(limits=Limits(write_s=0.3), max_model_len=8192, num_slots=8)
    body = {"prompt": ["a"] * 8, "max_tokens": 4000, "ignore_eos": True, "stream": True, "logprobs": 20}   # megabytes: no buffer holds them
    with raw(running, request("/v1/completions", json.dumps(body).encode()), receive_buffer=4096):
        until(lambda: running.service.worker.in_flight == 8)
        until(lambda: running.service.worker.in_flight == 0, 20)
    assert len(running.backend.row_counts) < 3900 and running.http.get("/health").status_code == 200


def test_a_document_that_nobody_reads_is_cut_off(serving):
    running = serving(limits=Limits(write_s=0.5))
    large = request("/tokenize", json.dumps({"prompt": "ab" * 1_000_000, "return_token_strs": True}).encode())
    with raw(running, large, receive_buffer=4096):
        until(lambda: running.server.server_state.connections, 20)
        until(lambda: not running.server.server_state.connections, 30)


def test_a_client_that_reads_slowly_is_waited_for():
    """As long as what waits for it shrinks."""
    kind, timers, aborted = _protocol(Limits(write_s=7)), [], []
    connection, waiting = kind.__new__(kind), [900]
    connection.flow = SimpleNamespace(pause_writing=lambda: None, resume_writing=lambda: None)
    connection.loop = SimpleNamespace(call_later=lambda *timer: timers.append(timer) or SimpleNamespace(cancel=timers.clear))
    connection.transport = SimpleNamespace(get_write_buffer_size=lambda: waiting[-1], abort=lambda: aborted.append(True))
    connection.pause_writing()
    for now in (500, 499, 499):
        assert not aborted
        (seconds, call, before), = timers
        timers.clear()
        waiting.append(now)
        call(before)
        assert seconds == 7
    assert aborted and not timers
    connection.pause_writing()
    connection.resume_writing()
    assert not timers and len(aborted) == 1


def test_a_path_cannot_break_a_line_of_the_log(serving, caplog):
    running = serving()
    with caplog.at_level("INFO", "k3cuda"):
        found = running.http.get("/no%0aGET%1b[31m" + "x" * 9999)
        assert found.status_code == 404 and len(found.text) < 500
        until(lambda: any("/no%0aGET%1b[31mxx" in r.getMessage() for r in caplog.records))
    assert not any(set("\n\x1b") & set(r.getMessage()) for r in caplog.records)


def test_the_key(serving):
    running = serving(api_key="sésame")
    for headers in ({}, {"Authorization": "Bearer no"}, {"Authorization": "sésame".encode()}, {"Authorization": b"Bearer \xff"}):
        found = running.http.post("/v1/completions", json={"prompt": "a"}, headers=headers)
        assert found.status_code == 401 and found.json()["error"]["code"] == "invalid_api_key" and found.headers["www-authenticate"] == "Bearer"
    assert running.http.get("/v1/models").status_code == 401 and running.http.get("/health").status_code == running.http.get("/metrics").status_code == 200
    assert running.http.get("/v1/models", headers={"Authorization": "Bearer sésame".encode()}).status_code == 200


def test_a_row_that_is_not_finite_is_one_requests_trouble(serving):
    bad = TOKENIZER.encode("a!")
    running = serving(bad=lambda tokens: tokens[:2] == bad)
    assert running.post("/v1/completions", prompt="a!", max_tokens=2).status_code == 500
    assert running.post("/v1/completions", prompt="a!", echo=True, logprobs=1).status_code == 500
    streamed = running.post("/v1/completions", prompt="a!", max_tokens=2, stream=True)
    *_, error, done = [line for line in streamed.text.splitlines() if line]
    assert streamed.status_code == 200 and "not finite" in json.loads(error[6:])["error"]["message"] and done == "data: [DONE]"
    assert running.post("/v1/completions", prompt="b", max_tokens=2).status_code == 200 and running.engine.scheduler.free[0] == 4


def test_a_step_that_fails(serving):
    running = serving(fail={1: RuntimeError("oh")})
    found = running.post("/v1/completions", prompt="a", max_tokens=2)
    assert found.status_code == 500 and "oh" in found.json()["error"]["message"]
    assert running.post("/v1/completions", prompt="a", max_tokens=2).status_code == 200 == running.http.get("/health").status_code


def held(running):
    """One that goes on behind the end of its engine, until its `on_tick` is deleted."""
    running.server.on_tick = partial(type(running.server).__base__.on_tick, running.server)
    return running


@pytest.mark.parametrize("error", [DeviceError("the GPU fell off"), SystemError("oh")], ids=["device", "other"])
def test_an_engine_that_is_lost_is_told(serving, error):
    """A device error comes out of a step; anything that kills the thread is no better."""
    running = held(serving(fail={1: error} if isinstance(error, DeviceError) else None))
    if isinstance(error, SystemError):
        def broken(event):
            raise error
        running.service.metrics.event = broken
    assert running.post("/v1/completions", prompt="a", max_tokens=2).status_code == 500
    until(lambda: running.http.get("/health").status_code == 503)
    refused = running.post("/v1/completions", prompt="a", max_tokens=2)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_lost")
    del running.server.on_tick
    until(lambda: not running._thread.is_alive())
    assert running.service.worker.lost is error or "SystemError: oh" in str(running.service.worker.lost)


def test_an_engine_that_is_lost_where_a_client_leaves_keeps_its_error(serving):
    """No event brings it: stopping a request copies a slot. Who runs beside it hears of it."""
    running, error, answers = held(slow(serving())), StepTimeout("block 17 waited"), []

    def gone(request_id):
        raise error

    running.engine.abort = gone
    beside = threading.Thread(target=lambda: answers.append(running.post("/v1/completions", **ENDLESS)))
    beside.start()
    with raw(running, request("/v1/completions", json.dumps(ENDLESS).encode())):
        until(lambda: running.engine.scheduler.free[0] == 2)
    until(lambda: running.service.worker.lost)
    beside.join(20)
    assert running.service.worker.lost is error and (answers[0].status_code, answers[0].json()["error"]["code"]) == (503, "engine_lost")


def test_the_first_trouble_of_a_lost_engine_counts(serving):
    """What fails later in the same turn does not take its place."""
    error, running = DeviceError("the GPU fell off"), held(serving())
    told = iter((lambda event: None, lambda event: 1 / 0))
    step = running.engine.step
    running.engine.step = lambda: 2 * [replace(event, finish_reason="error", error=error) for event in step()]
    running.service.metrics.event = lambda event: next(told)(event)
    assert running.post("/v1/completions", prompt="a", max_tokens=2).status_code == 500
    until(lambda: not running.service.worker._thread.is_alive())
    assert running.service.worker.lost is error


def test_a_signal_behind_a_lost_engine_cuts_nothing_off(serving):
    """The server ends by itself then; it is the first signal, and the second one does not wait."""
    running = held(serving(fail={1: DeviceError("the GPU fell off")}))
    assert running.post("/v1/completions", prompt="a", max_tokens=2).status_code == 500
    server = running.server
    assert asyncio.run(type(server).on_tick(server, 1))
    for forced in (False, True):
        server.handle_exit(signal.SIGTERM, None)
        assert server.force_exit == forced


def test_a_job_that_arrives_beside_the_end_of_the_engine_is_refused(serving):
    """Between the look at the engine and the queue there is a moment."""
    running = held(serving(fail={1: DeviceError("the GPU fell off")}))
    assert running.post("/v1/completions", prompt="a", max_tokens=2).status_code == 500
    worker = running.service.worker
    until(lambda: not worker._thread.is_alive())

    async def late():
        job = Job(Request("late", [5], SamplingParams()), asyncio.Queue())
        worker.in_flight += 1
        worker._inbox.put((worker._arrive, job))
        worker._refuse_late()
        await job.accepted

    with pytest.raises(Refusal, match="the GPU fell off"):
        asyncio.run(late())
    assert worker.in_flight == 0


LOST = f"""
import os, sys, time
sys.path[:0] = {sys.path!r}
from scripted import END, TOKENIZER, Scripted
from k3cuda.errors import StepTimeout
from k3cuda.runtime.open_model import Model
from k3cuda.serve import server

class Lost(Scripted):
    def well(self):
        if os.path.exists(os.environ["LOSE"]):
            raise StepTimeout("block 17 waited", "start the process again")

    def step(self, rows):
        time.sleep(0.02)
        self.well()
        super().step(rows)

    def open_slot(self, *a):
        self.well()
        super().open_slot(*a)

server.open_model = lambda *_, **__: Model(Lost(TOKENIZER.vocab_size, num_slots=1), TOKENIZER, {{}}, (END,), None, 0)
sys.argv[1:] = ["serve", "tiny-random", "--port", "0"]
from k3cuda.__main__ import main
main()
"""


def test_a_server_that_lost_its_model_tells_those_who_asked_and_ends_with_the_code(tmp_path):
    """What ran, what waited for a slot, and who looks whether it is well."""
    lose = tmp_path / "lose"
    process = subprocess.Popen([sys.executable, "-c", LOST], env=ENVIRONMENT | {"LOSE": str(lose)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        while "is served at" not in (line := process.stderr.readline()):
            assert line, process.wait()
        url, found, health = re.search(r"http://\S+(?=/v1)", line)[0], {}, []

        def ask(name, **more):
            found[name] = httpx.post(url + "/v1/completions", json=ENDLESS | more, timeout=60)

        asking = [threading.Thread(target=ask, args=(name,), kwargs=more) for name, more in (("stream", {"stream": True}), ("waits", {}))]
        for thread, count in zip(asking, ("running", "waiting")):
            thread.start()
            while f"vllm:num_requests_{count}{{model_name=\"tiny-random\"}} 1" not in httpx.get(url + "/metrics", timeout=10).text:
                time.sleep(0.02)
        health.append(httpx.get(url + "/health", timeout=10).status_code)
        lose.touch()
        with contextlib.suppress(httpx.TransportError):
            while True:
                health.append(httpx.get(url + "/health", timeout=10).status_code)
                time.sleep(0.01)
        for thread in asking:
            thread.join(30)
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == StepTimeout.code and "Error: block 17 waited\n  start the process again" in said and "Traceback" not in said, said
    assert "block 17 waited; start the process again" in found["stream"].text and found["stream"].text.endswith("data: [DONE]\n\n")
    assert (found["waits"].status_code, found["waits"].json()["error"]["code"]) == (503, "engine_lost") and "block 17 waited" in found["waits"].text
    assert 200 in health and health == sorted(health)   # never well again


@pytest.mark.parametrize("grace_s, whole", [(10, True), (0.2, False)])
def test_shutdown_lets_requests_end_for_a_while(serving, grace_s, whole):
    running, answers = slow(serving(num_slots=1, grace_s=grace_s), 0.01), []
    body = {"prompt": "a", "max_tokens": 60 if whole else 500, "ignore_eos": True}

    def ask(**more):
        answers.append(running.http.post("/v1/completions", json=body | more))

    threads = [threading.Thread(target=ask, kwargs=more) for more in ({}, {"stream": True})]
    for thread in threads:
        thread.start()
        until(lambda: running.service.worker.in_flight == 1 + threads.index(thread))
    running.server.should_exit = True
    for thread in threads:
        thread.join(20)
    stream, = (a for a in answers if "event-stream" in a.headers["content-type"])
    other, = (a for a in answers if a is not stream)
    assert (other.status_code == 200, "shutting_down" in other.text) == (whole, not whole)
    assert stream.text.endswith("data: [DONE]\n\n") and ("shutting_down" in stream.text) != whole
