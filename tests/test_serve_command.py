"""`k3cuda serve` in a process of its own: on tiny-random, until a signal comes."""
import asyncio
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from command import ENVIRONMENT, hears_interrupts, k3, start
from serving import httpx

from k3cuda import LLM, SamplingParams

STREAMS = 500


def few_files():
    """A soft limit of open files that is below the number of streams."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    hears_interrupts()


class Process:
    def __init__(self, *args, **options):
        self.process, self.said = start("serve", "tiny-random", "--port", 0, *args, **options), []
        while not self.said or b"is served at" not in self.said[-1]:
            self.said.append(self.process.stderr.readline())
            assert self.said[-1], self.said
        self.url = re.search(rb"http://\S+(?=/v1)", self.said[-1])[0].decode()

    def end(self, number=signal.SIGTERM) -> tuple[int, bytes, bytes]:
        self.process.send_signal(number)
        out, rest = self.process.communicate(timeout=60)
        return self.process.returncode, out, b"".join(self.said) + rest


def test_500_streams_at_a_time_are_neither_lost_nor_mixed_up():
    """Each has a seed of its own, and gets the text of that seed."""
    running = Process("--max-batch", 64, "--max-queue", STREAMS, "--max-model-len", 128, preexec_fn=few_files)

    async def ask(client, seed) -> str:
        text, body = "", {"prompt": "a", "max_tokens": 2, "seed": seed, "stream": True, "ignore_eos": True}
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                text += line + "\n"
        assert text.endswith("data: [DONE]\n\n")
        return "".join(re.findall(r'"text":"((?:[^"\\]|\\.)*)"', text))

    async def all_of_them():
        limits = httpx.Limits(max_connections=STREAMS)
        async with httpx.AsyncClient(base_url=running.url, limits=limits, timeout=120) as client:
            return await asyncio.gather(*(ask(client, seed) for seed in range(STREAMS)))

    shown = asyncio.run(all_of_them())
    code, out, said = running.end()
    assert (code, out) == (128 + signal.SIGTERM, b"") and b"Traceback" not in said
    checked = [0, 64, 255, 499]
    with LLM("tiny-random", max_batch=len(checked), max_model_len=128) as llm:
        want = llm.generate(["a"] * len(checked), [SamplingParams(max_tokens=2, seed=seed, ignore_eos=True) for seed in checked])
    assert [shown[seed] for seed in checked] == [w.text.replace("\\", r"\\").replace('"', r"\"") for w in want]
    assert len(set(shown)) > 50   # the law is wide: that all got one answer would show


def test_flags_of_vllm_and_ctrl_c():
    running = Process("--trust-remote-code", "--reasoning-parser", "kimi_k2", "--tensor-parallel-size", 1, "--max_num_seqs", 2, "--max-model-len", 64, "--no-enable-prefix-caching",
                      "--served-model-name", "k3", "--api-key", "secret")
    assert httpx.get(running.url + "/v1/models", headers={"Authorization": "Bearer secret"}).json()["data"][0]["id"] == "k3"
    assert httpx.get(running.url + "/v1/models").status_code == 401
    code, out, said = running.end(signal.SIGINT)
    assert (code, out) == (128 + signal.SIGINT, b"") and b"Traceback" not in said and b"secret" not in said
    lines = said.decode().splitlines()
    assert [line.partition(" is not needed: ")[0] for line in lines[:2]] == ["--trust-remote-code", "--reasoning-parser"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_second_signal_cuts_off_what_runs_without_a_traceback(stream):
    running, ended = Process("--max-model-len", 4096, "--shutdown-grace", 60, "--log-level", "info"), []

    def ask():
        try:
            ended.append(httpx.post(running.url + "/v1/completions", json={"prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": stream}, timeout=60))
        except httpx.TransportError as e:
            ended.append(e)

    asking = threading.Thread(target=ask)
    asking.start()
    while "num_requests_running{" not in (page := httpx.get(running.url + "/metrics").text) or re.search(r"num_requests_running\{[^}]*\} 0", page):
        time.sleep(0.05)
    running.process.send_signal(signal.SIGTERM)
    while b"shutting down" not in running.said[-1]:
        running.said.append(running.process.stderr.readline())
        assert running.said[-1], running.said
    code, out, said = running.end(signal.SIGTERM)
    asking.join(30)
    assert (code, out) == (128 + signal.SIGTERM, b"") and isinstance(ended[0], httpx.TransportError), (code, ended)
    for bad in (b"Traceback", b"CancelledError", b"ASGI"):
        assert bad not in said, said.decode()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
@pytest.mark.parametrize("moment", ["asyncio.BaseEventLoop.__init__", "asyncio.BaseEventLoop.run_until_complete", "uvicorn.Config.load", "uvicorn.Server.startup"])
def test_a_signal_while_the_loop_begins(moment, number):
    """The port answers before the loop does. The signal comes at the beginning of `moment`, in the middle of what calls it."""
    script = f"""
import asyncio, os, sys, uvicorn
from k3cuda.__main__ import main
whole = {moment}
def hit(*args, **options):
    os.kill(os.getpid(), {number})
    return whole(*args, **options)
{moment} = hit
sys.argv[1:] = ["serve", "tiny-random", "--port", "0", "--max-model-len", "64"]
main()
"""
    done = subprocess.run([sys.executable, "-c", script], env=ENVIRONMENT, capture_output=True, timeout=60, preexec_fn=hears_interrupts)
    assert (done.returncode, done.stdout) == (128 + number, b"") and b"is served at" in done.stderr
    for bad in (b"Traceback", b"Exception ignored", b"never awaited"):
        assert bad not in done.stderr, done.stderr.decode()


def test_what_is_in_the_way_is_told_before_a_model_is_looked_for(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"cannot listen at 127.0.0.1 port {port}".encode() in k3("serve", "/no/such", "--port", port, code=2).stderr
    assert b"no such" in k3("serve", "/no/such", "--port", 0, code=3).stderr
    assert b"cannot listen at 203.0.113.1" in k3("serve", "tiny-random", "--host", "203.0.113.1", code=2).stderr   # an address that no machine has


@pytest.mark.parametrize("args, variables", [(("--api-key", ""), {}), ((), {"K3CUDA_API_KEY": ""}), (("--api-key", ""), {"K3CUDA_API_KEY": "secret"})])
def test_an_empty_key_is_no_open_server(args, variables):
    assert b"found an empty key" in k3("serve", "/no/such", *args, code=2, env=variables).stderr


@pytest.mark.parametrize("key", ["secret\n", " secret", "secret\r\n", "sec\nret", "sec\x7fret", os.fsdecode(b"secret\xff")], ids=ascii)
def test_a_key_that_no_client_can_send_is_refused(key):
    for args, variables in ((("--api-key", key), {}), ((), {"K3CUDA_API_KEY": key})):
        said = k3("serve", "/no/such", *args, code=2, env=variables).stderr
        assert said.startswith(b"Error: --api-key: found ") and b"\n  " in said and b"ret" not in said


@pytest.mark.parametrize("args", [("/no/such", "--served-model-name", "k3", "--served-model-name", os.fsdecode(b"k\xff")), ("/no/such", "--served-model-name", "k\n3"),
                                  (os.fsdecode(b"/no/such\xff"),)], ids=ascii)
def test_a_name_that_no_answer_can_hold_is_refused(args):
    assert b"--served-model-name: found " in k3("serve", *args, code=2).stderr


@pytest.mark.parametrize("given, found", [
    ("*", ("*",)), ("https://a.example,http://b:81", ("https://a.example", "http://b:81")), ('["*"]', ("*",)), ("[]", ()),
    ("http://[::1]:3000,https://xn--tda.example", ("http://[::1]:3000", "https://xn--tda.example")), ("moz-extension://0b-1c", ("moz-extension://0b-1c",)),
    *((given, None) for given in (   # what no browser sends would never match
        "https://a.example/page", "a.example", "", "[1]", "[", "[" * 50_000, "https://*.example", "https://user:pw@a.example", "https://a.example:443", "http://b:80",
        "http://a.example:99999", "http://localhost:", "https://\u00fc.example", "https://A.example", "null", "https://"))],
    ids=lambda value: str(value)[:40])
def test_origins_are_read_as_lists(given, found):
    import click

    from k3cuda.cli import main

    def read():
        return main.commands["serve"].make_context("serve", ["tiny-random", "--allowed-origins", given], parent=click.Context(main)).params["allowed_origins"]

    if found is None:
        with pytest.raises(click.BadParameter, match="found|no JSON"):
            read()
    else:
        assert read() == found


@pytest.mark.parametrize("name", ["uvicorn", "starlette"])
def test_a_package_that_is_missing_is_named(monkeypatch, name):
    from click.testing import CliRunner

    from k3cuda.cli.serve import serve
    for module in [m for m in sys.modules if m.split(".")[0] == name or m.startswith("k3cuda.serve")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    found = CliRunner().invoke(serve, ["tiny-random"])
    assert name in str(found.exception) and "pip install 'k3cuda[serve]'" in str(found.exception)
