"""The standard decode backend: a kernel a stage, a step one CUDA graph, on one GPU."""
from collections import Counter
from contextlib import nullcontext
from typing import Sequence

import cupy
import ml_dtypes
import numpy as np

from ..buffers import KV_BYTES
from ..config import MAX_ROWS
from ..context_split import page_tokens
from ..emit import NO_PROBES, Probes, no_kernels
from ..errors import ConfigError, K3Error, PlanError, UsageError
from ..plan import build_plan
from ..reference.sample import sample_row
from ..weights import check_tp
from .backend import DraftAsk, Drafted, Judge, Judged, StepCounts, StepRows, check_buffer, check_room
from .cuda_accept import CudaAccept
from .cuda_draft import CudaDraft
from .cuda_driver import explained, known_failure, open_device
from .cuda_graphs import StepGraphs
from .cuda_kernels import bucket_of
from .cuda_launch import StepLaunches
from .cuda_memory import PageTables, RankMemory, fitting_length
from .cuda_step_io import CudaPending, Half, StepIO
from .cuda_trace import TraceMemory
from .cuda_upload import upload, upload_draft
from .drafting import Drafting
from .kernel_sizes import size_misfits
from .launch_program import LOOPBACK
from .loading import Loading
from .machine import LATENCY_SPECIALIZED, STANDARD
from .row_check import RowCheck
from .sampling import Draw, Drawn
from .step_room import MEMORY_UTILIZATION, slot_pages_of

_KV_DTYPES = {"auto": "bf16"} | {name: name for name in KV_BYTES}


class CudaBackend(StepGraphs):
    """runtime/backend.py on one NVIDIA GPU.

    Args:
        source: has `cfg` and `rank_slices` (runtime/tensor_source.py).
        tp: ranks. All of them run on this GPU, one after the other ("virtual"), unless `only_rank` is given. dcp: those that hold an MLA cache together.
        only_rank: runs this one rank of `tp` alone, every collective looped back to itself; its numbers mean nothing.
        max_batch: slots, 1 to 64. max_model_len: tokens a slot can hold; None: what fits, at most the model's own limit.
        kv_cache_dtype: "auto" (bf16), "bf16" or "fp8_e4m3".
        memory_utilization: part of the device's memory that may be used. memory_limit: bytes that may be, weights included; None: no other limit.
        ride: stages store into every rank's memory what a collective would move; else collectives are kernels of their own.
        probes: what a benchmark builds into the kernels; with `trace` launches note their times (cuda_trace.py).
        weights: makes (layer, stage) -> packed device arrays from (plan, source, tp, rank); by default uploads the checkpoint's.
        drafting: a draft model and how it is used; None: no speculation. draft_weights: as `weights` for it, with the rank's own arrays behind.
        loading: how the weights are read. carry, building: as CudaDraft.
        specialized: steps run in one launch where that is possible (cuda_launch.py), the others as ever.
    Raises:
        DeviceError: no usable GPU. OutOfMemory: weights or cache do not fit. ConfigError: the model cannot be cut so.
    """

    name, overlaps, drafting, draft, launch_peers = STANDARD, True, None, None, None   # name: of the decode backend that was asked for
    most_rows, device_index, _advanced = MAX_ROWS, 0, False   # of a step; of the GPUs that are visible; whether the last step left states behind its rows

    def __init__(self, source, tp: int = 1, *, only_rank: int | None = None, max_batch: int = 8, max_model_len: int | None = None,
                 kv_cache_dtype: str = "auto", memory_utilization: float = MEMORY_UTILIZATION, memory_limit: int | None = None, ride: bool = True, dcp: int = 1,
                 probes: Probes = NO_PROBES, weights=None, loading: Loading | None = None, drafting: Drafting | None = None, draft_weights=upload_draft,
                 carry=None, building=nullcontext, specialized: bool = False):
        check_room(source.cfg, max_batch, max_model_len)
        if kv_cache_dtype not in _KV_DTYPES:
            raise ConfigError(f"kv_cache_dtype {kv_cache_dtype!r} is unknown here", f"use {', '.join(_KV_DTYPES)}")
        check_tp(source.cfg, tp)
        if misfits := size_misfits(source.cfg, tp):
            raise ConfigError(f"the kernels are not built for this model: {'; '.join(misfits)}", "use the reference backend")
        if drafting and (why := no_kernels(drafting.source.cfg)):
            raise ConfigError(why, "use the reference backend")
        device, loading = open_device(self.device_index), loading or Loading()
        self.gpu, self.cfg = device.name, source.cfg
        super().__init__(build_plan(self.cfg, tp, drafting and drafting.taps, dcp), device, cupy.cuda.Stream(non_blocking=True), _KV_DTYPES[kv_cache_dtype], ride, probes, loading)
        self.dcp, self.page_tokens = dcp, page_tokens(dcp)
        self.tp, self.num_slots, self.max_rows, self.drafting = tp, max_batch, self.most_rows, drafting
        self.overlaps = self.overlaps and drafting is None   # what is drafted next depends on the tokens of this step
        self.name, self.ranks = LATENCY_SPECIALIZED if specialized else STANDARD, "virtual" if only_rank is None else LOOPBACK
        owned = list(range(tp)) if only_rank is None else [only_rank]
        self._owned, self._utilization, self._limit = owned, memory_utilization, memory_limit
        if weights is None:
            self._weights = upload(self.plan, source, tp, range(owned[0], owned[-1] + 1), device, loading)
        else:
            self._weights = [weights(self.plan, source, tp, r) for r in owned]
        self.draft = drafting and CudaDraft(drafting, owned, tp, draft_weights, self._weights, device, self.stream, loading, carry, building, dcp)
        self.counts, self._is_lent = StepCounts(), False   # whether a caller has buffers
        self.memories, self._io, self._accept = [], None, None
        try:
            self.bind_cache(max_model_len)
        except K3Error:
            self._weights = []   # else whoever keeps the error keeps them too
            if self.draft:
                self.draft.close()
            self._unbind()
            raise

    def bind_cache(self, max_model_len: int | None) -> None:
        """Gives every slot room for `max_model_len` tokens; None: for what fits. Sequences and buffers are lost, weights and kernels stay.

        Raises OutOfMemory and ConfigError, as the constructor does.
        """
        check_room(self.cfg, self.num_slots, max_model_len)
        self._unbind()
        self.max_model_len = fitting_length(self.plan, self.num_slots, self.kv_cache_dtype, max_model_len, len(self._owned), self._utilization,
                                            self._limit, self.draft and self.draft.plan)
        slot_pages = slot_pages_of(self.max_model_len, self.draft and self.draft.plan, self.dcp)
        self.num_pages = slot_pages * self.num_slots
        self.memories = [RankMemory(self.plan, self.num_slots, self.num_pages, slot_pages, self.kv_cache_dtype) for _ in self._owned]
        for memory, arrays in zip(self.memories, self._weights):
            memory.weights = arrays
        self._steps = [m.step_struct(r, self.memories, self.ranks == LOOPBACK) for m, r in zip(self.memories, self._owned)]
        self.trace = TraceMemory(self._steps, self.plan) if self.probes.trace else None
        self._page_tables = PageTables(self.memories)
        if self.draft:
            self.draft.bind(self.memories)
            self._accept = CudaAccept(self.draft, self.drafting, self.memories[0], self.device, self.stream, self.counts.reasons)
        self._io = StepIO(self.memories, self.device.arch, self.stream, self.draft.memories[0].buffer("draft_ids").data.ptr if self.draft else 0)
        self._check = RowCheck(self.num_slots, self.max_model_len, self.max_rows)
        if self.name == LATENCY_SPECIALIZED:
            self.step_launches = StepLaunches(self.plan, self.memories, self.device, self._raw_stream, self.kv_cache_dtype, self.ranks, self.probes, self._loading, self.launch_peers)
        cupy.cuda.get_current_stream().synchronize()   # which has cleared all of it; ours does not wait for that one

    @explained()
    def _unbind(self) -> None:
        """Drops all that holds addresses of the cache, and then its memory."""
        self.stream.synchronize()
        self._graphs.clear()
        if self.step_launches is not None:
            self.step_launches.close()
            self.step_launches = None
        if self._io is not None:
            self._io.close()
        if self._accept is not None:
            self._accept.close()
        if self.draft:
            self.draft.unbind()
        self._io, self._accept, self._page_tables, self.memories, self._steps = None, None, None, [], []
        cupy.get_default_memory_pool().free_all_blocks()

    # ---- runtime/backend.py ----

    @property
    def max_logits(self) -> int:
        return self.memories[0].dims["head_rows"]

    @explained()
    def open_slot(self, slot: int, pages) -> None:
        self._after_caller()
        for memory in self.memories:
            memory.clear_slot(slot, self.stream)
        self._page_tables.set(slot, pages, self.stream)
        if self.draft:
            self.draft.open_slot(slot, pages)
        self._check.open(slot)

    @explained()
    def copy_slot(self, source: int, target: int, pages) -> None:
        used = -(-self._check.copy(source, target) // self.page_tokens)
        copied = [(old, new) for old, new in zip(self._page_tables.pages(source, used), pages) if old != new]
        self._after_caller()
        for memory in self.memories:
            memory.copy_slot(source, target, copied, self.stream)
        if self.draft:
            self.draft.copy_slot(source, target, copied, pages)
        self._page_tables.set(target, pages, self.stream)

    @explained()
    def step(self, rows: StepRows) -> None:
        self._check.step(rows)
        self._after_caller()
        self.write(**inputs_of(rows))
        self._run("step", rows)

    def _run(self, what: str, rows: StepRows, half: Half | None = None) -> None:
        """Replays a step or a whole launch in the way that is chosen for it, and counts it."""
        bucket, single = bucket_of(len(rows)), False
        if self.step_launches is not None:
            if reason := self.step_launches.declines(bucket):
                self.counts.reasons[reason] += 1
            single = not reason
        self._advanced = what == "step" and rows.stand and self.advances(bucket) and not single
        self.replay("advance" if self._advanced else what, bucket, half, single)
        self.counts.steps[LATENCY_SPECIALIZED if single else STANDARD] += 1

    @explained()
    def logits(self) -> np.ndarray:
        rows = len(self._check.rows.logit_rows)
        out = np.empty((rows, self.cfg.vocab_size), np.float32)
        part = self.memories[0].buffer("logits")[:rows]
        if rows:
            part.data.copy_to_host_async(out.ctypes.data, out.nbytes, self.stream)
            self.stream.synchronize()
        return out

    @explained()
    def new_logits(self, rows: int) -> cupy.ndarray:
        return cupy.empty((rows, self.cfg.vocab_size), np.float32)

    @explained()
    def copy_logits(self, out: cupy.ndarray) -> None:
        current = cupy.cuda.get_current_stream()
        current.wait_event(self.stream.record())
        out.data.copy_from_device_async(self.memories[0].buffer("logits").data, out.nbytes, current)
        self.stream.wait_event(current.record())

    @explained()
    def buffer(self, name: str, rank: int = 0) -> cupy.ndarray:
        entry = check_buffer(name, rank, len(self.memories))
        targets = [m.target for op in self.plan.ops for m in op.stage.moves if self.ride and m.source == name]
        if targets:
            raise UsageError(f"buffer {name} is not written here: what belongs there goes straight to {targets[0]} of every rank", f"read {targets[0]}")
        self._is_lent = True
        cupy.cuda.get_current_stream().wait_event(self.stream.record())
        array = self.memories[rank].buffer(name)
        return array.view(ml_dtypes.bfloat16) if entry.dtype == "bf16" or (entry.dtype == "kv" and self.kv_cache_dtype == "bf16") else array

    @explained()
    def sample(self, draws: Sequence[Draw]) -> list[Drawn]:
        slots, half = self._check.draws(len(draws)), self._io.next_half()
        refused = self._io.fill_draws(half, draws, slots)
        self._io.sample(half, bucket_of(max(len(draws), 1)))
        return self._pending(half, draws, slots, refused).drawn()

    @explained()
    def commit(self, accepted: np.ndarray) -> None:
        self._check.commit(accepted)
        if not accepted.all():   # `step` takes all of them for accepted
            self.write(row_accepted=accepted)
        if not self._advanced:
            self.replay("commit", bucket_of(len(accepted)))
        if self.draft:
            self.draft.commit(self._check.rows, accepted)

    def propose(self, asks: Sequence[DraftAsk]) -> list[Drafted]:
        found = self.draft.propose(asks)
        self._check.drafted(i for drafted in found for i in drafted.token_ids)
        return found

    def accept(self, judges: Sequence[Judge]) -> list[Judged]:
        self._check.logits(sum(len(j.draws) for j in judges))
        return self._accept.accept(judges)

    @explained()
    def launch(self, rows: StepRows, draws: Sequence[Draw]) -> CudaPending:
        self._check.step(rows)
        self._after_caller()
        slots = self._check.draws(len(draws))
        if -1 in slots:
            raise PlanError("a launch draws two tokens for one slot")
        half = self._io.next_half()
        self._io.set(**inputs_of(rows))
        self._io.fill(half)
        refused = self._io.fill_draws(half, draws, slots)
        self._run("launch", rows, half)
        self._check.commit(accepted := np.ones(len(rows), bool))
        if self.draft:
            self.draft.commit(rows, accepted)
        return self._pending(half, draws, slots, refused)

    def _pending(self, half: Half, draws: Sequence[Draw], slots: list[int], refused: dict[int, str]) -> CudaPending:
        """Tokens under way in `half`; rows that no kernel draws for are drawn here, now."""
        self._io.done(half)
        on_host, logits = {}, self.logits() if refused else None
        for row, draw in ((i, draws[i]) for i in refused):
            if draw.after_sampled:
                draw = draw.following(self._io.slot_token(slots[row]))
            on_host[row] = sample_row(logits[row], draw)
            if slots[row] >= 0:
                self._io.slot_token(slots[row], -1 if on_host[row].token_id is None else on_host[row].token_id)
        self.counts.reasons += Counter(refused.values())
        return CudaPending(half, draws, self.cfg.vocab_size, on_host)

    def close(self) -> None:
        if known_failure():
            return   # the context is gone, and all memory with it
        self._unbind()
        self.close_kernels()
        if self.draft:
            self.draft.close()
        self._weights = []
        cupy.get_default_memory_pool().free_all_blocks()

    def _after_caller(self) -> None:
        """What follows on our stream waits for what the caller's stream does with buffers."""
        if self._is_lent:
            self.stream.wait_event(cupy.cuda.get_current_stream().record())

    def write(self, **values) -> None:
        """Sets input buffers by name; those that stand behind the first of them are loaded too, as they were set last."""
        self._io.write(**values)


def inputs_of(rows: StepRows) -> dict[str, np.ndarray]:
    """Input buffers of a step that takes all its rows for accepted."""
    return {"token_ids": rows.token_ids, "row_slot": rows.slots, "row_position": rows.positions, "logit_rows": rows.logit_rows,
            "row_accepted": np.ones(len(rows), np.uint8)}
