"""The device on which scripts/bench_launch.py times a rank's phases in one launch: cases and their programs, made-up weights, compiled kernels."""
import ctypes
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import cupy as cp
import numpy as np
from predict_launch import FIRST_LAYER

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests/gpu"))
from launch_standard import stored  # noqa: E402

from k3cuda import block_program as bp  # noqa: E402
from k3cuda import launch_kinds as lk  # noqa: E402
from k3cuda import launch_rank as lr  # noqa: E402
from k3cuda import launch_source as ls  # noqa: E402
from k3cuda.config import RELEASED_FOLDER, K3Config  # noqa: E402
from k3cuda.launch_layer import LAYER_SLOTS, MERGED_ROWS, layer_kinds, layer_steps  # noqa: E402
from k3cuda.launch_mixes import Mix  # noqa: E402
from k3cuda.launch_mla import both_kinds, in_place_of_kda, mla_kinds, of_its_sort  # noqa: E402
from k3cuda.launch_operands import LaunchMix, LaunchTokens  # noqa: E402
from k3cuda.launch_step import Embed, PartsSum, step_program  # noqa: E402
from k3cuda.plan import build_plan  # noqa: E402
from k3cuda.runtime import repack  # noqa: E402
from k3cuda.runtime.cuda_driver import Module, open_device  # noqa: E402
from k3cuda.runtime.cuda_jit import compile_cuda  # noqa: E402
from k3cuda.runtime.cuda_synthetic import Filler  # noqa: E402
from k3cuda.runtime.cuda_timing import Timer  # noqa: E402
from k3cuda.runtime.launch_program import WAITS  # noqa: E402

TP, SEED = 16, 5
FORCED_POOL = 128            # experts of a layer that the device holds where all choices are forced


class Case:
    """What is timed. `0` or `16`: products, with as many experts chosen beforehand; `layer`: with mixes, norms and a choice of its own; `layer16`: with 16
    forced; `mla`, `mla16`: the same with latent attention in KDA's place, over an FP8 cache, `mlabf`, `mlabf16` over one of BF16; `real`, `real16`: layers as the model has
    them, of both sorts, FP8; `first`: a whole step of its first layers, from token ids to logits."""

    def __init__(self, text: str):
        self.what, rows = text.split(":")
        kind = next((k for k in ("layer", "mlabf", "mla", "real", "first") if self.what.startswith(k)), "")
        self.rows, self.is_layer, self.sorts, self.cache = int(rows), bool(kind), kind.removesuffix("bf"), 2 if kind == "mlabf" else 1
        forced = self.what.removeprefix(kind)
        self.forced, self.chooses = int(forced or 0), self.is_layer and not forced
        self.has_experts = bool(self.forced) or self.chooses

    def __str__(self):
        return f"{self.what} with {self.rows} rows"


def expert_bytes(kind):
    """Of one expert's packed matrices."""
    return kind.expert_leaves * repack.leaf_bytes(kind.groups)


class Bench:
    """`shape`: what all kernels are built with (launch_source.constants)."""

    def __init__(self, cases, is_plain=False, expert_parts=None, merged_rows=MERGED_ROWS, **shape):
        self.is_plain, self.expert_parts, self.merged_rows, self.shape = is_plain, expert_parts, merged_rows, shape
        self.device = open_device(0)
        self.cfg = K3Config.from_json(RELEASED_FOLDER)
        self.plan = build_plan(self.cfg, TP)
        self.situ = (self.cfg.activation_situ_beta, self.cfg.activation_situ_linear_beta)
        self.timer, self.filler, self.built, self.weights, self.mixes = Timer(self.device.arch), Filler(self.device.arch), {}, {}, {}
        self.pool = self.cfg.num_experts if any(case.chooses for case in cases) else FORCED_POOL
        self.pinned = cp.cuda.alloc_pinned_memory(64)
        self.trouble = np.frombuffer(self.pinned, np.uint32, 16)
        self.trouble[:] = 0
        dims, rng = self.cfg.dims(), np.random.default_rng(SEED)
        self.hidden_before = cp.asarray(rng.standard_normal((bp.MAX_TOKENS, dims["hidden_size"])).astype(np.float32))
        self.blocks_before = cp.asarray(rng.standard_normal((dims["num_res_blocks"], bp.MAX_TOKENS, dims["hidden_size"])).astype(np.float32))
        self.hidden, self.blocks = self.hidden_before.copy(), self.blocks_before.copy()

    def begin(self):
        self.hidden[...], self.blocks[...] = self.hidden_before, self.blocks_before
        cp.cuda.Device().synchronize()

    def program(self, case, layers, grid):
        parts = lambda kinds: tuple(replace(k, parts=self.expert_parts or k.parts) if isinstance(k, lk.ExpertUp) else k for k in kinds)
        if case.sorts == "first":
            return step_program(self.plan, case.rows, grid, cache=case.cache, rank_parts=TP, merged=case.rows <= self.merged_rows, layers=layers)
        if not case.is_layer:
            kinds = parts(lr.with_experts(self.cfg, TP, grid.cluster)) if case.forced else lr.dense_products(self.cfg, TP, grid.cluster)
            return bp.chain(kinds, layers, case.rows, grid, self.cfg.num_experts_per_token if case.forced else 0)
        kinds = parts(layer_kinds(self.cfg, TP, grid.cluster, rank_parts=TP, forced=bool(case.forced), merged=case.rows <= self.merged_rows))
        mla, has = mla_kinds(self.cfg, TP, grid.cluster, rows=case.rows, cache=case.cache, blocks=grid.sms), lambda k, layer: True
        if case.sorts == "mla":
            kinds = in_place_of_kda(kinds, mla)
        elif case.sorts == "real":
            kinds, has = both_kinds(kinds, mla), of_its_sort(self.cfg, mla)
        first = next(n for n in range(FIRST_LAYER, self.cfg.num_hidden_layers) if case.sorts != "real" or not self.cfg.is_kda(n))   # of both sorts among few
        steps = layer_steps(self.plan, kinds, range(first, first + layers), has)
        return bp.program(kinds, steps, case.rows, grid, self.cfg.num_experts_per_token, slots=LAYER_SLOTS)

    def source(self, program, copy, ring, **more):
        """`copy` in bytes, `ring` in KB. `more`: as launch_source.constants."""
        return ls.source(program, ring=ring * 1024, copy=copy, **self.shape | more)

    def choices(self, case, program):
        """layer -> forced choice: rows take experts in turn, other ones in each layer."""
        made, top_k = {}, self.cfg.num_experts_per_token
        for layer in dict.fromkeys(layer for _, layer in program.weights) if case.forced else ():
            rng = np.random.default_rng((SEED, layer))
            deck = np.resize(rng.permutation(np.sort(rng.permutation(self.pool)[:case.forced])), (case.rows, top_k))
            made[layer] = ls.choice(deck, rng.random(deck.shape) * 0.3, program.tokens)
        return made

    def weights_of(self, k, layer):
        """What a phase's weights point to, on the device: made once."""
        if (k.name, layer) not in self.weights:
            self.weights[k.name, layer] = self._made(k, layer)
        return self.weights[k.name, layer]

    def _made(self, k, layer):
        seed = ctypes.c_uint(SEED + 64 * layer + sum(map(ord, k.name)) % 64)
        rng = np.random.default_rng((SEED, layer, len(k.name)))
        if isinstance(k, lk.Product):
            array, bound = cp.empty(k.nbytes, cp.uint8), (3 / k.inputs) ** 0.5    # results spread as their inputs do
            self.filler.run("fill_bf16", array, k.nbytes // 2, seed, ctypes.c_float(-bound), ctypes.c_float(bound))
        elif isinstance(k, lk.Route):
            array = cp.asarray(rng.standard_normal(k.experts).astype(np.float32) * np.float32(0.1))
        elif isinstance(k, PartsSum):
            array = cp.zeros(1, cp.uint8)   # it has none
        elif isinstance(k, Embed):
            self.tokens, self.table = cp.asarray(rng.integers(0, self.cfg.vocab_size, bp.MAX_TOKENS).astype(np.int32)), cp.empty((k.vocab, k.n), cp.uint16)
            self.filler.run("fill_bf16", self.table, self.table.size, seed, ctypes.c_float(-1), ctypes.c_float(1))
            array = cp.asarray(np.frombuffer(LaunchTokens(*(a.data.ptr for a in (self.tokens, self.table, self.hidden))), np.uint8))
        elif isinstance(k, Mix):
            if (k.stage, layer) not in self.mixes:
                score, weight = (rng.standard_normal(k.n) / k.n ** 0.5).astype(np.float32), stored(1 + 0.3 * rng.standard_normal(k.n), "bf16")
                self.mixes[k.stage, layer], self.weights[k.stage, layer, "mix"] = (score, weight), (cp.asarray(score), cp.asarray(weight))
            places = (self.hidden.data.ptr, self.blocks.data.ptr) if k.blocks else (0, 0)
            array = cp.asarray(np.frombuffer(LaunchMix(*(a.data.ptr for a in self.weights[k.stage, layer, "mix"]), *places), np.uint8))
        else:
            array, lowest = cp.empty(self.pool * expert_bytes(k), cp.uint8), 181 if isinstance(k, lk.ExpertUp) else 182   # factors 2^-7, 2^-6
            scale = repack.leaf_bytes(k.groups) // 4 - k.groups * 64
            self.filler.run("fill_mxfp4", array, array.nbytes // 4, seed, ctypes.c_int(k.groups * 64), ctypes.c_int(scale), ctypes.c_int(lowest))
        cp.cuda.Device().synchronize()
        return array

    def layer_bytes(self, chain, experts):
        """Weights that a layer reads, and cached positions, in the mean."""
        p = chain.program
        phases = (p.kinds[kind] for kind, _ in p.weights)
        return (sum(made.nbytes for made in chain.mlas.values()) + sum(k.nbytes if isinstance(k, lk.Product) else expert_bytes(k) * experts if k.is_chosen else 0 for k in phases)) / chain.layers

    def prepare(self, sources, options, plain=()):
        """Compiles all side by side: `sources` with each of the options, `plain` without any."""
        made = [(text, o) for text in set(sources) for o in options] + [(text, ()) for text in set(plain)]
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda it: compile_cuda(it[0], self.device.arch, options=it[1], name="a chain"), made))

    def module(self, source, options=()):
        if (source, options) not in self.built:
            module = Module(compile_cuda(source, self.device.arch, options=options, name="a chain").cubin)
            self.built[source, options] = module, module.constants("product_chain_launch", 4) if "product_chain_launch" in source else None
        return self.built[source, options]

    def input(self, case, program):
        """Of the launch; a step has none."""
        if case.sorts == "first":
            return cp.zeros(0, cp.uint32)
        values = np.random.default_rng(SEED).standard_normal((case.rows, program.input_vectors * (4 if case.is_layer else 8))).astype(np.float32)
        return cp.asarray(values if case.is_layer else stored(values, "bf16"))

    def synchronize(self):
        try:
            self.timer.stream.synchronize()
        except Exception:
            what, block, warp, phase, detail = map(int, self.trouble[:5])
            if what:
                print(f"block {block}, warp {warp} waited too long for {WAITS[what]} in phase {phase} ({detail})", flush=True)
            raise
