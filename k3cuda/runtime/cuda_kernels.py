"""The kernels of one row bucket: compiled from the emitted text, loaded, and launched op by op for every rank."""
import ctypes
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from ..config import DECODE_ROWS
from ..draft_plan import DraftPlan
from ..emit import NO_PROBES, Probes, build_files, kernels_of, ops_of
from ..emit_sizes import H200_SMS, ROW_BUCKETS
from ..plan import Plan
from .cuda_driver import Launch, Module
from .cuda_jit import Compiled, compile_cuda
from .peer_exchange import sizes
from .step_records import CLUSTER, MAX_VOCAB, VOCAB_STEP, sampler_warps


def bucket_of(rows: int) -> int:
    return next(b for b in ROW_BUCKETS if b >= rows)


def draft_buckets(plan: DraftPlan, buckets) -> list[int]:
    """Those of a draft beside steps of `buckets`: for context rows of what a step commits, and for blocks of as many sequences as it verifies."""
    verified = (seqs for seqs in range(1, plan.max_seqs + 1) if bucket_of(seqs * (plan.num_drafts + 1)) in buckets)
    return sorted({min(rows, DECODE_ROWS) for rows in buckets} | {bucket_of(seqs * plan.block_rows) for seqs in verified})


def compile_bucket(plan: Plan | DraftPlan, rows: int, kv_cache_dtype: str, arch: str, *, sms: int = H200_SMS, ride: bool = True,
                   probes: Probes = NO_PROBES, strict: bool = False, into: Path | None = None) -> Compiled:
    """The cubin of every stage for steps of up to `rows` rows. Needs no GPU. `strict`, `into`: as compile_cuda."""
    headers = build_files(plan, rows, kv_cache_dtype, sms=sms, ride=ride, probes=probes)
    source = headers.pop("kernels.cu")
    return compile_cuda(source, arch, headers=headers, strict=strict, name=f"the step for {rows} rows", into=into)


def compile_buckets(plan: Plan, buckets, kv_cache_dtype: str, arch: str, **options) -> list[Compiled]:
    """Several buckets side by side."""
    return side_by_side([partial(compile_bucket, plan, rows, kv_cache_dtype, arch, **options) for rows in buckets])


def compile_step_io(vocab_size: int, arch: str, **options) -> Compiled:
    """The cubin of k_load, and of k_sample where there is one for the vocabulary. Needs no GPU. Options of compile_cuda."""
    source = '#include "step_io.cuh"\n'
    if not no_sampler(vocab_size):
        source += f"K3_SAMPLE({vocab_size}, {CLUSTER}, {sampler_warps(vocab_size)})\n"
    return compile_cuda(source, arch, name="the sampler", **options)


def compile_accept(vocab_size: int, arch: str, **options) -> Compiled:
    """The cubin of k_laws, k_draft_laws and k_judge. Needs no GPU. Only for a vocabulary that has a sampler. Options of compile_cuda."""
    source = f'#include "accept_core.cuh"\nK3_ACCEPT({vocab_size}, {CLUSTER}, {sampler_warps(vocab_size)})\n'
    return compile_cuda(source, arch, name="the acceptance of drafts", **options)


def compile_moves(arch: str, **options) -> Compiled:
    """The cubin of what moves collectives between processes. Needs no GPU. Options of compile_cuda."""
    return compile_cuda('#include "peer_exchange.cuh"\n', arch, headers={"exchange_sizes.cuh": sizes()}, name="moves between ranks", **options)


def no_sampler(vocab_size: int) -> str | None:
    """Why no kernel draws from this vocabulary, or None."""
    if vocab_size > MAX_VOCAB or vocab_size % VOCAB_STEP:
        return f"sampled on the host: a vocabulary of {vocab_size}, the kernel takes multiples of {VOCAB_STEP} up to {MAX_VOCAB}"
    return None


def side_by_side(jobs) -> list:
    """The results of functions that compile: NVRTC works outside Python's lock."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda job: job(), jobs))


class BucketKernels:
    """Loaded kernels of one bucket.

    Attributes:
        shapes: kernel -> (blocks along x, y and z, threads, blocks of a cluster, bytes of shared memory), as the kernels say themselves.
    """

    def __init__(self, plan: Plan | DraftPlan, rows: int, compiled: Compiled, ride: bool = True):
        self.rows, self.module = rows, Module(compiled.cubin)
        names = dict.fromkeys(k for op in ops_of(plan, rows) for k in kernels_of(op.stage, plan, rows, ride))
        shapes = {n: self.module.constants(f"k_{n}_launch", 6) for n in names}
        self.shapes = {n: shape for n, shape in shapes.items() if shape[0]}   # a kernel without blocks has nothing to do in this model
        self.functions = {n: self.module.function(f"k_{n}", shape[5]) for n, shape in self.shapes.items()}

    def launch(self, kernel: str, step: ctypes.Structure, args: ctypes.Structure, stream: int, dependent: bool) -> Launch:
        *blocks, threads, cluster, shared = self.shapes[kernel]
        launch = Launch(self.functions[kernel], tuple(blocks), threads, [step, args], shared=shared, stream=stream, cluster=cluster, dependent=dependent)
        launch.kernel = kernel
        return launch

    def close(self) -> None:
        self.module.close()
