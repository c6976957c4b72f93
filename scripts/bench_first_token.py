"""How long a new process takes from its start to the first token of a small model, with kernels in the cache.

    python3 scripts/bench_first_token.py

`k3cuda generate` as a user starts it, model by model: once to fill the caches of kernels and bytecode, which is not counted, then `--runs` times.
"""
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
from k3cuda.runtime.cuda_driver import open_device  # noqa: E402
from k3cuda.runtime.machine import probe_driver  # noqa: E402
from k3cuda.runtime.named_models import NAMED  # noqa: E402
from k3cuda.runtime.surroundings import surroundings  # noqa: E402


def first_token(model: str, bytecode: str) -> tuple[float, dict]:
    """Seconds from a process's start until its first token can be read, and the event that ends its answer. `bytecode`: a folder for Python's."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | {"PYTHONPYCACHEPREFIX": bytecode}   # pip compiles what it installs
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "k3cuda", "generate", "-m", model, "-p", "Count to five.", "-n", "8", "-t", "0", "--ignore-eos", "--jsonl"],
                               stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=env)
    first = None
    for line in process.stdout:
        event = json.loads(line)
        if event["event"] == "delta" and first is None:
            first = time.perf_counter() - start
    if process.wait() or event["event"] != "end":
        raise SystemExit(f"{model}: generate ended with code {process.returncode}")
    return first, event


@click.command(help=__doc__.partition("\n")[0])
@click.option("--runs", type=click.IntRange(min=1), default=10, show_default=True)
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="Write the JSON here as well.")
def main(runs, output):
    found = []
    with tempfile.TemporaryDirectory() as bytecode:
        for model in NAMED:
            first_token(model, bytecode)
            took = [first_token(model, bytecode) for _ in range(runs)]
            seconds, engine = [s for s, _ in took], took[-1][1]["engine"]
            found.append({"model": model, "decode_backend": engine["decode_backend"], "runs": runs, "first_token_s_median": round(statistics.median(seconds), 3),
                          "first_token_s_max": round(max(seconds), 3), "load_s_median": round(statistics.median(e["timing"]["load_s"] for _, e in took), 3)})
            print(found[-1], file=sys.stderr, flush=True)
    device = open_device() if probe_driver().gpus else None
    text = json.dumps({"models": found} | surroundings(device, "python scripts/bench_first_token.py"), indent=1)
    print(text)
    if output:
        output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
