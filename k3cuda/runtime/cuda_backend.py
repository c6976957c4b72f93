"""The standard decode backend: a kernel a stage, a step one CUDA graph, on one GPU."""
import cupy
import ml_dtypes
import numpy as np

from ..buffers import KV_BYTES
from ..config import MAX_ROWS, PAGE_SIZE, K3Config
from ..emit import NO_PROBES, Probes, arena_offsets, launches_of
from ..errors import ConfigError, OutOfMemory, UsageError
from ..plan import Op, Plan, build_plan
from ..reference.sample import sample_row
from . import cuda_weights
from .backend import StepCounts, StepRows, check_buffer, check_room
from .cuda_driver import Launch, open_device
from .cuda_kernels import BucketKernels, bucket_of, compile_bucket
from .cuda_memory import RankMemory, session_bytes
from .cuda_trace import TraceMemory
from .machine import STANDARD
from .row_check import PADDING, RowCheck

KDA_HEAD_DIM = 128  # a warp holds a leaf of four keys a lane (kda_state.cuh)
_KV_DTYPES = {"auto": "bf16"} | {name: name for name in KV_BYTES}


class CudaBackend:
    """runtime/backend.py on one NVIDIA GPU.

    Args:
        source: has `cfg` and `rank_slices` (runtime/tensor_source.py).
        tp: ranks. All of them run on this GPU, one after the other ("virtual"), unless `only_rank` is given.
        only_rank: runs this one rank of `tp` alone, every collective looped back to itself; its numbers mean nothing.
        max_batch: slots, 1 to 64. max_model_len: tokens a slot can hold; None: what fits, at most the model's own limit.
        kv_cache_dtype: "auto" (bf16), "bf16" or "fp8_e4m3".
        memory_utilization: part of the device's memory that may be used.
        ride: stages store into every rank's memory what a collective would move; else collectives are kernels of their own.
        probes: what a benchmark builds into the kernels; with `trace` launches note their times (cuda_trace.py).
        weights: makes (layer, stage) -> packed device arrays from (plan, source, tp, rank); by default uploads the checkpoint's.
    Raises:
        DeviceError: no usable GPU. OutOfMemory: weights or cache do not fit. ConfigError: the model cannot be cut so.
    """

    name, overlaps, drafting = STANDARD, False, None

    def __init__(self, source, tp: int = 1, *, only_rank: int | None = None, max_batch: int = 8, max_model_len: int | None = None,
                 kv_cache_dtype: str = "auto", memory_utilization: float = 0.92, ride: bool = True, probes: Probes = NO_PROBES, weights=None):
        check_room(source.cfg, max_batch, max_model_len)
        if kv_cache_dtype not in _KV_DTYPES:
            raise ConfigError(f"kv_cache_dtype {kv_cache_dtype!r} is unknown here", f"use {', '.join(_KV_DTYPES)}")
        head = source.cfg.linear_attn_config.head_dim
        if head != KDA_HEAD_DIM:
            raise ConfigError(f"linear_attn_config.head_dim: found {head}, the kernels are built for {KDA_HEAD_DIM}", "use the reference backend")
        self.device, self.ride, self.probes = open_device(0), ride, probes
        self.gpu = self.device.name
        self.cfg: K3Config = source.cfg
        self.plan: Plan = build_plan(self.cfg, tp)
        self.tp, self.num_slots, self.max_rows = tp, max_batch, MAX_ROWS
        self.kv_cache_dtype = _KV_DTYPES[kv_cache_dtype]
        self.ranks = "virtual" if only_rank is None else "loopback"
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self._raw_stream = self.stream.__cuda_stream__()[1]
        owned = list(range(tp)) if only_rank is None else [only_rank]
        held = [(weights or _upload)(self.plan, source, tp, r) for r in owned]
        self.max_model_len = self._fitting_length(max_model_len, len(owned), memory_utilization)
        slot_pages = -(-self.max_model_len // PAGE_SIZE)
        self.num_pages = slot_pages * max_batch
        self.memories = [RankMemory(self.plan, max_batch, self.num_pages, slot_pages, self.kv_cache_dtype) for _ in owned]
        for memory, arrays in zip(self.memories, held):
            memory.weights = arrays
        self._steps = [m.step_struct(r, self.memories, only_rank is not None) for m, r in zip(self.memories, owned)]
        self.trace = TraceMemory(self._steps, self.plan) if probes.trace else None
        self._page_tables = np.full((max_batch, slot_pages), -1, np.int32)
        self._staging = self._pinned_inputs()
        self._graphs: dict[tuple[str, int], object] = {}
        self._kernels: dict[int, BucketKernels] = {}
        self._is_lent = False   # whether a caller has buffers
        self._check = RowCheck(max_batch, self.max_model_len, self.max_rows)
        self.counts = StepCounts()

    # ---- runtime/backend.py ----

    @property
    def max_logits(self) -> int:
        return self.memories[0].dims["head_rows"]

    def open_slot(self, slot: int, pages) -> None:
        self._page_tables[slot] = -1
        self._page_tables[slot, :len(pages)] = pages
        self._after_caller()
        for memory in self.memories:
            memory.clear_slot(slot, self.stream)
        self._send_page_tables()
        self._check.open(slot)

    def copy_slot(self, source: int, target: int, pages) -> None:
        used = -(-self._check.copy(source, target) // PAGE_SIZE)
        copied = [(old, new) for old, new in zip(self._page_tables[source, :used].tolist(), pages) if old != new]
        self._page_tables[target] = -1
        self._page_tables[target, :len(pages)] = pages
        self._after_caller()
        for memory in self.memories:
            memory.copy_slot(source, target, copied, self.stream)
        self._send_page_tables()

    def step(self, rows: StepRows) -> None:
        self._check.step(rows)
        self._after_caller()
        bucket = bucket_of(len(rows))
        self._write(token_ids=rows.token_ids, row_slot=rows.slots, row_position=rows.positions, logit_rows=rows.logit_rows)
        self._replay("step", bucket)
        self.counts.steps[self.name] += 1

    def logits(self) -> np.ndarray:
        rows = len(self._check.rows.logit_rows)
        out = np.empty((rows, self.cfg.vocab_size), np.float32)
        part = self.memories[0].buffer("logits")[:rows]
        if rows:
            part.data.copy_to_host_async(out.ctypes.data, out.nbytes, self.stream)
            self.stream.synchronize()
        return out

    def new_logits(self, rows: int) -> cupy.ndarray:
        return cupy.empty((rows, self.cfg.vocab_size), np.float32)

    def copy_logits(self, out: cupy.ndarray) -> None:
        current = cupy.cuda.get_current_stream()
        current.wait_event(self.stream.record())
        out.data.copy_from_device_async(self.memories[0].buffer("logits").data, out.nbytes, current)
        self.stream.wait_event(current.record())

    def buffer(self, name: str, rank: int = 0) -> cupy.ndarray:
        entry = check_buffer(name, rank, len(self.memories))
        targets = [m.target for op in self.plan.ops for m in op.stage.moves if self.ride and m.source == name]
        if targets:
            raise UsageError(f"buffer {name} is not written here: what belongs there goes straight to {targets[0]} of every rank", f"read {targets[0]}")
        self._is_lent = True
        cupy.cuda.get_current_stream().wait_event(self.stream.record())
        array = self.memories[rank].buffer(name)
        return array.view(ml_dtypes.bfloat16) if entry.dtype == "bf16" or (entry.dtype == "kv" and self.kv_cache_dtype == "bf16") else array

    def sample(self, draws):
        return [sample_row(row, draw) for row, draw in zip(self.logits(), draws, strict=True)]

    def commit(self, accepted: np.ndarray) -> None:
        self._check.commit(accepted)
        self._write(row_accepted=accepted)
        self._replay("commit", bucket_of(len(accepted)))

    def close(self) -> None:
        self._graphs.clear()
        for kernels in self._kernels.values():
            kernels.close()
        self._kernels.clear()
        self.memories, self._steps = [], []
        cupy.get_default_memory_pool().free_all_blocks()

    def _after_caller(self) -> None:
        """What follows on our stream waits for what the caller's stream does with buffers."""
        if self._is_lent:
            self.stream.wait_event(cupy.cuda.get_current_stream().record())

    # ---- inputs ----

    def _send_page_tables(self) -> None:
        for memory in self.memories:
            memory.buffer("page_table").data.copy_from_host_async(self._page_tables.ctypes.data, self._page_tables.nbytes, self.stream)
        self.stream.synchronize()   # the host array may change again

    def _pinned_inputs(self) -> np.ndarray:
        """Host copy of the input buffers, which are neighbours at the start of the arena, in memory the GPU reads directly."""
        offsets = self.memories[0].offsets
        self._input_bytes = offsets["row_accepted"] + MAX_ROWS
        pinned = cupy.cuda.alloc_pinned_memory(self._input_bytes)
        return np.frombuffer(pinned, np.uint8, self._input_bytes)

    def _write(self, **values) -> None:
        self.stream.synchronize()   # the copy before this one has left the staging memory
        for name, array in values.items():
            start, target = self.memories[0].offsets[name], self.memories[0].buffer(name)
            view = self._staging[start:start + target.nbytes].view(target.dtype)
            view[:] = PADDING[name]
            view[:len(array)] = array
        for memory in self.memories:
            memory.arena.data.copy_from_host_async(self._staging.ctypes.data, self._input_bytes, self.stream)

    # ---- kernels and graphs ----

    def kernels(self, bucket: int) -> BucketKernels:
        if bucket not in self._kernels:
            compiled = compile_bucket(self.plan, bucket, self.kv_cache_dtype, self.device.arch, sms=self.device.sms, ride=self.ride,
                                      probes=self.probes)
            self._kernels[bucket] = BucketKernels(self.plan, bucket, compiled, self.ride)
        return self._kernels[bucket]

    def launches(self, what: str, bucket: int, overlap: bool = True) -> list[tuple[Op, list[Launch]]]:
        """(operation, its launches) of a step or a commit in order, rank after rank for each kernel; each may begin under the one before it.

        The launch of a commit is for every layer.
        """
        kernels, out, count = self.kernels(bucket), [], 0
        for op in self.plan.ops if what == "step" else self.plan.commit[:1]:
            group = []
            for name, first_row in launches_of(op.stage, self.plan, bucket, self.ride):
                for memory, step in zip(self.memories, self._steps if name in kernels.shapes else ()):
                    args = memory.op_struct(op, first_row)
                    args.launch = count
                    group.append(kernels.launch(name, step, args, self._raw_stream, dependent=overlap and count > 0))
                    count += 1
            if group:
                out.append((op, group))
        return out

    def _replay(self, what: str, bucket: int) -> None:
        if (what, bucket) not in self._graphs:
            launches = self.launches(what, bucket)
            self.stream.synchronize()
            with self.stream:
                self.stream.begin_capture()
                for _, group in launches:
                    for launch in group:
                        launch.launch()
                graph = self.stream.end_capture()
            self._graphs[what, bucket] = (graph, launches)
        graph, launches = self._graphs[what, bucket]
        if self.trace and what == "step":
            self.trace.names = [(launch.kernel, op.layer) for op, group in launches for launch in group]
        graph.launch(self.stream)

    def _fitting_length(self, asked: int | None, ranks: int, utilization: float) -> int:
        free, total = cupy.cuda.runtime.memGetInfo()
        room = free - int(total * (1 - utilization))
        fixed = session_bytes(self.plan, self.num_slots, 0, 0, self.kv_cache_dtype)
        page = session_bytes(self.plan, self.num_slots, 1, 0, self.kv_cache_dtype)["mla_cache"]
        room = room // ranks - sum(fixed.values()) - arena_offsets(self.plan)[1]
        pages = room // max(page + 4, 1) // self.num_slots
        fits = min(self.cfg.max_position_embeddings, pages * PAGE_SIZE)
        asked_or_fits = fits if asked is None else asked
        if fits < 1 or asked_or_fits > fits:
            raise OutOfMemory(f"{self.num_slots} x {asked_or_fits} tokens of cache do not fit the {room / 1e9:.1f} GB that weights and states leave",
                              f"use a max_model_len of at most {max(fits, 0)}, or a smaller max_batch")
        return asked_or_fits


def _upload(plan: Plan, source, tp: int, rank: int) -> dict:
    """(layer, stage) -> packed arrays on the device."""
    held = {}
    for op in plan.ops:
        arrays = cuda_weights.op_arrays(op, source, tp, rank)
        if arrays:
            held[op.layer, op.stage.name] = [cupy.asarray(np.ascontiguousarray(a).view(np.uint8).reshape(-1)) for a in arrays]
    return held
