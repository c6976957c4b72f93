"""Which part of a step one launch runs, what it cannot do, and its kernel's text. No GPU is needed to know it."""
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ..block_program import BlockProgram, program
from ..buffers import KV_BYTES
from ..emit import NO_PROBES, Probes
from ..errors import PlanError
from ..launch_layer import LAYER_SLOTS, MERGED_ROWS, layer_kinds, layer_steps
from ..launch_kinds import MAX_TOKENS
from ..launch_mla import both_kinds, in_place_of_kda, mla_kinds, of_its_sort
from ..launch_source import source
from ..phases import Grid
from ..plan import Plan
from .cuda_jit import Compiled, compile_cuda

KERNEL, SCALE = "launched_step", "launched_step_scale"
LOG2_E = "1.44269504088896340736"            # kLog2E of stages/common.cuh
NOT_THERE = 0x80008000                       # kNotThere of launch_exchange.cuh
CLUSTER = 2                                  # blocks that share tiles: the fastest measured (docs/megakernel-log.md)
BUCKETS = (1, 2, 4, MAX_TOKENS)              # rows that a kernel is compiled for at most
COPY = {1: 7680, 2: 7680, 4: 7680, 8: 6144}  # bytes of a copy at most: at eight rows a ring of larger ones has too few for KDA's low-rank matrix
# The numbers of a launch of a step, as scripts/bench_launch.py has them by default.
WINDOW, LIMIT_NS = 48 * 1024, 2_000_000_000
TOO_MANY_ROWS = f"steps of more than {MAX_TOKENS} rows run stage by stage"
# What `LaunchWait` of launch_ring.cuh counts, in words behind "waited for".
WAITS = ("", "weights", "room in the ring", "a vector", "sums of its cluster", "all blocks to read", "all blocks to clear", "a clean slot", "its own block to read",
         "its own block to choose", "sums of its own block")


@dataclass(frozen=True)
class Launched:
    """A launch that stands for operations `begin` to `end` - 1 of a plan. It reads ffn_out as those before leave it, and leaves ffn_out."""

    program: BlockProgram
    begin: int
    end: int


def misfit(plan: Plan, ranks: str, probes: Probes = NO_PROBES) -> str | None:
    """Why no step of a backend runs in one launch, whatever its rows, or None. `ranks`: how they are joined (Backend.ranks)."""
    if plan.taps:
        return "a draft model reads what a step leaves behind single layers: one launch leaves it nothing"
    if plan.dcp > 1:
        return "the MLA cache is split over ranks: one launch reads a whole one"
    if plan.tp > 1 and ranks != "loopback":
        return "several ranks: one launch has no collectives between them yet"
    if probes != NO_PROBES:
        return "a benchmark's probes are built into the standard path's kernels alone"
    return None


def launched(plan: Plan, rows: int, sms: int, kv_cache_dtype: str) -> Launched:
    """The launch of a step of `rows` rows on `sms` persistent blocks. Raises PlanError for a model that its kinds of phases cannot do."""
    cfg, grid = plan.cfg, Grid(sms=sms, cluster=CLUSTER, copy=COPY[tokens_of(rows)])
    layers = range(cfg.first_k_dense_replace, cfg.num_hidden_layers)
    if not layers:
        raise PlanError("the model has no layers with experts, and one launch has no others")
    of_kda, has = layer_kinds(cfg, plan.tp, CLUSTER, rank_parts=plan.tp, forced=False, merged=rows <= MERGED_ROWS), lambda k, layer: True
    of_mla = mla_kinds(cfg, plan.tp, CLUSTER, rows=rows, cache=KV_BYTES[kv_cache_dtype], blocks=sms)
    sorts = {cfg.is_kda(layer) for layer in layers}
    kinds = of_kda
    if sorts == {True, False}:
        kinds, has = both_kinds(of_kda, of_mla), of_its_sort(cfg, of_mla)
    elif sorts == {False}:
        kinds = in_place_of_kda(of_kda, of_mla)
    made = program(kinds, layer_steps(plan, kinds, layers, has), rows, grid, cfg.num_experts_per_token, slots=LAYER_SLOTS)
    inside = [at for at, op in enumerate(plan.ops) if op.layer in layers]
    return Launched(made, inside[0], inside[-1] + 1)


def tokens_of(rows: int) -> int:
    return next(b for b in BUCKETS if b >= rows)


def shared(plan: Plan, rows: int, sms: int, kv_cache_dtype: str) -> Launched:
    """`launched` with the kernel of its bucket, where that has room for it: fewer rows are other programs of the same kernel."""
    own = launched(plan, rows, sms, kv_cache_dtype)
    if rows == tokens_of(rows):
        return own
    full = launched(plan, tokens_of(rows), sms, kv_cache_dtype).program
    width = max(full.words.shape[1], own.program.words.shape[1])
    words = np.pad(own.program.words, ((0, 0), (0, width - own.program.words.shape[1])))
    return replace(own, program=replace(own.program, words=words, most=tuple(map(max, own.program.most, full.most))))


def launch_source(plan: Plan, found: Launched) -> str:
    """C++ of its kernel, and of SCALE, which leaves what the standard path's kernels multiply scores of latent attention with: the reciprocal root that
    a GPU approximates is no host's."""
    scale = f"rsqrtf(float({plan.cfg.dims()['mla_qk_head_dim']})) * {LOG2_E}f"
    return source(found.program, name=KERNEL, copy=COPY[found.program.tokens]) + f'extern "C" __global__ void {SCALE}(float* to) {{ *to = {scale}; }}\n'


def compile_launch(plan: Plan, rows: int, kv_cache_dtype: str, arch: str, *, sms: int, strict: bool = False, into: Path | None = None) -> Compiled:
    """The cubin of a step of up to `rows` rows in one launch on so many multiprocessors. Needs no GPU. Raises PlanError, CompileError."""
    found = launched(plan, rows, sms // CLUSTER * CLUSTER, kv_cache_dtype)
    return compile_cuda(launch_source(plan, found), arch, strict=strict, into=into, name=f"the step in one launch for {rows} rows")


def trouble_text(trouble: np.ndarray, found: Launched) -> str:
    """Who waited for what too long, from a launch's Watch record."""
    what, block, warp, phase, detail = map(int, trouble[:5])
    step = found.program.steps[phase]
    return f"block {block}, warp {warp} waited {LIMIT_NS / 1e9:g} s for {WAITS[what]} in {step.name}, layer {step.layer} (phase {phase}, {detail})"
