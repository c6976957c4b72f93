"""Decode speed of the reference backend on this machine, as JSON.

Greedy, one sequence, prefill left out, the model's text ignored: `python scripts/bench_reference.py [--model tiny-random] [--tokens 200]`.
"""
import json
import os
import platform
import statistics
import subprocess
import sys
from importlib.metadata import version

import click

from k3cuda import LLM, SamplingParams


@click.command()
@click.option("--model", default="tiny-random", help="a folder or a name, as everywhere")
@click.option("--tokens", default=200, show_default=True)
@click.option("--runs", default=5, show_default=True)
@click.option("--output", type=click.Path(dir_okay=False), help="write the JSON here as well")
def main(model, tokens, runs, output):
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    with LLM(model, max_batch=1, max_model_len=4 * tokens + 64) as llm:
        llm.generate("warm up", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
        rates = [llm.generate("17 + 25 =", params)[0].stats.tok_per_s for _ in range(runs)]
        name = llm.backend.name
        result = {
            "what": "decode tokens/s without prefill, greedy, one sequence", "model": model, "decode_backend": name, "load_s": round(llm.load_s, 3),
            "tokens": tokens, "tok_per_s": [round(r, 1) for r in rates], "tok_per_s_median": round(statistics.median(rates), 1),
            "cpu": _cpu(), "cpus": os.cpu_count(), "load_average": round(os.getloadavg()[0], 2),
            "versions": {"python": platform.python_version(), "numpy": version("numpy"), "k3cuda": version("k3cuda")}, "commit": _commit(),
            "command": " ".join(["python", "scripts/bench_reference.py", *sys.argv[1:]]),
        }
    text = json.dumps(result, indent=1)
    print(text)
    if output:
        with open(output, "w", encoding="utf-8") as f:
            f.write(text + "\n")


def _cpu() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as f:
        return next((line.split(":", 1)[1].strip() for line in f if line.startswith("model name")), platform.machine())


def _commit() -> str:
    return subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    main()
