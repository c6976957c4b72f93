"""What scripts/bench_launch.py times: chains of a rank's products in one launch, beside the standard path's kernels of the same products."""
import ctypes
import time
from concurrent.futures import ThreadPoolExecutor

import cupy as cp
import numpy as np

from k3cuda import block_program as bp
from k3cuda import launch_source as ls
from k3cuda.config import RELEASED_FOLDER, K3Config
from k3cuda.phases import Grid
from k3cuda.runtime import repack
from k3cuda.runtime.cuda_driver import Launch, Module, check, driver, open_device
from k3cuda.runtime.cuda_jit import compile_cuda
from k3cuda.runtime.cuda_synthetic import Filler
from k3cuda.runtime.cuda_timing import Timer

TP, CHECKED_LAYERS, SEED = 16, 3, 5
TOP_K, POOL = 16, 128    # experts of a row; experts of a layer that the device holds
WAITS = ("", "weights", "room in the ring", "a vector", "sums of its cluster", "all blocks to read", "all blocks to clear", "a clean slot", "its own block to read",
         "its own block to choose", "sums of its own block")


def expert_bytes(kind):
    """Of one expert's packed matrices."""
    return kind.expert_leaves * repack.leaf_bytes(kind.groups)


def rounded(y):
    """F32 as BF16 bits, +0 for -0."""
    bits = y.view(cp.uint32)
    bits = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(cp.uint16)
    bits[bits == 0x8000] = 0
    return bits


class Chain:
    """One program compiled and ready: its weights, its exchange, its launch."""

    def __init__(self, bench, experts, rows, cluster, layers, copy, ring, options=()):
        self.bench, self.cluster, self.top_k = bench, cluster, TOP_K if experts else 0
        self.made, self.build = (experts, rows, cluster), {"ring": ring * 1024, "copy": copy}
        kinds = bench.kinds(experts, cluster)
        first = bp.chain(kinds, 1, rows, Grid(sms=bench.device.sms // cluster * cluster, cluster=cluster), self.top_k)
        self.grid, self.clusters = self.fits(ls.source(first, **self.build))
        self.program = p = bp.chain(kinds, layers, rows, Grid(sms=self.grid, cluster=cluster, ring=ring * 1024, copy=copy), self.top_k)
        self.module, (self.threads, self.shared, _, self.slots) = bench.module(ls.source(p, **self.build), options)
        self.function = self.module.function("product_chain", self.shared)
        self.words, self.result = cp.asarray(p.words), cp.zeros((rows, p.links[-1].row * bp.VECTOR), cp.uint16)
        self.weights = cp.asarray([bench.weights[kinds[kind].name, layer].data.ptr for kind, layer in p.weights], dtype=cp.uint64)
        self.exchange, self.counts = cp.full((bp.SLOTS, p.slot_vectors * 4), 0x80008000, cp.uint32), cp.zeros(ls.COUNT_BYTES // 4, cp.uint32)
        self.x = bench.input(p)
        self.choices = Choices(experts, p, layers) if experts else None

    def fits(self, source):
        """(blocks that are resident at once, clusters that the device says fit)."""
        module, (threads, shared, _, _) = self.bench.module(source)
        most = self.bench.device.sms // self.cluster * self.cluster
        launch = Launch(module.function("product_chain", shared), most, threads, [], shared=shared, cluster=self.cluster)
        if self.cluster == 1:
            return self.bench.device.sms, self.bench.device.sms
        clusters = check(driver().cuOccupancyMaxActiveClusters(launch.function, launch.config))
        return min(clusters, self.bench.device.sms // self.cluster) * self.cluster, clusters

    def launch(self, windows, prefetch=0, record=None, stamps=None, limit_ns=2_000_000_000):
        """`windows`: bytes in flight, while waiting, and of the first kind if they are others."""
        names = {"weights": self.weights, "programs": self.words, "input": self.x, "exchange": self.exchange, "result": self.result, "counts": self.counts,
                 "record": record, "stamps": stamps, "choices": self.choices and self.choices.words}
        args = ls.arguments(self.program, **dict(zip(("window", "waiting_window", "first_window"), windows)), prefetch=prefetch, limit_ns=limit_ns,
                            trouble=self.bench.trouble.ctypes.data, situ=self.bench.situ,
                            **{n: a.data.ptr for n, a in names.items() if a is not None})
        return Launch(self.function, self.grid, self.threads, [args], shared=self.shared, stream=self.bench.timer.raw, cluster=self.cluster,
                      cooperative=not self.bench.is_plain)

    def check(self, windows):
        """Every phase's results, and those of a second launch, against the row core's kernels; how many values differ."""
        p, bad = self.program, 0
        record = cp.zeros((p.phases, p.record_vectors * bp.VECTOR), cp.uint16)
        cp.cuda.Device().synchronize()
        for prefetch in (0, 8):
            self.launch(windows, prefetch, record=record).launch()
        self.bench.synchronize()
        x = self.x
        for phase, (kind, layer) in enumerate(p.weights):
            y = self.bench.standard(p.kinds[kind], self.bench.weights[p.kinds[kind].name, layer], x, p.rows, self.choices, layer)
            wrong = int((record[phase, :y.size] != y.reshape(-1)).sum())
            if wrong and not bad:
                print(f"  phase {phase} {p.kinds[kind].name}: {wrong} of {y.size} values differ")
            bad += wrong
            row = p.links[kind].row * bp.VECTOR
            x = cp.ascontiguousarray(cp.tile(y, (1, -(-row // y.shape[1])))[:, :row])
        spread = float((x.astype(cp.uint32) << 16).view(cp.float32).std())
        clean = bool((self.exchange == 0x80008000).all())
        return {"differ": bad + int((self.result != x).sum()), "spread": spread, "clean": clean}

    def stress(self, windows, launches):
        """Launches with delays at random (K3_STRESS) whose result isn't that of the first without, or that leave something behind."""
        plain = Chain(self.bench, *self.made, CHECKED_LAYERS, self.build["copy"], self.build["ring"] >> 10)
        plain.launch(windows).launch()
        self.bench.synchronize()
        bad = 0
        for _ in range(launches):
            self.result.fill(0)
            cp.cuda.Device().synchronize()
            self.launch(windows).launch()
            self.bench.synchronize()
            bad += not (bool((self.result == plain.result).all()) and bool((self.exchange == 0x80008000).all()))
        return bad

    def lose(self, windows):
        """A launch of which one block leaves out a unit: it must end, and say who waited for what. The context is lost."""
        words = self.words.get()
        at, left_out = 0, len(self.program.kinds) + 1
        for phase in range(left_out):
            at += 2 + (words[1, at] >> 16)
        units = words[1, at] >> 16
        words[1, at] -= 1 << 16
        words[1, at + 1 + units:-1] = words[1, at + 2 + units:]
        self.words.set(words)
        cp.cuda.Device().synchronize()
        start = time.monotonic()
        self.launch(windows, limit_ns=500_000_000).launch()
        try:
            self.bench.synchronize()
        except Exception as error:   # whatever the driver calls it
            # Who needs the lost result itself stands one phase behind it; who needs something of those, two.
            return self.bench.trouble[0] and self.bench.trouble[3] in (left_out + 1, left_out + 2) and f"{type(error).__name__} after {time.monotonic() - start:.2f} s"
        return None


class Choices:
    """Forced choices of every layer: rows take experts in turn, other ones in each layer."""

    def __init__(self, experts, program, layers):
        made = []
        for layer in range(layers):
            rng = np.random.default_rng((SEED, layer))
            deck = np.resize(rng.permutation(np.sort(rng.permutation(POOL)[:experts])), (program.rows, TOP_K))
            made.append(ls.choice(deck, rng.random(deck.shape) * 0.3, program.tokens))
        self.read = [int(m["entries"][0]) for m in made]
        self.words = cp.asarray(np.concatenate(made).view(np.uint8))
        self.lists, self.item_weights = [cp.asarray(ls.choice_list(m)) for m in made], [cp.asarray(m["weight"][0]) for m in made]


class Bench:
    def __init__(self, layers, cases, is_plain=False, expert_parts=None):
        self.is_plain, self.expert_parts = is_plain, expert_parts
        self.device = open_device(0)
        self.cfg = K3Config.from_json(RELEASED_FOLDER)
        self.situ = (self.cfg.activation_situ_beta, self.cfg.activation_situ_linear_beta)
        self.timer, self.filler, self.built = Timer(self.device.arch), Filler(self.device.arch), {}
        self.pinned = cp.cuda.alloc_pinned_memory(64)
        self.trouble = np.frombuffer(self.pinned, np.uint32, 16)
        self.trouble[:] = 0
        self.weights = {}
        experts = max(e for e, _ in cases)
        for kind, p in enumerate(self.kinds(experts, 2)):
            for layer in range(layers):
                seed = ctypes.c_uint(SEED + 8 * layer + kind)
                if isinstance(p, bp.Product):
                    array, bound = cp.empty(p.nbytes, cp.uint8), (3 / p.inputs) ** 0.5    # results spread as their inputs do
                    self.filler.run("fill_bf16", array, p.nbytes // 2, seed, ctypes.c_float(-bound), ctypes.c_float(bound))
                else:
                    array, lowest = cp.empty(POOL * expert_bytes(p), cp.uint8), 181 if isinstance(p, bp.ExpertUp) else 182   # factors 2^-7, 2^-6
                    scale = repack.leaf_bytes(p.groups) // 4 - p.groups * 64
                    self.filler.run("fill_mxfp4", array, array.nbytes // 4, seed, ctypes.c_int(p.groups * 64), ctypes.c_int(scale), ctypes.c_int(lowest))
                self.weights[p.name, layer] = array
        cp.cuda.Device().synchronize()
        text = f'#define K3_BENCH_SMS {self.device.sms}\n#include "bench_core.cuh"\n#include "situ.cuh"\n'
        for p in self.kinds(experts, 2):
            if isinstance(p, bp.Product):
                text += f"typedef RowAuto<{p.tiles}, {p.leaves}, {p.steps}, 1> {p.name}_shape;\nK3_BENCH_ROWS({p.name}, {p.tiles}, {p.name}_shape)\n"
        if experts:
            up, down = (k for k in self.kinds(experts, 2) if not isinstance(k, bp.Product))
            for tokens in sorted({1 << (r - 1).bit_length() for e, r in cases if e}):
                items = tokens * TOP_K
                text += (f"typedef ExpertUpShape<{up.leaves}, {up.groups}, ExpertList<{items}>, {max(tokens, 2)}, 8, 62 * 1024> up_{tokens};\n"
                         f"typedef ExpertDownShape<1, {down.groups}, ExpertList<{items}>, {tokens}, {TOP_K}> down_{tokens};\n"
                         f"K3_BENCH_EXPERTS(experts_{tokens}, 1, 1, up_{tokens}, down_{tokens})\n")
            text += """extern "C" __global__ void activate(const float* y, int items, int half, float b, float c, bf16* act) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < items * half) act[i] = float_to_bf16(situ(y[i / half * 2 * half + i % half], y[i / half * 2 * half + half + i % half], b, c));
}
"""
        self.core_text, self.core = text, None

    def kinds(self, experts, cluster):
        return bp.with_experts(self.cfg, TP, cluster, self.expert_parts) if experts else bp.dense_products(self.cfg, TP, cluster)

    def standard(self, kind, weights, x, rows, choices, layer):
        """What the standard path's kernels make of a phase's input: BF16 bits [rows, outputs]."""
        if isinstance(kind, bp.Product):
            return rounded(self.row_core(kind, weights, x, rows))
        tokens = 1 << (rows - 1).bit_length()
        pointer, number = lambda a: ctypes.c_void_p(a.data.ptr), ctypes.c_int
        items, cut = rows * TOP_K, choices.lists[layer]
        if isinstance(kind, bp.ExpertUp):
            _, threads, shared, _ = self.core.constants(f"experts_{tokens}_up_launch", 4)
            y, act = cp.zeros((items, 2, kind.outputs), cp.float32), cp.zeros((items, kind.outputs), cp.uint16)
            cp.cuda.Device().synchronize()
            values = [pointer(weights), number(kind.pairs), pointer(x), number(x.shape[1]), number(TOP_K), pointer(cut), pointer(y)]
            Launch(self.core.function(f"experts_{tokens}_up", shared), self.device.sms, threads, values, shared=shared, stream=self.timer.raw).launch()
            Launch(self.core.function("activate"), -(-act.size // 256), 256, [pointer(y), number(items), number(kind.outputs), ctypes.c_float(self.situ[0]),
                   ctypes.c_float(self.situ[1]), pointer(act)], stream=self.timer.raw).launch()
            self.synchronize()
            act[act == 0x8000] = 0
            return act
        _, threads, shared, _ = self.core.constants(f"experts_{tokens}_down_launch", 4)
        y = cp.zeros((rows, kind.outputs), cp.float32)
        cp.cuda.Device().synchronize()
        values = [pointer(weights), number(kind.tiles), pointer(x), number(x.shape[1]), pointer(choices.item_weights[layer]), number(rows), pointer(cut), pointer(y)]
        Launch(self.core.function(f"experts_{tokens}_down", shared), -(-kind.tiles // 2), threads, values, shared=shared, stream=self.timer.raw).launch()
        self.synchronize()
        return rounded(y)

    def layer_bytes(self, chain):
        """Weights that a layer reads."""
        return sum(k.nbytes if isinstance(k, bp.Product) else expert_bytes(k) * np.mean(chain.choices.read) for k in chain.program.kinds)

    def prepare(self, sources, options):
        """Compiles all side by side."""
        with ThreadPoolExecutor(8) as pool:
            core = pool.submit(compile_cuda, self.core_text, self.device.arch, name="the standard cores")
            list(pool.map(lambda text: [compile_cuda(text, self.device.arch, options=o, name="a chain") for o in options], set(sources)))
        self.core = Module(core.result().cubin)

    def module(self, source, options=()):
        if (source, options) not in self.built:
            module = Module(compile_cuda(source, self.device.arch, options=options, name="a chain").cubin)
            self.built[source, options] = module, module.constants("product_chain_launch", 4)
        return self.built[source, options]

    def input(self, program):
        columns = program.links[0].in_row * bp.VECTOR
        values = cp.asarray(np.random.default_rng(SEED).standard_normal((program.rows, columns)), dtype=cp.float32)
        return rounded(values)

    def row_core(self, product, weights, x, rows):
        grid, threads, shared, cluster = self.core.constants(product.name + "_launch", 4)
        y, pointer, number = cp.zeros((rows, product.outputs), cp.float32), lambda a: ctypes.c_void_p(a.data.ptr), ctypes.c_int
        cp.cuda.Device().synchronize()
        values = [pointer(weights), number(product.tiles), pointer(x), number(x.shape[1]), number(rows), pointer(y), number(product.outputs)]
        Launch(self.core.function(product.name, shared), grid, threads, values, shared=shared, stream=self.timer.raw, cluster=cluster).launch()
        self.synchronize()
        return y

    def synchronize(self):
        try:
            self.timer.stream.synchronize()
        except Exception:
            what, block, warp, phase, detail = map(int, self.trouble[:5])
            if what:
                print(f"block {block}, warp {warp} waited too long for {WAITS[what]} in phase {phase} ({detail})", flush=True)
            raise
