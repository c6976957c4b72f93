"""Times phases of one TP16 rank in one launch, and checks their bytes against the standard path's kernels first. JSON to $OUT, a table to stdout.

Chains of products (`0` without experts, `16` with as many chosen beforehand), and whole layers: mixes, products, the middle of KDA, the choice of
experts (`layer`; `layer16`: forced), experts and their norm; with latent attention instead of KDA: `mla`, `mla16`, over a BF16 cache `mlabf`, `mlabf16`;
layers of both sorts (`real`), or a whole step of the model's first --layers layers, from token ids to logits (`first`).

    scripts/bench_launch.py [--cases 0:1,16:1,107:8,layer:1,layer107:8] [--clusters 1,2,4] [--windows 48,48:96] [--layers 21]
                            [--whole-units] [--receive-batch 8] [--poll] [--merged-rows 1] [--check] [--only ffn_mix,route] [--stress 100] [--lose] [--stamps]
"""
import argparse
import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import cupy as cp

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from launch_bench import Bench, Case  # noqa: E402
from launch_chain import CHECKED_LAYERS, Chain, checked_layers, standard_of  # noqa: E402

from k3cuda import launch_source as ls  # noqa: E402
from k3cuda.launch_layer import MERGED_ROWS  # noqa: E402
from k3cuda.phases import Grid  # noqa: E402
from k3cuda.runtime.cuda_trace import PhaseMemory  # noqa: E402

# Standard deviation of a result: more than that, and less for chains, and for layers, whose sums over ranks add TP equal parts of one looped back.
SPREAD = (0.1, 10, 100)


def by_phase(chain, windows):
    """LaunchTrace.medians of the second of two launches, behind its first layer."""
    p = chain.program
    memory = PhaseMemory(p, range(p.weights[0][1] + 1, p.weights[-1][1] + 1) or None)
    for _ in range(2):
        memory.clear()
        chain.run(windows, stamps=memory)
    return memory.read().medians()


def main():
    numbers = lambda text: [int(n) for n in text.split(",")]
    pairs = lambda text: [tuple(map(int, w.split(":"))) for w in text.split(",")]
    parser = argparse.ArgumentParser()
    cases = lambda text: [Case(w) for w in text.split(",")]
    parser.add_argument("--cases", type=cases, default=cases("0:1,0:8,16:1,107:8,layer:1,layer:8,layer16:1,layer107:8"), help="what, and rows")
    parser.add_argument("--clusters", type=numbers, default=[1, 2, 4])
    parser.add_argument("--windows", type=pairs, default=[(48,)], help="KB in flight, and in kda_in if that is to have another")
    parser.add_argument("--copy", type=numbers, default=[ls.COPY], help="bytes of a copy at most")
    parser.add_argument("--ring", type=numbers, default=[224], help="KB at most")
    parser.add_argument("--whole-units", action="store_true", help="blocks of a cluster do units of w1 and w3 alone, and read all of their input")
    parser.add_argument("--receive-batch", type=int, default=4, help="vectors that a thread asks for at once, at most")
    parser.add_argument("--poll", action="store_true", help="who waits for the ring does not sleep")
    parser.add_argument("--merged-rows", type=int, default=MERGED_ROWS, help="rows of a layer up to which products norm for themselves what they read")
    parser.add_argument("--layers", type=int, default=21)
    parser.add_argument("--check", action="store_true", help="bytes only")
    parser.add_argument("--only", type=lambda text: text.split(","), default=None, help="phases whose bytes count, by name")
    parser.add_argument("--no-check", action="store_true", help="times only")
    parser.add_argument("--stamps", action="store_true", help="where the time of a phase goes")
    parser.add_argument("--stress", type=int, default=0, help="launches with delays at random, of each layout")
    parser.add_argument("--lose", action="store_true", help="lose a result of the first layout: must end in a record")
    parser.add_argument("--plain", action="store_true", help="not a cooperative launch")
    args = parser.parse_args()
    bench, results, wrong = Bench(args.cases, args.plain, 1 if args.whole_units else None, args.merged_rows, receive_batch=args.receive_batch, poll=args.poll), [], 0
    layouts = [(case, c, copy, ring) for case in args.cases for c in args.clusters for copy in args.copy for ring in args.ring
               if c < 4 or copy <= 8192]   # a block has 16 / c leaves of a tile, of which a large copy brings several
    stress, timed = ("-DK3_STRESS",), {"probed": False, "stamped": args.stamps}
    options = ((), stress)[:1 + bool(args.stress)]
    programs = {(case, c): bench.program(case, checked_layers(case), Grid(sms=bench.device.sms // c * c, cluster=c)) for case, c, *_ in layouts}
    bench.prepare([bench.source(programs[case, c], copy, ring, **shape) for case, c, copy, ring in layouts for shape in ({"probed": True}, timed)], options,
                  () if args.no_check else [standard_of(bench, p).text for p in programs.values()])
    kb = [tuple(n * 1024 for n in w) for w in args.windows]
    for case, c, copy, ring in layouts if not args.no_check else ():
        chain = Chain(bench, case, c, checked_layers(case), copy, ring)
        differ, spread, clean = chain.check(kb[0])
        print(f"{case}, clusters of {c} ({chain.clusters} fit), copies of {copy}: {chain.grid} blocks, {chain.slots} slots, spread {spread:.2f}, "
              f"{'clean' if clean else 'NOT CLEAN'}; values that differ: " + ", ".join(f"{name} {n}" for name, n in differ.items()), flush=True)
        if missing := set(args.only or ()) - set(differ):
            print(f"  it has no {', '.join(sorted(missing))}")
        wrong += sum(n for name, n in differ.items() if not args.only or name in args.only) + (not clean) + (not SPREAD[0] < spread < SPREAD[case.is_layer + 1])
    for case, c, copy, ring in layouts if args.stress else ():
        bad = Chain(bench, case, c, CHECKED_LAYERS, copy, ring, stress).stress(kb[0], args.stress)
        print(f"{case}, clusters of {c}, copies of {copy}: {bad} of {args.stress} delayed launches went wrong", flush=True)
        wrong += bad
    if args.lose:
        ended = Chain(bench, *layouts[0][:2], CHECKED_LAYERS, *layouts[0][2:]).lose(kb[0])
        print(f"a lost result: {ended or 'not noticed'}", flush=True)
        os._exit(int(not ended or bool(wrong)))   # nothing on the device can be given back any more
    if args.check or wrong:
        return int(bool(wrong))
    pool = cp.empty(2 << 30, cp.uint8)
    bench.filler.run("fill_bf16", pool, pool.nbytes // 2, ctypes.c_uint(1), ctypes.c_float(-1), ctypes.c_float(1))
    cp.cuda.Device().synchronize()
    ceiling = bench.timer.read_ceiling(pool, bench.device.name)
    print(f"read ceiling {ceiling / 1e12:.3f} TB/s")
    for case, c, copy, ring in layouts:
        experts = Chain(bench, case, c, args.layers, copy, ring).experts_read(kb[0]) if case.has_experts else 0.0
        chain = Chain(bench, case, c, args.layers, copy, ring, **timed)
        nbytes = bench.layer_bytes(chain, experts)
        floor = nbytes / ceiling * 1e6
        for windows in kb:
            us = bench.timer.median(chain.launch(windows).launch, repeats=5, warm=1) * 1e6 / args.layers
            bench.synchronize()
            results.append({"case": case.what, "rows": case.rows, "experts": experts, "cluster": c, "blocks": chain.grid, "copy": copy, "slots": chain.slots,
                            "window": windows, "us_a_layer": us, "mb_a_layer": nbytes / 1e6, "floor_us": floor, "ratio": us / floor})
            print(f"{case}, {experts:.0f} experts, clusters of {c}, {chain.grid} blocks, copies of {copy}, {chain.slots} slots, window {':'.join(str(w >> 10) for w in windows)}, "
                  f"{us:.2f} us a layer, {us / floor:.2f} x of {nbytes / 1e6:.1f} MB", flush=True)
            if args.stamps:
                results[-1]["phases"] = by_phase(chain, windows)
                for name, times in results[-1]["phases"].items():
                    print(f"    {name:16} " + ", ".join(f"{k} {v:.2f}" for k, v in times.items()), flush=True)
    commit = os.environ.get("K3CUDA_COMMIT") or subprocess.run(["git", "rev-parse", "-q", "--verify", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    (Path(os.environ.get("OUT", ".")) / "bench_launch.json").write_text(json.dumps(
        {"command": sys.argv, "commit": commit, "gpu": bench.device.name, "ceiling_tb_s": ceiling / 1e12, "layers": args.layers, "results": results}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
