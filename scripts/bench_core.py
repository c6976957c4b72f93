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
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from k3cuda.config import MXFP4_GROUP, K3Config  # noqa: E402
from k3cuda.reference.mxfp4 import dequantize  # noqa: E402
from k3cuda.runtime import repack  # noqa: E402
from k3cuda.runtime.cuda_driver import Launch, Module, check, driver, open_device  # noqa: E402
from k3cuda.runtime.cuda_jit import compile_cuda  # noqa: E402
from k3cuda.weights import MMA_K, tree_leaves  # noqa: E402

TP = 16
ROTATE = 400 << 20   # bytes of weights that a timing walks through: many times the L2
ROWS = {1: (1, 8), 2: (16,), 4: (32,), 8: (64,)}   # token tiles of 8 -> row counts timed with them


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
    d = K3Config.from_json(ROOT / "k3cuda/data/kimi_k3").dims()
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
    """Layout -> C++ type. "used" is what kernels/row_shape.cuh chooses; --tune adds others around it."""
    found = {"used": f"RowAuto<{shape.tiles}, {shape.leaves}, {shape.steps}, {nt}, {str(shape.pair).lower()}>"}
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
        lines += [f"typedef {kind} {name}_shape;", f"K3_BENCH_ROWS({name}, {shape.tiles}, {name}_shape)"]
    return "\n".join(lines) + "\n", {name: layout for name, (layout, _) in kernels.items()}


def build(source_arch):
    return compile_cuda(*source_arch, name="bench_core").cubin


class Bench:
    def __init__(self, tune: bool):
        self.device, self.tune = open_device(0), tune
        self.stream = cp.cuda.Stream(non_blocking=True)
        self.raw = self.stream.__cuda_stream__()[1]
        self.base = Module(build(('#include "bench_core.cuh"\n', self.device.arch)))
        self.pool = cp.zeros(ROTATE * 3 // 2 // 4, cp.uint32)
        self.results = []
        self.ceiling = self.read_ceiling()
        self.flush = Launch(self.base.function("read_all"), 264, 512, [ctypes.c_void_p(self.pool.data.ptr), ctypes.c_size_t(8 << 20),
                                                                      ctypes.c_void_p(self.pool.data.ptr)], stream=self.raw)   # more than the L2
        self.flush_seconds = self.time([self.flush] * 8)

    def fill(self, array, mode, seed=1):
        n = array.nbytes // 4
        Launch(self.base.function("fill"), 264, 512, [ctypes.c_void_p(array.data.ptr), ctypes.c_size_t(n), ctypes.c_uint(seed), ctypes.c_int(mode)],
               stream=self.raw).launch()
        self.stream.synchronize()

    def read_ceiling(self) -> float:
        """Best of several launch shapes, bytes a second."""
        self.fill(self.pool, 1)
        out, n, best = cp.zeros(4, cp.uint32), self.pool.nbytes // 16, 0
        for blocks in (264, 396, 528):
            launch = Launch(self.base.function("read_all"), blocks, 512, [ctypes.c_void_p(self.pool.data.ptr), ctypes.c_size_t(n),
                                                                         ctypes.c_void_p(out.data.ptr)], stream=self.raw)
            best = max(best, n * 16 / self.time([launch] * 2))
        return best

    def time(self, launches, repeats: int = 9) -> float:
        """Seconds a launch: median of graph replays over all of them in order."""
        cu = driver()
        with self.stream:
            self.stream.begin_capture()
            for launch in launches:
                launch.launch()
            graph = self.stream.end_capture()
        events = [check(cu.cuEventCreate(0)) for _ in range(2)]
        times = []
        for _ in range(repeats):
            check(cu.cuEventRecord(events[0], self.raw))
            graph.launch(self.stream)
            check(cu.cuEventRecord(events[1], self.raw))
            self.stream.synchronize()
            times.append(check(cu.cuEventElapsedTime(*events)) / 1e3 / len(launches))
        return sorted(times[2:])[(repeats - 2) // 2]

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


EXPERTS, TOP_K, MAX_ITEMS = 896, 16, 1024


def expert_unit() -> str:
    d = K3Config.from_json(ROOT / "k3cuda/data/kimi_k3").dims()
    up, down = (tree_leaves(d[n], MXFP4_GROUP) for n in ("routed_expert_hidden_size", "moe_intermediate_size"))
    groups = d["routed_expert_hidden_size"] // MXFP4_GROUP // up, d["moe_intermediate_size"] // MXFP4_GROUP // down
    lines = ['#include "bench_core.cuh"', "#define COMMA ,"]
    for i, (wk, ring, warps, down_ring, blocks) in enumerate(EXPERT_LAYOUTS):
        lines += [f"typedef ExpertUpShape<{up}, {groups[0]}, {MAX_ITEMS}, {wk}, {ring << 10}> up{i};",
                  f"typedef ExpertDownShape<{down // TP}, {groups[1]}, {MAX_ITEMS}, 64, {warps}, {down_ring << 10}> down{i};",
                  f"K3_BENCH_EXPERTS(e{i}, {blocks[0]}, {blocks[1]}, up{i}, down{i})"]
    return "\n".join(lines) + "\n"


# warps and ring (KiB) of up, the same of down, least blocks a multiprocessor of both
EXPERT_LAYOUTS = [(8, 64, 8, 27, (2, 2)), (8, 92, 8, 40, (1, 2)), (16, 124, 16, 80, (1, 1)), (8, 64, 4, 14, (2, 2))]


class Experts:
    """Routed experts of one rank: all weights of a layer on the device, and lists of forced routings."""

    def __init__(self, bench):
        self.b = bench
        d = K3Config.from_json(ROOT / "k3cuda/data/kimi_k3").dims()
        self.latent, self.width = d["routed_expert_hidden_size"], d["moe_intermediate_size"] // TP
        self.up_leaves = tree_leaves(self.latent, MXFP4_GROUP)
        self.up_bytes = repack.leaf_bytes(self.latent // self.up_leaves // MXFP4_GROUP)
        self.down_bytes = repack.leaf_bytes(self.width // MXFP4_GROUP)
        self.pairs, self.tiles = self.width // 16, self.latent // 16
        self.w13 = self.random((EXPERTS, self.pairs * 2, self.up_leaves, self.up_bytes), self.latent // self.up_leaves // MXFP4_GROUP, 3)
        self.w2 = self.random((EXPERTS, self.tiles, 1, self.down_bytes), self.width // MXFP4_GROUP, 4)

    def random(self, shape, groups, seed):
        a = cp.empty(shape, cp.uint8)
        self.b.fill(a, 1, seed)
        a[..., groups * 256:] = 184 + a[..., groups * 256:] % 6   # factor exponents: scales 2^-5 to 2^0
        return a

    def routing(self, rows, distinct, seed=0):
        """expert ids [rows, top_k] that use exactly `distinct` experts, each row's own ones different."""
        rng = np.random.default_rng(seed)
        chosen = np.sort(rng.permutation(EXPERTS)[:distinct])
        deck = np.resize(rng.permutation(chosen), rows * TOP_K)
        return np.stack([np.sort(row) for row in deck.reshape(rows, TOP_K)]).astype(np.int32)

    def list(self, ids):
        order = np.argsort(ids.reshape(-1), kind="stable")
        experts, entry, item = ids.reshape(-1)[order], [], order.astype(np.uint16)
        start = 0
        for e, n in zip(*np.unique(experts, return_counts=True)):
            entry += [int(e) | first << 16 for first in range(start, start + n, 8)]
            start += n
        words = np.zeros(2 + MAX_ITEMS + 1 + MAX_ITEMS // 2, np.uint32)
        words[:2] = len(entry), start
        words[2:2 + len(entry) + 1] = [*entry, start << 16]
        words[2 + MAX_ITEMS + 1:].view(np.uint16)[:start] = item
        return cp.asarray(words), len(np.unique(experts))

    def values(self, packed, rows, groups):
        """float64 [rows, k] of one expert's packed matrix."""
        nibbles, scale = repack.unpack_mxfp4(packed, rows, groups)
        return cp.asarray(dequantize(cp.asnumpy(nibbles), cp.asnumpy(scale)).astype(np.float64))

    def run(self, module, i, rows, distinct, time=True):
        ids = self.routing(rows, distinct)
        entries, experts = self.list(ids)
        x, act = cp.empty((rows, self.latent), cp.uint16), cp.empty((rows * TOP_K, self.width), cp.uint16)
        self.b.fill(x, 0, 5), self.b.fill(act, 0, 6)
        weights = cp.asarray(np.random.default_rng(1).random((rows, TOP_K), np.float32))
        up = cp.full((rows * TOP_K, 2 * self.width), cp.nan, cp.float32)
        down = cp.full((rows, self.latent), cp.nan, cp.float32)
        p, n = (lambda a: ctypes.c_void_p(a.data.ptr)), ctypes.c_int
        launches = []
        for kind, arguments, groups in (
                ("up", [p(self.w13), n(self.pairs), p(x), n(self.latent), n(TOP_K), p(entries), p(up)], None),
                ("down", [p(self.w2), n(self.tiles), p(act), n(self.width), p(weights), n(TOP_K), n(rows), p(entries), p(down)], self.tiles)):
            _, threads, shared, _ = module.constants(f"e{i}_{kind}_launch", 4)
            grid = groups or self.b.device.sms * (2 if shared < 114 * 1024 and threads <= 256 else 1)
            launches.append(Launch(module.function(f"e{i}_{kind}", shared), grid, threads, arguments, shared=shared, stream=self.b.raw, dependent=True))
        cp.cuda.Device().synchronize()
        for launch in launches:
            launch.launch()
        self.b.stream.synchronize()
        result = {"up": cp.asnumpy(up), "down": cp.asnumpy(down), "experts": experts}
        if time:
            for kind, launch, nbytes in (("up", launches[0], self.w13[0].nbytes), ("down", launches[1], self.w2[0].nbytes)):
                seconds = self.b.time([launch] * 8) if experts > 100 else self.b.time([launch, self.b.flush] * 4) * 2 - self.b.flush_seconds
                self.b.results.append({"shape": f"expert_{kind}", "rows": rows, "distinct_experts": experts, "us": seconds * 1e6, "gb_s": nbytes * experts / seconds / 1e9,
                                       "percent_of_ceiling": 100 * nbytes * experts / seconds / self.b.ceiling, "us_without_overlap": 0, "layout": str(EXPERT_LAYOUTS[i]),
                                       "blocks": 0, "error": 0, "right": True, "same_bytes": True})
        return ids, x, act, weights, result

    def check(self, module, i):
        """A few experts against float64; a row alone against the same row among 64, byte for byte."""
        bits = lambda a: (cp.asnumpy(a).astype(np.uint32) << 16).view(np.float32).astype(np.float64)   # noqa: E731
        ids, x, act, weights, got = self.run(module, i, 64, 24, time=False)
        x, act, weights = bits(x), bits(act), cp.asnumpy(weights)
        want_up, want_down = np.zeros_like(got["up"], np.float64), np.zeros_like(got["down"], np.float64)
        for e in np.unique(ids):
            gate_up = cp.asnumpy(self.values(self.w13[int(e)], self.width * 2, self.latent // self.up_leaves // MXFP4_GROUP))
            gate_up = gate_up.reshape(self.pairs, 2, 16, self.latent).transpose(1, 0, 2, 3).reshape(2 * self.width, self.latent)
            w2 = cp.asnumpy(self.values(self.w2[int(e)], self.latent, self.width // MXFP4_GROUP))
            for row, place in zip(*np.nonzero(ids == e)):
                want_up[row * TOP_K + place] = gate_up @ x[row]
                want_down[row] += weights[row, place] * (w2 @ act[row * TOP_K + place])
        return {k: float(np.linalg.norm(got[k] - w) / np.linalg.norm(w)) for k, w in (("up", want_up), ("down", want_down))}, got

    def bench(self, cubin):
        module, first = Module(cubin), None
        for i in range(len(EXPERT_LAYOUTS)):
            errors, got = self.check(module, i)
            first = first or got
            same = all((got[k].view(np.uint32) == first[k].view(np.uint32)).all() for k in ("up", "down"))
            start = len(self.b.results)
            for rows, distinct in ((1, 16), (8, 16), (8, 120), (64, 120), (64, 613)):
                self.run(module, i, rows, distinct)
            for r in self.b.results[start:]:
                r["error"], r["same_bytes"] = errors[r["shape"][7:]], same
                r["right"] = r["error"] < 1e-5


def expand_rate(bench) -> float:
    """MXFP4 weights a clock and multiprocessor from shared memory to finished products."""
    out, cycles, w = cp.zeros(132 * 512, cp.float32), cp.zeros(256, cp.int64), cp.empty(1 << 20, cp.uint8)
    bench.fill(w, 1)
    rates = {}
    for threads in (256, 384, 512):
        rounds = 2000
        Launch(bench.base.function("expand_mxfp4_rate", 110 * 1024), bench.device.sms, threads, [ctypes.c_void_p(w.data.ptr), ctypes.c_void_p(out.data.ptr),
               ctypes.c_void_p(cycles.data.ptr), ctypes.c_int(rounds)], shared=110 * 1024, stream=bench.raw).launch()
        bench.stream.synchronize()
        rates[threads] = rounds * threads / 32 * 7 * 32 * 16 / float(cycles[:bench.device.sms].mean())
    return rates


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
        Experts(bench).bench(build((expert_unit(), bench.device.arch)))
    bench.expand_rate = expand_rate(bench)
    for s in chosen:
        bench.rows(s, {nt: (cubins[s.name, nt], units[s.name, nt][1]) for nt in tiles})
    report(bench)


def report(bench):
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
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
