"""Runs the lm-evaluation-harness recipe of docs/eval.md as it stands there, and holds what it found against k3cuda.LLM.

    python scripts/lm_eval_recipe.py FOLDER
    python scripts/lm_eval_recipe.py FOLDER --record tests/data/lm_eval/recorded.json

FOLDER gets lm-eval's environment, about 0.8 GB from a package index, if it has none yet. Needs k3cuda[serve] in the Python that runs this.
Code 1 where one number differs. `--record` also writes every request that lm-eval made, and what it read in the answers.
"""
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import urllib.request
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import click

from k3cuda import LLM, SamplingParams
from k3cuda.reference.sample import log_softmax

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/eval.md"
RECIPE_PORT = "127.0.0.1:8000"   # that of the page
BOS = "[BOS]"
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


def recipe() -> tuple[str, list[str], list[list[str]]]:
    """(the shell line that makes the environment, the words of the server, the words of each evaluation) of the page."""
    section = PAGE.read_text(encoding="utf-8").partition("## lm-evaluation-harness")[2].partition("\n## ")[0]
    lines = [line for block in re.findall(r"```sh\n(.*?)```", section, re.S) for line in block.replace("\\\n", " ").splitlines()]
    install, serve, *runs = lines
    return install, shlex.split(serve), [shlex.split(run) for run in runs]


@contextmanager
def serving(words: list[str]):
    """The address of a server that runs `words` at a free port."""
    server = subprocess.Popen([sys.executable, "-m", "k3cuda", *words[1:], "--port", "0"], stderr=subprocess.PIPE, text=True)
    try:
        for line in server.stderr:
            if found := re.search(r"served at http://(\S+)/v1", line):
                break
        else:
            raise SystemExit(f"the server ended with code {server.wait()}")
        yield found[1]
    finally:
        server.terminate()
        server.wait()


@contextmanager
def recording(target: str, requests: list):
    """The address of a proxy in front of `target`, which adds (method, path, body) of every request to `requests`."""
    class Proxy(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def _pass_on(self):
            data = self.rfile.read(int(self.headers.get("Content-Length", 0))) or None
            requests.append({"method": self.command, "path": self.path, "body": data and json.loads(data)})
            asked = urllib.request.Request(f"http://{target}{self.path}", data, {"Content-Type": "application/json"}, method=self.command)
            with urllib.request.urlopen(asked) as answer:
                said = answer.read()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        do_GET = do_POST = _pass_on

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{proxy.server_port}"
    finally:
        proxy.shutdown()


def samples(folder: Path):
    """What lm-eval logged as read, one dictionary a request: `kind`, `given`, `wanted` (keywords of generation) and `read`."""
    for path in sorted(folder.rglob("samples_*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            sample = json.loads(line)
            for arguments, [read] in zip(sample["arguments"].values(), sample["resps"]):
                first, second = arguments["arg_0"], arguments["arg_1"]
                if isinstance(second, str):
                    yield {"kind": "loglikelihood", "given": [first, second], "read": [float(read[0]), read[1] == "True"]}
                elif isinstance(first, str):
                    yield {"kind": "text", "given": first, "wanted": second, "read": read}
                else:
                    yield {"kind": "chat", "given": json.loads(first[0]), "wanted": second, "read": read}


def cut(tokenizer, context: str, continuation: str) -> tuple[list[int], int]:
    """(ids of both, how many of them are context), cut as lm-eval cuts them: blanks between the two belong to the continuation."""
    if not context:
        return [tokenizer.special[BOS], *tokenizer.encode(continuation)], 1
    return tokenizer.encode(context + continuation), len(tokenizer.encode(context.rstrip()))


def ours(llm: LLM, sample: dict):
    """What `read` of a sample should be, without a server."""
    if sample["kind"] == "loglikelihood":
        ids, start = cut(llm.tokenizer, *sample["given"])
        with llm.prefill(ids[:start]) as session:
            rows = [log_softmax(session.logits)]
            rows += [log_softmax(row) for row in session.step(ids[start:-1])] if len(ids) > start + 1 else []
        found = [float(row[token]) for row, token in zip(rows, ids[start:])]
        return [sum(found), all(p == float(row.max()) for p, row in zip(found, rows))]
    params = SamplingParams(temperature=0, max_tokens=sample["wanted"]["max_gen_toks"], stop=sample["wanted"]["until"])
    if sample["kind"] == "chat":
        return llm.chat(sample["given"], params, reasoning_effort="none").text
    return llm.generate(sample["given"], params)[0].text


@click.command(help=__doc__.partition("\n")[0])
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--record", type=click.Path(path_type=Path), help="Also write the requests and what was read to this file.")
def main(folder, record):
    install, serve, runs = recipe()
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "lm-eval/bin/lm_eval").exists():
        subprocess.run(install, shell=True, cwd=folder, check=True)
    requests, found = [], []
    with serving(serve) as server, recording(server, requests) as address:
        for i, (program, *words) in enumerate(runs):
            words = [word.replace(RECIPE_PORT, address) for word in words]
            into = folder / f"results-{i}-{os.getpid()}"
            words[words.index("--output_path") + 1] = str(into.resolve())
            subprocess.run([folder.resolve() / program, *words], cwd=ROOT, env=os.environ | OFFLINE, check=True)
            found += samples(into)
    with LLM(serve[2]) as llm:
        wanted = [ours(llm, sample) for sample in found]
    different = [(sample, want) for sample, want in zip(found, wanted) if sample["read"] != want]
    for sample, want in different:
        print(f"{sample['kind']} {sample['given']!r}: lm-eval read {sample['read']!r}, k3cuda.LLM says {want!r}")
    kinds = {kind: sum(s["kind"] == kind for s in found) for kind in ("loglikelihood", "text", "chat")}
    print(f"{len(requests)} requests; {len(found) - len(different)} of {len(found)} answers equal, in every bit and byte; {kinds}")
    if record:
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps({"requests": requests, "samples": found}, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")
    sys.exit(bool(different) or not all(kinds.values()))


if __name__ == "__main__":
    main()
