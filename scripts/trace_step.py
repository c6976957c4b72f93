"""Where the time of a step goes: each kernel's begin, wait and end in one real step of a TP16 rank, and a Chrome trace of it.

Times in the table are medians over layers, in µs after the end of the kernel before: a kernel that waits for less than 0.5 loses nothing to
being started. `--output F` writes the trace (chrome://tracing, Perfetto).
"""
import argparse
import json
import statistics

from k3cuda.config import RELEASED_FOLDER, K3Config
from k3cuda.emit import Probes
from k3cuda.runtime.cuda_bench import StepBench


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--context", type=int, default=1)
    parser.add_argument("--output")
    a = parser.parse_args()
    bench, context = StepBench(K3Config.from_json(RELEASED_FOLDER), 16, 3, "fp8_e4m3"), max(a.context, a.rows)
    bench.open(1, context, Probes(trace=True))
    bench.place(1, a.rows, context)
    launches = traced_step(bench)
    print(f"{a.rows} rows, context {a.context}: {launches[-1].end / 1e3:.1f} µs, traced")
    table(launches)
    if a.output:
        with open(a.output, "w") as f:
            json.dump(chrome(launches), f)


def traced_step(bench):
    for _ in range(3):   # capture, then warm
        bench.replay()
    bench.backend.trace.clear()
    bench.replay()
    return bench.backend.trace.read()


def table(launches) -> None:
    after, end = {}, 0
    for t in launches:
        after.setdefault(t.kernel, []).append([x - end for x in (t.begin, t.last_begin, t.waited, t.first_end, t.end)])
        end = t.end
    print(f"{'kernel':14}{'n':>4}{'begin':>8}{'last':>8}{'waited':>8}{'1st end':>8}{'end':>8}{'a step':>9}")
    for kernel, rows in after.items():
        print(f"{kernel:14}{len(rows):4}" + "".join(f"{statistics.median(c) / 1e3:8.2f}" for c in zip(*rows)) + f"{sum(r[4] for r in rows) / 1e3:9.1f}")


def chrome(launches) -> list[dict]:
    """A bar a kernel, from its first begin to its last end, on four lines in turn since neighbours overlap."""
    return [{"name": t.kernel, "ph": "X", "pid": 0, "tid": i % 4, "ts": t.begin / 1e3, "dur": (t.end - t.begin) / 1e3,
             "args": {"layer": t.layer, "waited_us": t.waited / 1e3}} for i, t in enumerate(launches)]


if __name__ == "__main__":
    main()
