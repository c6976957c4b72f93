"""How long the GPU idles between decode steps that the engine drives, by the device's own clock.

    python3 scripts/bench_idle.py

The first kernel of a step notes when it began, the last one when it was done. What lies between one step's end and the next one's begin
is time that the host, or the launch of a graph, has lost. For `tiny-random` and for a few layers of one rank of the released one with
made weights, whose tokens mean nothing.
"""
import json
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import click

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
from first_layers import first_layers  # noqa: E402

from k3cuda.runtime.cuda_backend import CudaBackend  # noqa: E402
from k3cuda.runtime.cuda_driver import open_device  # noqa: E402
from k3cuda.runtime.cuda_synthetic import synthetic_weights  # noqa: E402
from k3cuda.runtime.engine import Engine  # noqa: E402
from k3cuda.runtime.request import Request  # noqa: E402
from k3cuda.runtime.sampling import SamplingParams  # noqa: E402
from k3cuda.runtime.surroundings import surroundings  # noqa: E402
from k3cuda.runtime.tiny_random import TINY_RANDOM, open_tiny_random  # noqa: E402

STEPS, SKIPPED = 300, 40   # of a run; the first ones capture graphs and see prompts
TP, RANK, LAYERS = 16, 3, 8
NUCLEUS = dict(temperature=1, top_p=0.95)
CASES = ((1, dict(temperature=0)), (1, NUCLEUS), (1, dict(temperature=1, frequency_penalty=0.5)), (8, NUCLEUS), (64, NUCLEUS))


def tiny() -> CudaBackend:
    return CudaBackend(open_tiny_random(), max_batch=64, max_model_len=512)


def released() -> CudaBackend:
    """The first layers of a rank, looped back."""
    arch = open_device().arch
    return CudaBackend(SimpleNamespace(cfg=first_layers(LAYERS)), TP, only_rank=RANK, max_batch=64,
                       max_model_len=512, weights=lambda *args: synthetic_weights(*args, arch=arch))


def watched(backend, times: list):
    """Notes (rows, begin, end) of every step whose tokens are read."""
    launch = backend.launch

    def launch_and_watch(rows, draws):
        pending = launch(rows, draws)
        drawn = pending.drawn

        def read():
            tokens = drawn()
            times.append((len(rows), *pending.times()))
            return tokens
        pending.drawn = read
        return pending
    backend.launch = launch_and_watch


def run(name: str, backend: CudaBackend, rows: int, times: list, **sampling) -> dict:
    """`rows` requests at once, decoded to their limit."""
    times.clear()
    engine, vocab = Engine(backend), backend.cfg.vocab_size // backend.tp
    first = RANK * vocab if backend.tp > 1 else 0   # other ranks' tokens embed to zero here
    for i in range(rows):
        params = SamplingParams(max_tokens=STEPS, seed=i, **sampling).resolved({})
        engine.add(Request(str(i), [first + 3 + i, first + 4, first + 5], params))
    errors, began = [], None
    while engine.has_work:
        if len(times) >= SKIPPED and began is None:
            began = time.perf_counter(), len(times)
        errors += [e.error for e in engine.step() if e.error]
    if errors:
        raise errors[0]
    wall = (time.perf_counter() - began[0]) / (len(times) - began[1])
    decode = [t for t in times[SKIPPED:-2] if t[0] == rows]
    gaps = [(b[1] - a[2]) / 1e3 for a, b in zip(decode, decode[1:])]
    inside = [(t[2] - t[1]) / 1e3 for t in decode]
    return {"model": name, "rows": rows, "sampling": ", ".join(f"{k} {v}" for k, v in sampling.items()), "steps": len(gaps), "idle_us_median": round(statistics.median(gaps), 2),
            "idle_us_p99": round(sorted(gaps)[int(len(gaps) * 0.99)], 2), "idle_us_max": round(max(gaps), 2),
            "step_us_median": round(statistics.median(inside), 2), "wall_us_a_step": round(wall * 1e6, 1)}


@click.command(help=__doc__.partition("\n")[0])
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="Write the JSON here as well.")
def main(output):
    found = []
    for name, make in ((TINY_RANDOM, tiny), (f"{LAYERS} layers of rank {RANK} of {TP}", released)):
        backend, times = make(), []
        watched(backend, times)
        for rows, sampling in CASES:
            found.append(run(name, backend, rows, times, **sampling))
            print(found[-1], file=sys.stderr, flush=True)
        backend.close()
    text = json.dumps({"cases": found} | surroundings(open_device(), "python scripts/bench_idle.py"), indent=1)
    print(text)
    if output:
        output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
