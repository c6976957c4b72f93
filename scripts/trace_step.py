"""Where the time of a step goes: each kernel's begin, wait and end in one real step of a TP16 rank, and a Chrome trace of it.

Times in the table are medians over layers, in µs after the end of the kernel before: a kernel that waits for less than 0.5 loses nothing to
being started. `--output F` writes the trace (chrome://tracing, Perfetto), as `k3cuda bench step --trace F.json` does beside a timed step. Of steps in one launch
`--decode-backend latency_specialized` prints the medians of their kinds of phases instead (LaunchTrace.medians), from the second layer on.
"""
import argparse
import json
import statistics

from k3cuda.config import RELEASED_FOLDER, K3Config
from k3cuda.emit import Probes
from k3cuda.runtime.cuda_bench import StepBench
from k3cuda.runtime.cuda_trace import chrome
from k3cuda.runtime.machine import LATENCY_SPECIALIZED, ON_GPU, STANDARD


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--context", type=int, default=1)
    parser.add_argument("--output")
    parser.add_argument("--decode-backend", choices=ON_GPU, default=STANDARD)
    a = parser.parse_args()
    specialized = a.decode_backend == LATENCY_SPECIALIZED
    bench, context = StepBench(K3Config.from_json(RELEASED_FOLDER), 16, 3, "fp8_e4m3", specialized=specialized), max(a.context, a.rows)
    bench.open(1, context, Probes(trace=True))
    bench.place(1, a.rows, context)
    if specialized and bench.declined:
        parser.error(f"--rows {a.rows}: {bench.declined}")
    found = bench.traced()
    if specialized:
        phases(found, f"{a.rows} rows, context {context}")
    else:
        print(f"{a.rows} rows, context {a.context}: {found[-1].end / 1e3:.1f} µs, traced")
        table(found)
    if a.output:
        with open(a.output, "w") as f:
            json.dump(found.chrome() if specialized else chrome(found), f)


def table(launches) -> None:
    after, end = {}, 0
    for t in launches:
        after.setdefault(t.kernel, []).append([x - end for x in (t.begin, t.last_begin, t.waited, t.first_end, t.end)])
        end = t.end
    print(f"{'kernel':14}{'n':>4}{'begin':>8}{'last':>8}{'waited':>8}{'1st end':>8}{'end':>8}{'a step':>9}")
    for kernel, rows in after.items():
        print(f"{kernel:14}{len(rows):4}" + "".join(f"{statistics.median(c) / 1e3:8.2f}" for c in zip(*rows)) + f"{sum(r[4] for r in rows) / 1e3:9.1f}")


def phases(trace, what: str) -> None:
    found = trace.medians()
    columns = list(dict.fromkeys(name for kind in found.values() for name in kind))
    print(f"{what}: {max(p.units_done for p in trace.parts) / 1e3:.1f} µs, with stamps\n{'phase':16}" + "".join(f"{name:>13}" for name in columns))
    for kind, of in found.items():
        print(f"{kind:16}" + "".join(f"{of[name]:13.2f}" if name in of else " " * 13 for name in columns))


if __name__ == "__main__":
    main()
