"""Times the row core alone at the shapes of one TP16 rank, and checks every shape it times. JSON to $OUT, a table to stdout.

    scripts/bench_core.py [--tune] [--only NAME,...]
"""
import argparse
import ctypes
import json
import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import cupy as cp

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from bench_experts import Experts, expand_rate, expert_unit  # noqa: E402

from k3cuda.config import RELEASED_FOLDER, K3Config  # noqa: E402
from k3cuda.runtime import repack  # noqa: E402
from k3cuda.runtime.cuda_driver import Launch, Module, open_device  # noqa: E402
from k3cuda.runtime.cuda_jit import compile_cuda  # noqa: E402
from k3cuda.runtime.cuda_timing import Timer  # noqa: E402
from k3cuda.weights import MMA_K, tree_leaves  # noqa: E402

TP = 16
ROTATE = 400 << 20   # bytes of weights that a timing walks through: many times the L2
ROWS = {1: (1, 8), 2: (16,), 4: (32,), 8: (64,)}   # token tiles of 8 -> row counts timed with them
# Layouts of many_core.cuh around the one in use: blocks of a cluster, warps along leaves, tiles of a warp, inbox in place of tokens, steps of a copy.
MANY = {"many": "", "many, inbox apart": ", 8, 0, 0, false", "many, one tile": ", 8, 0, 1", "many, two tiles": ", 8, 0, 2", "many, leaves by warp": ", 8, 2, 0",
        "many, copies of 4": ", 8, 0, 0, true, 4", "many, leaves by warp, 4 tiles": ", 8, 2, 4"}


@dataclass(frozen=True)
class Shape:
    """Output rows of each joined part, inputs and leaves that the rank holds."""

    name: str
    parts: tuple[int, ...]
    k: int
    leaves: int
    pair: bool = False   # gate and up meet in one block

    @property
    def tiles(self):
        return sum(map(repack.tiles_of, self.parts))

    @property
    def steps(self):
        return self.k // self.leaves // MMA_K

    @property
    def nbytes(self):
        return self.tiles * 16 * self.k * 2


def shapes() -> list[Shape]:
    d = K3Config.from_json(RELEASED_FOLDER).dims()
    h, cut = d["hidden_size"], {k: v // TP for k, v in d.items()}
    whole = lambda k: (k, tree_leaves(k))   # noqa: E731
    part = lambda k: (k // TP, tree_leaves(k) // TP)   # noqa: E731
    return [
        Shape("kda_in", (*[cut["kda_dim"]] * 4, cut["kda_head_dim"], cut["kda_num_heads"]), *whole(h)),
        Shape("mla_in", (cut["q_lora_rank"], cut["mla_cache_dim"], cut["mla_v_dim"]), *whole(h)),
        Shape("mla_q_b", (cut["mla_q_dim"],), *whole(d["q_lora_rank"])),
        Shape("o_proj", (h,), *part(d["kda_dim"])),
        Shape("moe_in", (*[cut["shared_intermediate_size"]] * 2, cut["num_experts"], cut["routed_expert_hidden_size"]), *whole(h), True),
        Shape("router_latent", (cut["num_experts"], cut["routed_expert_hidden_size"]), *whole(h)),
        Shape("shared_up", (cut["shared_intermediate_size"],) * 2, *whole(h), True),
        Shape("shared_down", (h,), *part(d["shared_intermediate_size"])),
        Shape("latent_up", (cut["hidden_size"],), *whole(d["routed_expert_hidden_size"])),
        Shape("dense_down", (h,), *part(d["intermediate_size"])),
        Shape("lm_head", (cut["vocab_size"],), *whole(h)),
    ]


def layouts(shape: Shape, nt: int, tune: bool) -> dict[str, str]:
    """Layout -> C++ type: what kernels_cu/row_shape.cuh and, for more tokens, many_core.cuh choose; --tune adds others around them."""
    found = {"row": f"RowAuto<{shape.tiles}, {shape.leaves}, {shape.steps}, {nt}, {str(shape.pair).lower()}>"}
    if nt > 1:
        for label, more in MANY.items() if tune else [("many", "")]:
            if shape.leaves == 16 or ", 8, 2" not in more:
                found[label] = f"ManyShape<{shape.tiles}, {shape.leaves}, {shape.steps}, {nt}, 1, 132{more}>"
    if not tune:
        return found
    if shape.leaves == 16:
        grid = [(1, 16, 1, 1), (1, 8, 1, 2), (1, 4, 1, 4), (2, 8, 1, 2), (2, 4, 1, 4), (2, 2, 1, 8), (2, 16, 1, 1)] if nt == 1 else \
               [(2, 2, 4, 8), (2, 4, 2, 4), (2, 2, 2, 8), (1, 16 // nt, max(1, nt // 2), nt)]
    else:
        grid = [(1, 1, 1, 1), (1, 1, 2, 1), (1, 1, 4, 1)] if nt == 1 else [(1, 1, 4, 1), (1, 1, 8, 1), (2, 1, 2, 1)]
    for mt, wk, wm, cs in grid:
        group = shape.leaves // cs * shape.steps * 512 * mt * wm >> 10
        for ring in {min(r, group) for r in (48, 104, 200)} | {0}:
            for share in (False, True) if nt > 1 else (True,):
                found[f"MT{mt} WK{wk} WM{wm} CS{cs} ring{ring}K{' x shared' if share and nt > 1 else ''}"] = \
                    f"RowShape<{shape.leaves}, {shape.steps}, {mt}, {nt}, {wk}, {wm}, {cs}, {ring << 10}, {str(share).lower()}>"
    return found


def unit(shape: Shape, nt: int, tune: bool):
    """(source, kernels) of one shape: every layout a kernel of its own."""
    kernels = {f"k{i}_{nt}": layout for i, layout in enumerate(layouts(shape, nt, tune).items())}
    lines = ["#define K3_BENCH_SMS 132", '#include "bench_core.cuh"']
    for name, (_, kind) in kernels.items():
        macro = f"K3_BENCH_MANY({name}, {name}_shape)" if kind.startswith("Many") else f"K3_BENCH_ROWS({name}, {shape.tiles}, {name}_shape)"
        lines += [f"typedef {kind} {name}_shape;", macro]
    return "\n".join(lines) + "\n", {name: layout for name, (layout, _) in kernels.items()}


def build(source_arch):
    return compile_cuda(*source_arch, name="bench_core").cubin


class Bench:
    def __init__(self, tune: bool):
        self.device, self.tune = open_device(0), tune
        self.timer = Timer(self.device.arch)
        self.stream, self.raw = self.timer.stream, self.timer.raw
        self.base = Module(build(('#include "bench_core.cuh"\n', self.device.arch)))
        self.pool = cp.zeros(ROTATE * 3 // 2 // 4, cp.uint32)
        self.results = []
        self.fill(self.pool, 1)
        self.ceiling = self.timer.read_ceiling(self.pool, self.device.name)
        self.flush = Launch(self.base.function("read_all"), 264, 512, [ctypes.c_void_p(self.pool.data.ptr), ctypes.c_size_t(8 << 20),
                                                                      ctypes.c_void_p(self.pool.data.ptr)], stream=self.raw)   # more than the L2
        self.flush_seconds = self.time([self.flush] * 8)

    def fill(self, array, mode, seed=1):
        n = array.nbytes // 4
        Launch(self.base.function("fill"), 264, 512, [ctypes.c_void_p(array.data.ptr), ctypes.c_size_t(n), ctypes.c_uint(seed), ctypes.c_int(mode)],
               stream=self.raw).launch()
        self.stream.synchronize()

    def time(self, launches) -> float:
        """Seconds a launch, in a graph of all of them in order."""
        return self.timer.graph(launches) / len(launches)

    def rows(self, shape: Shape, modules):
        """Every layout of one shape: right, the same bytes as all others, and how fast."""
        copies = max(2, -(-ROTATE // shape.nbytes))
        pool = self.pool.view(cp.uint16)[:copies * shape.nbytes // 2]
        self.fill(pool, 0)
        self.packed = pool.reshape(copies, shape.tiles, shape.leaves, shape.steps, 32, 8)
        self.x = cp.empty((64, shape.k), cp.uint16)
        self.fill(self.x, 0, seed=9)
        wide = lambda a: (a.astype(cp.uint32) << 16).view(cp.float32).astype(cp.float64)   # noqa: E731
        self.want, self.first = wide(self.x) @ wide(repack.unpack_bf16(self.packed[0], shape.tiles * 16)).T, None
        for nt, (cubin, kernels) in modules.items():
            module = Module(cubin)
            for name, label in kernels.items():
                grid, threads, shared, cluster = module.constants(name + "_launch", 4)
                if shared > self.device.max_shared:
                    continue
                self.layout(shape, nt, label, module.function(name, shared), grid, threads, shared, cluster)

    def layout(self, shape, nt, label, function, grid, threads, shared, cluster):
        outputs, copies = shape.tiles * 16, len(self.packed)

        def launch(copy, rows, y, first_row=0, dependent=True):
            arguments = [ctypes.c_void_p(self.packed[copy].data.ptr), ctypes.c_int(shape.tiles), ctypes.c_void_p(self.x[first_row].data.ptr),
                         ctypes.c_int(shape.k), ctypes.c_int(rows), ctypes.c_void_p(y[first_row].data.ptr), ctypes.c_int(outputs)]
            return Launch(function, grid, threads, arguments, shared=shared, stream=self.raw, dependent=dependent, cluster=cluster)

        y, odd = (cp.full((64, outputs), cp.nan, cp.float32) for _ in range(2))
        cp.cuda.Device().synchronize()
        for r in range(0, 64, nt * 8):
            launch(0, nt * 8, y, r).launch()
        launch(0, 5, odd, 3).launch()    # other columns of the token tile, a partly filled one
        self.stream.synchronize()
        error = float(cp.linalg.norm(y - self.want) / cp.linalg.norm(self.want))
        self.first = y.copy() if self.first is None else self.first
        bits, first = (a.view(cp.uint32) for a in (y, self.first))
        same = bool((bits == first).all()) and bool((odd.view(cp.uint32)[3:8] == first[3:8]).all())
        clean = bool(cp.isnan(odd[8:]).all()) and bool(cp.isnan(odd[:3]).all())
        for rows in ROWS[nt]:
            seconds, alone = (self.time([launch(i % copies, rows, y, dependent=d) for i in range(max(copies, 24))]) for d in (True, False))
            self.results.append({
                "shape": shape.name, "rows": rows, "us": seconds * 1e6, "us_without_overlap": alone * 1e6, "gb_s": shape.nbytes / seconds / 1e9,
                "percent_of_ceiling": 100 * shape.nbytes / seconds / self.ceiling, "error": error, "same_bytes": same,
                "right": error < 1e-5 and clean, "blocks": grid, "shared": shared, "layout": label})


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tune", action="store_true", help="every layout, not only the one in use")
    parser.add_argument("--only", default="", help="shapes, comma-separated")
    parser.add_argument("--nt", default="1,2,4,8", help="token tiles")
    args = parser.parse_args()
    chosen = [s for s in shapes() if not args.only or s.name in args.only.split(",")]
    tiles = [int(n) for n in args.nt.split(",")]
    bench = Bench(args.tune)
    units = {(s.name, nt): unit(s, nt, args.tune) for s in chosen for nt in tiles}
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:   # a forked child must not inherit a CUDA context
        cubins = dict(zip(units, pool.map(build, [(u[0], bench.device.arch) for u in units.values()])))
    if not args.only or "experts" in args.only:
        Experts(bench).bench(build((expert_unit(args.tune), bench.device.arch)))
    bench.expand_rate = expand_rate(bench)
    for s in chosen:
        bench.rows(s, {nt: (cubins[s.name, nt], units[s.name, nt][1]) for nt in tiles})
    report(bench)


def report(bench):
    commit = subprocess.run(["git", "rev-parse", "-q", "--verify", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    smi = subprocess.run(["nvidia-smi", "--query-gpu=name,clocks.sm,clocks.mem,driver_version", "--format=csv,noheader"], capture_output=True, text=True)
    out = {"command": sys.argv, "commit": commit, "gpu": bench.device.name, "clocks": smi.stdout.strip(), "ceiling_tb_s": bench.ceiling / 1e12, "tp": TP,
           "mxfp4_weights_per_clock_and_sm": bench.expand_rate,
           "versions": {n: metadata.version(n) for n in ("cuda-bindings", "nvidia-cuda-nvrtc", "cupy-cuda13x", "numpy")}, "results": bench.results}
    (Path(os.environ.get("OUT", ".")) / "bench_core.json").write_text(json.dumps(out, indent=1))
    print(f"MXFP4 weights per clock and SM by threads: {bench.expand_rate}")
    print(f"read ceiling {bench.ceiling / 1e12:.3f} TB/s; {smi.stdout.strip()}")
    wrong = [r for r in bench.results if not (r["right"] and r["same_bytes"])]
    best = {}
    for r in sorted(bench.results, key=lambda r: r["us"]):
        best.setdefault((r["shape"], r["rows"], r.get("distinct_experts", 0)), []).append(r)
    for (name, rows, experts), found in sorted(best.items()):
        for r in found[:3]:
            print(f"{name:12} {rows:3} rows {experts or '':4} {r['us']:8.2f} us (alone {r['us_without_overlap']:7.2f}) {r['gb_s']:7.0f} GB/s {r['percent_of_ceiling']:5.1f} %  "
                  f"error {r['error']:.1e}  {r['layout']}, {r['blocks']} blocks")
    print(f"{len(bench.results)} timings, {len(wrong)} wrong", [(r["shape"], r["rows"], r["layout"], r["error"], r["same_bytes"]) for r in wrong[:6]])
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
