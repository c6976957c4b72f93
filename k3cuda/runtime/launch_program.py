"""What of a step one launch can do, its kernel's text, and what its records say. No GPU is needed to know it."""
from pathlib import Path

import numpy as np

from ..block_program import BlockProgram
from ..buffers import KV_BYTES
from ..emit import NO_PROBES, Probes
from ..errors import PlanError
from ..launch_kinds import MAX_TOKENS
from ..launch_source import COPY, LIMIT_NS, PRODUCER_LIMITS, source
from ..launch_step import hop_kinds, step_program
from ..phases import Grid
from ..plan import Plan
from .cuda_jit import Compiled, compile_cuda
from .machine import PEER, VIRTUAL
from .peer_exchange import LIMIT_S

KERNEL, SCALE = "launched_step", "launched_step_scale"
LOG2_E = "1.44269504088896340736"   # kLog2E of stages/common.cuh
NOT_THERE = 0x80008000              # kNotThere of launch_exchange.cuh
CLUSTER = 2                         # blocks that share tiles: the fastest measured (docs/megakernel-log.md)
BUCKETS = (1, 2, 4, MAX_TOKENS)      # rows that a launch is made for: a step runs in the smallest that holds its own
WINDOWS = {MAX_TOKENS: 64 * 1024}    # bytes that a block has in flight in a launch of so many rows: the fastest measured of a whole step
WINDOW = 48 * 1024                   # of others, as scripts/bench_launch.py has them by default
LOOPBACK = "loopback"                # Backend.ranks of one rank alone, which stands for all
TOO_MANY_ROWS = f"more rows than the {MAX_TOKENS} of one launch"
# What ranks in launches of their own wait for one another before a step, as in their other exchanges: one may be late by what its host or a compiler takes. Inside a step
# nobody waits for a host, and waits have LIMIT_NS.
MEET_S = LIMIT_S
ROOM, RANK = "room in the ring", "another rank"
# What `LaunchWait` of launch_ring.cuh counts, in words behind "waited for".
WAITS = ("", "weights", ROOM, "a vector", "sums of its cluster", "all blocks to read", "all blocks to clear", "a clean slot", "its own block to read",
         "its own block to choose", "sums of its own block", "a page of its program", RANK)


def misfit(plan: Plan, ranks: str, probes: Probes = NO_PROBES) -> str | None:
    """Why no step of a backend runs in one launch, whatever its rows, or None. `ranks`: how they are joined (Backend.ranks)."""
    if plan.dcp > 1:
        return "the MLA cache is split over ranks: one launch reads a whole one"
    if plan.tp > 1 and ranks not in (LOOPBACK, VIRTUAL, PEER):
        return "the ranks' memory is not mapped: one launch writes what it makes into that of all"
    if probes.forced_experts:
        return "a benchmark's forced experts are built into the standard path's kernels alone"
    return None


def launched(plan: Plan, rows: int, sms: int, kv_cache_dtype: str, ranks: int = 1) -> BlockProgram:
    """A step of one of BUCKETS rows on `sms` persistent blocks of a rank. `ranks`: as of step_program. Raises PlanError for a model that its kinds of
    phases cannot do."""
    if sms < CLUSTER:
        raise PlanError(f"the GPU holds no cluster of {CLUSTER} blocks for each of its ranks")
    return step_program(plan, rows, Grid(sms=sms, cluster=CLUSTER, copy=COPY), cache=KV_BYTES[kv_cache_dtype], rank_parts=plan.tp, ranks=ranks)


def launch_source(plan: Plan, program: BlockProgram, ranks_here: bool = False, probes: Probes = NO_PROBES) -> str:
    """C++ of its kernel, with what of `probes` no misfit refuses, and of SCALE, which leaves what the standard path's kernels multiply scores of latent attention with: the reciprocal root that
    a GPU approximates is no host's."""
    scale = f"rsqrtf(float({plan.cfg.dims()['mla_qk_head_dim']})) * {LOG2_E}f"
    hops = {"hop_kinds": hop_kinds(plan, program), "hop_cycles": probes.hop_cycles} if probes.hop_cycles else {}
    return source(program, name=KERNEL, ranks_here=ranks_here, stamped=probes.trace, **hops) + f'extern "C" __global__ void {SCALE}(float* to) {{ *to = {scale}; }}\n'


def delayed_hops(plan: Plan, program: BlockProgram) -> int:
    """How many of its phases a probe of hops lets wait."""
    delayed = hop_kinds(plan, program)
    return sum(kind in delayed for kind, _ in program.weights)


def compile_launch(plan: Plan, rows: int, kv_cache_dtype: str, arch: str, *, sms: int, probes: Probes = NO_PROBES, strict: bool = False, into: Path | None = None) -> Compiled:
    """The cubin of a step of up to `rows` rows in one launch on so many multiprocessors. Needs no GPU. Raises PlanError, CompileError."""
    return compiled_launch(plan, launched(plan, rows, sms // CLUSTER * CLUSTER, kv_cache_dtype), arch, probes=probes, strict=strict, into=into)


def compiled_launch(plan: Plan, program: BlockProgram, arch: str, *, ranks_here: bool = False, probes: Probes = NO_PROBES, **options) -> Compiled:
    """The same of a program; options of compile_cuda. `ranks_here`: as of launch_source.constants."""
    return compile_cuda(launch_source(plan, program, ranks_here, probes), arch, name=f"the step in one launch for {program.rows} rows", **options)


def trouble_text(trouble: np.ndarray, program: BlockProgram) -> str:
    """Who waited for what too long, from a launch's Watch record."""
    what, block, warp, phase, detail = map(int, trouble[:5])
    step, wait, seconds = program.steps[phase], WAITS[what], LIMIT_NS / 1e9
    if wait == RANK:   # before the first phase or behind the last one
        wait, seconds = f"rank {detail}", seconds if phase else MEET_S
    elif wait == ROOM:
        seconds *= PRODUCER_LIMITS
    return f"block {block}, warp {warp} waited {seconds:g} s for {wait} in {step.name}, layer {step.layer} (phase {phase}, {detail})"
