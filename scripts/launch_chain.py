"""What scripts/bench_launch.py times: chains of a rank's phases in one launch, beside the standard path's kernels of the same phases."""
import ctypes
import sys
import time
from pathlib import Path

import cupy as cp
import numpy as np
from launch_bench import SEED

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests/gpu"))
from launch_standard import NOT_THERE, KdaLayer, Standard, Struct, left_out, product_behind  # noqa: E402
from launch_standard_mla import IN_MEMORY, MlaLayer  # noqa: E402

from k3cuda import block_program as bp  # noqa: E402
from k3cuda import launch_kinds as lk  # noqa: E402
from k3cuda import launch_source as ls  # noqa: E402
from k3cuda.launch_operands import KdaMix  # noqa: E402
from k3cuda.phases import Grid  # noqa: E402
from k3cuda.runtime.cuda_driver import Launch, check, driver  # noqa: E402

CHECKED_LAYERS = 3
CONTEXT = 8192   # positions of latent attention's sequences, about


def checked_layers(case) -> int:
    """Layers of which bytes are compared; among the first four is one of every sort."""
    return 4 if case.sorts == "first" else CHECKED_LAYERS


class Chain:
    """One program compiled and ready: its weights, its exchange, its launch."""

    def __init__(self, bench, case, cluster, layers, copy, ring, options=(), **shape):
        """`shape`: as launch_source.constants, but that records are kept where nothing is said of them."""
        shape = {"probed": True} | shape
        self.bench, self.case, self.cluster, self.layers = bench, case, cluster, layers
        self.copy, self.ring = copy, ring
        self.grid, self.clusters = self.fits(bench.source(bench.program(case, checked_layers(case), Grid(sms=bench.device.sms // cluster * cluster, cluster=cluster)), copy, ring))
        self.program = p = bench.program(case, layers, Grid(sms=self.grid, cluster=cluster, ring=ring * 1024, copy=copy))
        self.module, (self.threads, self.shared, _, self.slots) = bench.module(bench.source(p, copy, ring, **shape), options)
        self.function = self.module.function("product_chain", self.shared)
        self.words, self.result = cp.asarray(p.words), cp.zeros((case.rows, p.output_vectors * 4), cp.uint32)
        self.choices = bench.choices(case, p)
        self.on_device = {layer: cp.asarray(made.view(np.uint8)) for layer, made in self.choices.items()}
        self.kdas, self.kda_arrays, self.mlas, self.mla_arrays = {}, {}, {}, {}
        self.weights = {made: self.weights_of(p.kinds[made[0]], made[1]) for made in dict.fromkeys(p.weights)}
        self.places = cp.asarray([self.weights[made].data.ptr for made in p.weights], dtype=cp.uint64)
        self.exchange, self.counts = cp.full((p.slots, p.slot_vectors * 4), NOT_THERE, cp.uint32), cp.zeros(ls.COUNT_BYTES // 4, cp.uint32)
        self.x = bench.input(case, p)

    def weights_of(self, k, layer):
        """What a phase's weights point to, on the device."""
        if isinstance(k, lk.ForcedChoice):
            return self.on_device[layer]
        if isinstance(k, IN_MEMORY):
            return self.mla_of(layer)["launch"]
        if not isinstance(k, lk.Kda):
            return self.bench.weights_of(k, layer)
        made = self.kdas[layer] = KdaLayer(k, self.case.rows, (SEED, layer))
        values = made.fields(self.case.rows, k.heads, eps=self.bench.cfg.rms_norm_eps, **made.records)
        arrays = self.kda_arrays[layer] = {n: cp.asarray(v) for n, v in values.items() if isinstance(v, np.ndarray)}
        return cp.asarray(np.frombuffer(KdaMix(**values | {n: v.data.ptr for n, v in arrays.items()}), np.uint8))

    def mla_of(self, layer):
        """Arrays of a latent attention layer on the device, and its LaunchMla."""
        if layer not in self.mlas:
            made = self.mlas[layer] = MlaLayer(self.program.kinds, self.case.rows, CONTEXT, (SEED, layer))
            at = self.mla_arrays[layer] = {n: cp.asarray(v) for n, v in made.arrays().items()}
            at["launch"] = cp.asarray(made.weights(at, lambda a: a.data.ptr))
        return self.mla_arrays[layer]

    def fits(self, source):
        """(blocks that are resident at once, clusters that the device says fit)."""
        module, (threads, shared, _, _) = self.bench.module(source)
        most = self.bench.device.sms // self.cluster * self.cluster
        launch = Launch(module.function("product_chain", shared), most, threads, [], shared=shared, cluster=self.cluster)
        if self.cluster == 1:
            return self.bench.device.sms, self.bench.device.sms
        clusters = check(driver().cuOccupancyMaxActiveClusters(launch.function, launch.config))
        return min(clusters, self.bench.device.sms // self.cluster) * self.cluster, clusters

    def launch(self, windows, record=None, stamps=None):
        """`stamps`: a PhaseMemory. `windows`: bytes in flight, and of the first kind with weights if that has another."""
        names = {"weights": self.places, "programs": self.words, "input": self.x, "exchange": self.exchange, "result": self.result, "counts": self.counts, "record": record}
        bench = self.bench
        args = ls.arguments(self.program, **dict(zip(("window", "first_window"), windows)), trouble=bench.trouble.ctypes.data,
                            situ=bench.situ, routed_scale=bench.cfg.routed_scaling_factor, norm_eps=bench.cfg.rms_norm_eps, block_rows=bp.MAX_TOKENS,
                            stamps=stamps.address if stamps else 0, **{n: a.data.ptr for n, a in names.items() if a is not None})
        return Launch(self.function, self.grid, self.threads, [args], shared=self.shared, stream=bench.timer.raw, cluster=self.cluster,
                      cooperative=not bench.is_plain)

    def run(self, windows, **more):
        """One launch from the same prefix sums and closed blocks as every other one."""
        self.bench.begin()
        self.launch(windows, **more).launch()
        self.bench.synchronize()

    def recorded(self, windows):
        record = cp.zeros((self.program.phases, self.program.record_vectors * 4), cp.uint32)
        self.run(windows, record=record)
        return record.get()

    def check(self, windows):
        """Every phase's results of two launches against the standard path's kernels on what it read. Returns how many values differ: by phase's name, of the sums
        that stay, of the result."""
        p, bench = self.program, self.bench
        standard, device = self.standard(), GpuDevice(self.bench, self.bench.module(self.standard().text)[0])
        differ = {}
        for _ in range(2):
            record = self.recorded(windows)
            hidden, blocks = bench.hidden_before.get(), bench.blocks_before.get()
            for layer, made in self.kdas.items():
                made.records = {n: self.kda_arrays[layer][n].get() for n in made.records}
            for layer, made in self.mlas.items():
                made.after = self.mla_arrays[layer]["cache"].get()
            for _, name, wrong, _ in standard.walk(device, record, self.weights, self.x.get(), hidden, blocks, bench.mixes, self.choices, self.kdas, self.mlas, self.embedded):
                differ[name] = differ.get(name, 0) + wrong
            differ["prefix sums"] = differ.get("prefix sums", 0) + int((bench.hidden.get() != hidden).sum() + (bench.blocks.get() != blocks).sum())
            last, result = standard.made(p.phases - 1)[0], self.result.get()
            result = result.view(last.dtype)
            differ["result"] = differ.get("result", 0) + int((result != np.tile(last, (1, -(-result.shape[1] // last.shape[1])))[:, :result.shape[1]]).sum())
        final = result.view(np.float32) if last.dtype == np.uint32 else (result.astype(np.uint32) << 16).view(np.float32)
        return differ, float(final.std()), bool((self.exchange == NOT_THERE).all())

    def embedded(self, k):
        """BF16 bits [rows, n] of the step's tokens, as stage embed looped back takes them."""
        return self.bench.table[self.bench.tokens[:self.program.rows] % k.vocab].get()

    def standard(self):
        return standard_of(self.bench, self.program)

    def experts_read(self, windows):
        """Distinct experts of a layer, the mean of all."""
        if self.choices:
            return float(np.mean([made["entries"][0] for made in self.choices.values()]))
        record, p = self.recorded(windows), self.program
        routes = [(phase, p.kinds[kind]) for phase, (kind, _) in enumerate(p.weights) if isinstance(p.kinds[kind], lk.Route)]
        return float(np.mean([len(np.unique(record[phase][:p.rows * 2 * k.top_k].reshape(p.rows, 2, k.top_k)[:, 0])) for phase, k in routes])) if routes else 0.0

    def stress(self, windows, launches):
        """Launches with delays at random (K3_STRESS) whose result isn't that of the first without, or that leave something behind."""
        plain = Chain(self.bench, self.case, self.cluster, self.layers, self.copy, self.ring)
        plain.run(windows)
        bad = 0
        for _ in range(launches):
            self.result.fill(0)
            self.run(windows)
            bad += not (bool((self.result == plain.result).all()) and bool((self.exchange == NOT_THERE).all()))
        return bad

    def lose(self, windows):
        """A launch of which one block leaves out a unit: it must end, and say who waited for what. The context is lost."""
        p = self.program
        phase = product_behind(p, len(p.kinds))
        self.words.set(left_out(p, 1, phase))
        reader = next(i for i, sources in enumerate(p.sources) if phase in sources)
        start = time.monotonic()
        try:
            self.run(windows)
        except Exception as error:   # whatever the driver calls it
            # Who needs the lost result stands at its reader; who needs something of those, further on.
            return self.bench.trouble[0] and reader <= self.bench.trouble[3] < reader + len(p.kinds) and f"{type(error).__name__} after {time.monotonic() - start:.2f} s"
        return None


def standard_of(bench, program):
    """The standard path's kernels beside a program."""
    return Standard(program, bench.device.sms, True, bench.situ, bench.cfg.routed_scaling_factor, bench.cfg.rms_norm_eps)


class GpuDevice:
    """Runs kernels of tests/gpu/launch_standard.py on NumPy arrays; weights lie on the device already."""

    def __init__(self, bench, module):
        self.bench, self.module = bench, module

    def run(self, name, grid, threads, values, shared, cluster):
        if threads is None:
            blocks, threads, shared, cluster = self.module.constants(f"{name}_launch", 4)
            grid = grid or blocks
        copies = []

        def place(v):
            if isinstance(v, np.ndarray):
                copies.append((v, cp.asarray(v)))
                return copies[-1][1].data.ptr
            return v.data.ptr if isinstance(v, cp.ndarray) else v

        def argument(v):
            if isinstance(v, Struct):
                return v.kind(**{n: place(x) for n, x in v.values.items()})
            return ctypes.c_int(v) if isinstance(v, int) else ctypes.c_float(v) if isinstance(v, np.float32) else ctypes.c_void_p(place(v))

        arguments = [argument(v) for v in values]
        cp.cuda.Device().synchronize()
        Launch(self.module.function(name, shared), grid, threads, arguments, shared=shared, stream=self.bench.timer.raw, cluster=cluster).launch()
        self.bench.synchronize()
        for array, copy in copies:
            if array.flags.writeable:
                array[...] = copy.get()
