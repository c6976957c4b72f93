"""The routed experts' half of scripts/bench_core.py: forced routings, checked and timed; and how fast MXFP4 expands."""
import ctypes

import cupy as cp
import numpy as np

from k3cuda.config import MXFP4_GROUP, RELEASED_FOLDER, K3Config
from k3cuda.reference.mxfp4 import dequantize
from k3cuda.runtime import repack
from k3cuda.runtime.cuda_driver import Launch, Module
from k3cuda.weights import tree_leaves

TP = 16
EXPERTS, TOP_K, MAX_ITEMS = 896, 16, 1024


def expert_unit(tune: bool) -> str:
    d = K3Config.from_json(RELEASED_FOLDER).dims()
    up, down = (tree_leaves(d[n], MXFP4_GROUP) for n in ("routed_expert_hidden_size", "moe_intermediate_size"))
    groups = d["routed_expert_hidden_size"] // MXFP4_GROUP // up, d["moe_intermediate_size"] // MXFP4_GROUP // down
    lines = ["#define K3_BENCH_SMS 132", '#include "bench_core.cuh"', f"typedef ExpertList<{MAX_ITEMS}> list;"]
    for i, (wk, ring, warps, tiles, down_ring, blocks) in enumerate(EXPERT_LAYOUTS if tune else EXPERT_LAYOUTS[:1]):
        lines += [f"typedef ExpertUpShape<{up}, {groups[0]}, list, 8, {wk}, {ring << 10}> up{i};",
                  f"typedef ExpertDownShape<{down // TP}, {groups[1]}, list, 64, {TOP_K}, {warps}, {tiles}, {down_ring << 10}> down{i};",
                  f"K3_BENCH_EXPERTS(e{i}, {blocks[0]}, {blocks[1]}, up{i}, down{i})"]
    return "\n".join(lines) + "\n"


# warps and ring (KiB) of up, warps, tiles and ring of down, least blocks a multiprocessor of both
EXPERT_LAYOUTS = [(8, 62, 16, 2, 106, (2, 1)), (8, 64, 8, 1, 27, (2, 2)), (8, 64, 12, 2, 80, (2, 1)), (8, 64, 8, 2, 53, (2, 1))]


class Experts:
    """Routed experts of one rank: all weights of a layer on the device, and lists of forced routings."""

    def __init__(self, bench):
        self.b = bench
        d = K3Config.from_json(RELEASED_FOLDER).dims()
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
                ("down", [p(self.w2), n(self.tiles), p(act), n(self.width), p(weights), n(rows), p(entries), p(down)], self.tiles)):
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
        for i in range(len(EXPERT_LAYOUTS) if self.b.tune else 1):
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
