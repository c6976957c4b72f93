"""docs/start.md from top to bottom, as a newcomer goes through it: one server, and all its commands against it."""
import json
import re
import shlex
import signal
import subprocess

from command import COMMAND, ENVIRONMENT, ROOT, start
from serving import httpx

from k3cuda.runtime.tiny_random import open_tiny_random
from k3cuda.runtime.write_checkpoint import write_checkpoint

PAGE = (ROOT / "docs/start.md").read_text(encoding="utf-8")
LINES = [line for block in re.findall(r"^```sh\n(.*?)^```", PAGE, re.M | re.S) for line in block.splitlines()]
ADDRESS = "127.0.0.1:8000"   # of the page
INSTALL = ["python3 -m venv .venv && .venv/bin/pip install '.[serve]'", ". .venv/bin/activate"]


class Reader:
    def __init__(self, folder):
        self.folder, self.server, self.address = folder, None, None

    def run(self, line: str) -> str:
        words = [word.replace("/models/Kimi-K3", str(self.folder / "Kimi-K3")) for word in shlex.split(line)]
        if words[0] == "curl":
            return self.curl(*words[1:])
        assert words[0] == "k3cuda", line
        if words[1] == "serve":
            return self.serve(words[1:])
        if words[1:3] == ["bench", "serve"]:
            words += ["--base-url", f"http://{self.address}"]
        if words[1] == "chat":
            words += ["-n", "4"]
        done = subprocess.run([*COMMAND, *words[1:]], cwd=self.folder, env=ENVIRONMENT, input="hi\n", capture_output=True, text=True, timeout=120)
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
        return done.stdout

    def serve(self, words) -> str:
        self.server, said = start(*words, "--port", "0"), b""
        while b"is served at" not in said:
            said = self.server.stderr.readline()
            assert said, "the server ended"
        self.address = re.search(rb"http://(\S+)/v1", said)[1].decode()
        return said.decode()

    def curl(self, quiet, url, *options) -> str:
        assert quiet == "-s" and ADDRESS in url
        named = dict(zip(options[::2], options[1::2]))
        headers = dict([named["-H"].split(": ")]) if "-H" in named else {}
        answer = httpx.request("POST" if "-d" in named else "GET", url.replace(ADDRESS, self.address), content=named.get("-d"), headers=headers, timeout=60)
        assert answer.status_code == 200 and named.keys() <= {"-H", "-d"}, answer.text
        return answer.text


def test_the_page_from_top_to_bottom(tmp_path):
    write_checkpoint(open_tiny_random(), tmp_path / "Kimi-K3")
    assert LINES[:2] == INSTALL   # what .ci/run does for the README, with an extra
    reader, shown = Reader(tmp_path), {}
    try:
        for line in LINES[2:]:
            shown[line] = reader.run(line)
            assert shown[line], line
        reader.server.send_signal(signal.SIGTERM)
        reader.server.communicate(timeout=60)
        assert reader.server.returncode == 128 + signal.SIGTERM
    finally:
        if reader.server is not None:
            reader.server.kill()
    chat, = (json.loads(text) for line, text in shown.items() if line.endswith("'") and line.startswith("curl"))
    assert chat["usage"]["completion_tokens"] <= 16 and chat["choices"][0]["message"]["content"]
    document, = (json.loads(text) for line, text in shown.items() if "--json" in line)
    assert document["completion_tokens"] <= 32 and document["sampling"]["temperature"] == 0
    metrics, = (text for line, text in shown.items() if line.endswith("/metrics"))
    assert 'vllm:request_success_total{model_name="demo"' in metrics
