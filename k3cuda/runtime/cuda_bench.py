"""Times one true rank of a model on one GPU: whole steps and single stages, against the bytes they must read.

Collectives are looped back to the rank itself (it fills every rank's place), so the numbers that come out mean nothing and the
times leave out what crosses GPUs; results say so. Weights, states and caches are random, never zero, and far larger than any cache.
Every step that is timed is checked in the same run (cuda_bench_checks.py); a result that fails is an error, not a number.
"""
import ctypes
import logging
import statistics
import time
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import cupy
import numpy as np

from ..config import DECODE_ROWS, K3Config
from ..emit import NO_PROBES, Probes, follows_collective
from ..errors import BenchmarkError, CompileError, OutOfMemory, PlanError
from ..launch_trace import LaunchTrace
from ..plan import Op, build_plan
from .cuda_backend import CudaBackend
from .cuda_bench_checks import STATES, check_experts, check_step, check_time, other_bucket, same_step
from .cuda_compare import launch_groups
from .cuda_driver import explained, open_device
from .cuda_kernels import bucket_of, compile_bucket, side_by_side
from .cuda_synthetic import Filler, synthetic_draft, synthetic_weights
from .cuda_timing import Timer
from .cuda_trace import Traced
from .drafting import Drafting
from .launch_program import BUCKETS, LOOPBACK, compile_launch, misfit
from .machine import STANDARD
from .step_bytes import StepBytes

log = logging.getLogger("k3cuda")

CEILING_BYTES = 2 << 30
L2_BYTES = 128 << 20   # what fits twice into an L2 cache, or nearly so, may be read from there
WARM, REPEATS = 3, 20


class StepBench:
    """One rank of `cfg` with weights made on the device, once.

    Args:
        kv_cache_dtype: "bf16" or "fp8_e4m3".
        drafting: a made draft beside it, whose weights are made on the device too; None: no draft.
        specialized: steps run in one launch where they can.

    Attributes:
        single: whether the placed step is one launch. declined: why it is not, though that was asked for.
        replayed: of the placed step, to be replayed one behind the other: step and commit, or one in which all rows stand, as a sequence's only row does.
    Raises OutOfMemory: the weights do not fit.
    """

    single, declined = False, None

    def __init__(self, cfg: K3Config, tp: int, rank: int, kv_cache_dtype: str, drafting: Drafting | None = None, specialized: bool = False):
        self.cfg, self.tp, self.rank, self.kv_cache_dtype, self.specialized = cfg, tp, rank, kv_cache_dtype, specialized
        self.device = open_device(0)
        self.filler, timer = Filler(self.device.arch), Timer(self.device.arch)
        self.cycles_a_us = timer.cycles_a_us
        self.source, self._plan, self.drafting = SimpleNamespace(cfg=cfg), build_plan(cfg, tp, drafting and drafting.taps), drafting
        try:
            self._fill(timer)
        except cupy.cuda.memory.OutOfMemoryError as e:
            raise OutOfMemory(f"the weights of a rank of {tp} do not fit on the GPU beside what uses it already",
                              "end the other programs that nvidia-smi shows, or ask for fewer layers or more ranks") from e
        self.backend = self.unpacked = None

    def _fill(self, timer: Timer) -> None:
        """The read ceiling, then weights."""
        pool = cupy.empty(CEILING_BYTES, cupy.uint8)
        self.filler.run("fill_mxfp4", pool, CEILING_BYTES // 4, ctypes.c_uint(1), ctypes.c_int(1), ctypes.c_int(0), ctypes.c_int(0))
        self.ceiling = timer.read_ceiling(pool, self.device.name)
        del pool
        cupy.get_default_memory_pool().free_all_blocks()
        start = time.perf_counter()
        self._weights = synthetic_weights(self._plan, self.source, self.tp, self.rank, arch=self.device.arch)
        log.info("weights made in %.1f s", time.perf_counter() - start)

    def compile(self, rows, probes=(NO_PROBES,), more=()) -> None:
        """Kernels for steps of so many rows and for their checks, and the buckets `more`, all side by side."""
        buckets, start = {b for n in rows for b in (bucket_of(n), other_bucket(n)[0])} | set(more), time.perf_counter()
        launches = ({bucket_of(n) for n in rows} | set(more)) & set(BUCKETS) if self.specialized else ()
        side_by_side([partial(self._launch_ahead, b, p) for p in probes if not misfit(self._plan, LOOPBACK, p) for b in launches]
                     + [partial(compile_bucket, self._plan, b, self.kv_cache_dtype, self.device.arch, sms=self.device.sms, probes=p) for p in probes for b in buckets])
        log.info("kernels compiled in %.1f s", time.perf_counter() - start)

    def _launch_ahead(self, bucket: int, probes: Probes) -> None:
        with suppress(PlanError, CompileError):   # which a step in one launch gives as its reason
            compile_launch(self._plan, bucket, self.kv_cache_dtype, self.device.arch, sms=self.device.sms, probes=probes)

    def open(self, sequences: int, max_model_len: int, probes: Probes = NO_PROBES) -> None:
        """Room for so many sequences of so many tokens, with random caches and states. Raises OutOfMemory where it does not fit."""
        self.close()
        try:
            self._open(sequences, max_model_len, probes)
        except cupy.cuda.memory.OutOfMemoryError as e:
            self.close()
            raise OutOfMemory(f"{sequences} x {max_model_len} tokens of cache do not fit beside the weights", "ask for fewer rows or a shorter context") from e

    def _open(self, sequences: int, max_model_len: int, probes: Probes) -> None:
        self.backend = be = CudaBackend(
            self.source, self.tp, only_rank=self.rank if self.tp > 1 else None, max_batch=sequences, max_model_len=max_model_len,
            kv_cache_dtype=self.kv_cache_dtype, probes=probes, weights=lambda *_: self._weights, drafting=self.drafting,
            draft_weights=partial(synthetic_draft, arch=self.device.arch), specialized=self.specialized)
        self.timer, self.memory = Timer(self.device.arch, be.stream), be.memories[0]
        self.pages_a_slot = be.num_pages // be.num_slots
        for slot in range(sequences):
            be.open_slot(slot, range(slot * self.pages_a_slot, (slot + 1) * self.pages_a_slot))
        cache, state, conv = (self.memory.session[n] for n in ("mla_cache", *STATES))
        seed, low, high = ctypes.c_uint(7), ctypes.c_float(-0.1), ctypes.c_float(0.1)
        self.filler.run("fill_cache", cache, cache.nbytes // 4, seed, ctypes.c_int(self.kv_cache_dtype == "fp8_e4m3"))
        self.filler.run("fill_f32", state, state.nbytes // 4, seed, low, high)
        self.filler.run("fill_bf16", conv, conv.nbytes // 2, seed, low, high)
        cupy.cuda.Device().synchronize()
        self._states = {n: self.memory.session[n].copy() for n in STATES}

    def close(self) -> None:
        if self.backend is not None:
            self.backend.close()
        self.backend = self.memory = self._states = None
        cupy.get_default_memory_pool().free_all_blocks()

    def place(self, sequences: int, rows_each: int, context: int, seed: int = 5) -> None:
        """Puts random tokens at the end of `context` tokens of every sequence."""
        rng, n = np.random.default_rng(seed), sequences * rows_each
        own = self.cfg.vocab_size // self.tp   # the only part of the vocabulary whose rows are here
        first = context - rows_each
        self.rows, self.sequences, self.rows_each, self.context = n, sequences, rows_each, context
        self.declined = self.backend.step_launches.declines(bucket_of(n)) if self.specialized else None
        self.single = self.specialized and not self.declined
        self.replayed = ("advance",) if rows_each == 1 and self.backend.advances(bucket_of(n)) and not self.single else ("step", "commit")
        self.backend.write(token_ids=self.rank * own + rng.integers(0, own, n), row_slot=np.repeat(np.arange(sequences), rows_each),
                            row_position=np.tile(np.arange(first, context), sequences), logit_rows=np.arange(n)[-DECODE_ROWS:], row_accepted=np.ones(n))

    @explained()
    def step(self, walk: bool = False) -> dict:
        """Milliseconds of the placed step with its commit (median), beside the floor of the bytes that it must read.

        A step in one launch is checked against the standard path's kernels; `distinct_experts` are counted from what those choose.

        Args:
            walk: also compares sampled layers, operation by operation, with the reference, where the step has operations.
        Raises BenchmarkError: a check failed, see cuda_bench_checks.py. StepTimeout: a launch ended itself.
        """
        be, bucket = self.backend, bucket_of(self.rows)
        self.restore()   # a step before this one left its commit
        experts = self.count_experts()
        check_experts(self, experts)
        checks, before = check_step(self, walk and not self.single), self.outputs()
        seconds = [self._timed_step(bucket) for _ in range(WARM + REPEATS)][WARM:]
        same_step(self.outputs(), before, "the last timed step")
        nbytes = self.bytes(experts).floor()
        ms, floor = statistics.median(seconds) * 1e3, nbytes / self.ceiling * 1e3
        check_time(ms, floor)
        hops = be.step_launches.hops(bucket) if self.single else sum(follows_collective(op.stage) for op in be.plan.ops) if be.probes.hop_cycles else 0
        return {"decode_backend": be.name if self.single else STANDARD, "declined": self.declined, "rows": self.rows, "sequences": self.sequences, "tp": self.tp, "rank": self.rank,
                "context": self.context, "kv_cache_dtype": be.kv_cache_dtype, "ms": round(ms, 4), "ms_min": round(min(seconds) * 1e3, 4),
                "rows_a_second": round(self.rows / ms * 1e3, 1), "floor_ms": round(floor, 4), "floor_bytes": round(nbytes), "ratio_to_floor": round(ms / floor, 3),
                "us_a_layer": round(ms * 1e3 / self.cfg.num_hidden_layers, 2), "ceiling_tb_s": round(self.ceiling / 1e12, 3),
                "distinct_experts": round(float(np.mean(list(experts.values()))), 2) if experts else None,
                "forced_experts": be.probes.forced_experts, "hop_delay_us": round(be.probes.hop_cycles / self.cycles_a_us, 3), "delayed_hops": hops,
                "ranks": be.ranks, "checks": checks}

    def stages(self, names=()) -> list[dict]:
        """Microseconds of every stage: its operations of all layers in turn, behind one another, with the memory that they find.

        Each finds buffers as the step leaves them, and one list of experts for all its layers: the last one's.
        Raises BenchmarkError: a stage reads faster than the memory can, though not from a cache.
        """
        bucket, groups = bucket_of(self.rows), {}
        for ops, launches in [group for part in self.replayed for group in launch_groups(self.backend, part, bucket)]:
            if not names or ops[0].stage.name in names:
                members = groups.setdefault(ops[0].stage.name, ([], []))
                members[0].extend(ops)
                members[1].extend(launches)
        found = []
        for name, (ops, launches) in groups.items():
            self.restore()
            self.backend.replay("step", bucket)   # a stage repeated alone, a mix above all, leaves what no step would
            listed = self._listed_experts()
            found.append(self._stage(name, ops, launches, self.bytes({op.layer: listed for op in ops})))
        self.restore()
        return found

    def _stage(self, name: str, ops: list[Op], launches, floor: StepBytes) -> dict:
        seconds, nbytes = self.timer.graph(launches), sum(floor.op(op) for op in ops)
        fits_cache = nbytes < L2_BYTES
        if nbytes / seconds > self.ceiling and not fits_cache:
            raise BenchmarkError(f"stage {name} reads at {nbytes / seconds / 1e12:.2f} TB/s, above the ceiling of {self.ceiling / 1e12:.2f}",
                                 "something was not read: report the command")
        return {"stage": name, "operations": len(ops), "us": round(seconds * 1e6 / len(ops), 3), "us_a_step": round(seconds * 1e6, 1),
                "mb": round(nbytes / len(ops) / 1e6, 3), "gb_s": round(nbytes / seconds / 1e9, 1),
                "of_ceiling": round(nbytes / seconds / self.ceiling, 3), "fits_cache": fits_cache}

    def bytes(self, experts: dict[int, int]) -> StepBytes:
        return StepBytes(self.backend.plan, self.kv_cache_dtype, self.sequences, self.sequences * self.context, experts)

    def count_experts(self) -> dict[int, int]:
        """Layer -> distinct experts that the placed step reads, counted from what its router writes."""
        counts = {}
        for (op, *_), launches in launch_groups(self.backend, "step", bucket_of(self.rows)):
            for launch in launches:
                launch.launch()
            if op.stage.name == "route":
                counts[op.layer] = self._listed_experts()
        self.backend.stream.synchronize()
        return counts

    def _listed_experts(self) -> int:
        """Distinct experts of the choice that the last router left."""
        self.backend.stream.synchronize()
        return len(np.unique(self.memory.buffer("expert_ids")[:self.rows].get()))

    def replay(self) -> dict[str, np.ndarray]:
        """`outputs` of the placed step, run as it is timed; states stay."""
        self.backend.replay("step", bucket_of(self.rows), single=self.single)
        return self.outputs()

    def traced(self) -> list[Traced] | LaunchTrace:
        """Times of the placed step, whose backend was opened with Probes(trace=True): of its launches, or of one launch its phases."""
        memory = self.backend.step_launches.trace(bucket_of(self.rows)) if self.single else self.backend.trace
        for _ in range(WARM):
            self.replay()
        memory.clear()
        self.replay()
        return memory.read()

    def outputs(self) -> dict[str, np.ndarray]:
        """What the last step left: logits, and the experts of its last layer, which one launch keeps to itself."""
        self.backend.stream.synchronize()
        return {name: self.memory.buffer(name)[:self.rows].get() for name in ("logits", "expert_ids")[:1 if self.single else 2]}

    def restore(self) -> None:
        """States as they were before any commit."""
        for name, saved in self._states.items():
            self.memory.session[name].data.copy_from_device_async(saved.data, saved.nbytes, self.backend.stream)

    def _timed_step(self, bucket: int) -> float:
        self.restore()
        be = self.backend
        return self.timer.once(lambda: [be.replay(part, bucket, single=self.single and part == "step") for part in self.replayed])
