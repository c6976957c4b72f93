"""Times the sampler on a GPU: microseconds a launch, one and more rows, greedy and with every filter.

    python3 scripts/bench_sample.py

Writes $OUT/bench_sample.json where OUT is set.
"""
import json
import os
import sys
from pathlib import Path

import cupy as cp

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[1] / "tests/gpu")]
from sample_device import Sample, device  # noqa: E402

from k3cuda.runtime.cuda_timing import Timer  # noqa: E402
from k3cuda.runtime.sampling import Draw, SamplingParams  # noqa: E402

VOCAB = 163840
CASES = {"greedy": dict(temperature=0), "temperature": dict(temperature=1), "top_p": dict(temperature=1, top_p=0.95),
         "top_k, top_p, min_p": dict(temperature=0.8, top_k=50, top_p=0.95, min_p=0.01), "top_p, 20 logprobs": dict(temperature=1, top_p=0.95, logprobs=20)}


def main():
    timer = Timer(device().arch)
    logits = [(cp.random.default_rng(i).standard_normal((64, VOCAB)) * 3).astype(cp.float32) for i in range(4)]
    results = []
    for name, params in CASES.items():
        for rows in (1, 8, 64):
            draws = [Draw(SamplingParams(**params).resolved({}), 7 + r, 100) for r in range(rows)]
            samples = [Sample(x[:rows], draws, stream=timer.raw) for x in logits for _ in range(4)]
            seconds = timer.graph([s.launch for s in samples]) / len(samples)
            results.append({"case": name, "rows": rows, "us": round(seconds * 1e6, 2)})
            print(device().name, results[-1], flush=True)
    if os.environ.get("OUT"):
        (Path(os.environ["OUT"]) / "bench_sample.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
