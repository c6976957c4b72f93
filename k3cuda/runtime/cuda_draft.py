"""A draft model on a GPU, beside the memory of its target: context rows of committed rows, and blocks of drafts. A graph for each of both."""
from contextlib import nullcontext
from typing import Callable

import cupy
import numpy as np

from ..buffers import DTYPE_BYTES, buffer_shape
from ..config import DECODE_ROWS
from ..draft_plan import DraftPlan, build_draft_plan
from ..emit import launches_of
from ..plan import Op
from .backend import AS_DRAFTED, DraftAsk, Drafted, StepRows
from .cuda_driver import explained
from .cuda_kernels import BucketKernels, bucket_of, compile_bucket
from .cuda_memory import VIEW_DTYPES, PageTables, RankMemory
from .drafting import Drafting
from .loading import Loading
from .row_check import PADDING

_TURNS = 8   # copies on their way: a wide step is four slices of context rows


class HostCopy:
    """Pinned memory that mirrors what the host writes at the start of an arena; several copies may be on their way."""

    def __init__(self, memory: RankMemory):
        t = memory.tables
        self._spans = {}
        for name, b in t.arena.items():
            if b.life == "input":
                start, shape = memory.offsets[name], buffer_shape(b, t.dims)
                self._spans[name] = start, start + int(np.prod(shape)) * DTYPE_BYTES[b.dtype], VIEW_DTYPES[b.dtype]
        self.nbytes = max(end for _, end, _ in self._spans.values())
        self._whole = np.zeros(self.nbytes, np.uint8)
        self._pinned = [cupy.cuda.alloc_pinned_memory(self.nbytes) for _ in range(_TURNS)]
        self._turns = [(np.frombuffer(p, np.uint8, self.nbytes), cupy.cuda.Event(disable_timing=True)) for p in self._pinned]
        self._turn = 0

    def send(self, memories: list[RankMemory], stream, **values) -> None:
        """Input buffers by name, padded, to every rank; the others hold what they held last."""
        for name, array in values.items():
            start, end, dtype = self._spans[name]
            flat, array = self._whole[start:end].view(dtype), np.asarray(array).reshape(-1)
            flat[:len(array)] = array
            flat[len(array):] = PADDING.get(name, 0)
        pinned, copied = self._turns[self._turn]
        self._turn = (self._turn + 1) % _TURNS
        copied.synchronize()   # of so many turns ago
        pinned[:] = self._whole
        for m in memories:
            m.arena.data.copy_from_host_async(pinned.ctypes.data, self.nbytes, stream)
        copied.record(stream)


class CudaDraft:
    """runtime/numpy_draft.py on a GPU. All that is done here is done in the order of the target's stream.

    Args:
        drafting: the draft and how it is used.
        ranks: those on this GPU, of `tp`. make: (plan, source, tp, rank, the target's arrays of that rank) -> (layer, stage) -> packed arrays.
        target_weights: for each of `ranks` what its target has: (layer, stage) -> packed arrays.
        device: `cuda_driver.Device`. stream: of the target's backend. loading: counts the seconds of compiling and capturing.
        carry: (operation, memory, rows) -> what is launched in the place of a collective; None: collectives ride. building: a context around compiling.
        dcp: ranks that hold a page of the target's cache together; of the draft's every rank holds all of it.

    Attributes:
        block: operations of a proposal.
        places: slot -> its place among the sequences of the last proposal.
    """

    def __init__(self, drafting: Drafting, ranks: list[int], tp: int, make, target_weights: list[dict], device, stream, loading: Loading,
                 carry: Callable | None = None, building=nullcontext, dcp: int = 1):
        self.cfg, self.num_drafts, self.device, self.stream, self._ranks, self._tp = drafting.source.cfg, drafting.num_drafts, device, stream, ranks, tp
        self._dcp, self._page_tables = dcp, None
        self.plan: DraftPlan = build_draft_plan(self.cfg, tp, drafting.num_drafts, drafting.block_rows)
        # How sure it is matters to a threshold alone.
        self._sure = self.cfg.confidence_head and drafting.confidence_threshold is not None
        self.block = tuple(op for op in self.plan.ops if self._sure or "draft_confidence" not in op.stage.outputs)
        self._weights = [make(self.plan, drafting.source, tp, rank, target) for rank, target in zip(ranks, target_weights)]
        self._raw_stream, self._loading, self._carry, self._building = stream.__cuda_stream__()[1], loading, carry, building
        self._kernels: dict[int, BucketKernels] = {}
        self._graphs: dict[tuple, object] = {}
        self.memories: list[RankMemory] = []
        self.places: dict[int, int] = {}

    def bind(self, targets: list[RankMemory]) -> None:
        """Takes memory beside that of the target's ranks, which lend their taps, and their pages where these are whole. What it held before is lost."""
        self.unbind()
        dims = targets[0].dims
        slots, pages, slot_pages = dims["slots"], dims["pages"] * self._dcp, dims["slot_pages"] * self._dcp
        for target in targets:
            table = target.buffer("page_table") if self._dcp == 1 else cupy.zeros(4 * slots * slot_pages, cupy.uint8)
            self.memories.append(RankMemory(self.plan, slots, pages, slot_pages, "bf16", {"page_table": table, "taps": target.buffer("taps")}))
        self._page_tables = PageTables(self.memories) if self._dcp > 1 else None
        for memory, arrays in zip(self.memories, self._weights):
            memory.weights = arrays
        looped = len(self._ranks) < self._tp and self._carry is None
        self._steps = [m.step_struct(r, self.memories, looped) for m, r in zip(self.memories, self._ranks)]
        self._inputs = HostCopy(self.memories[0])
        cupy.cuda.get_current_stream().synchronize()   # which has cleared all of it; ours does not wait for that one

    def unbind(self) -> None:
        """Drops all that holds addresses of the target's memory, and its own."""
        self._graphs.clear()
        self.memories, self._steps, self._inputs, self._page_tables, self.places = [], [], None, None, {}

    def open_slot(self, slot: int, pages) -> None:
        """Context rows of `slot` lie in the target's `pages`."""
        if self._page_tables:
            self._page_tables.set(slot, self._own_pages(pages), self.stream)

    def copy_slot(self, source: int, target: int, copied: list[tuple[int, int]], pages) -> None:
        """Copies pages (from, to) of the target's with their context rows; those of `target` lie in `pages` then."""
        old, new = (self._own_pages(side) for side in zip(*copied)) if copied else ((), ())
        for memory in self.memories:
            memory.copy_slot(source, target, list(zip(old, new)), self.stream)
        self.open_slot(target, pages)

    def _own_pages(self, pages) -> list[int]:
        """Pages of this cache, each of PAGE_SIZE positions, that the target's stand for."""
        return [page * self._dcp + part for page in pages for part in range(self._dcp)]

    def commit(self, rows: StepRows, accepted: np.ndarray) -> None:
        """Context rows of the accepted rows of the target's last step; positions behind the draft's own limit get none."""
        inside = accepted & (rows.positions < self.cfg.max_position_embeddings)
        for first in range(0, len(rows), DECODE_ROWS):
            part = slice(first, first + DECODE_ROWS)
            slots = rows.slots[part]
            self._inputs.send(self.memories, self.stream, row_slot=slots, row_position=rows.positions[part], row_accepted=inside[part])
            self.graph(self.plan.context, len(slots), first).launch(self.stream)

    @explained()
    def propose(self, asks: list[DraftAsk]) -> list[Drafted]:
        """`num_drafts` tokens for each sequence. Where nobody reads any of them they are "as drafted" and nothing is waited for; else fewer where
        the draft's logits are not finite."""
        seqs, k, r = len(asks), self.num_drafts, self.plan.block_rows
        ids = np.full((seqs, r), self.cfg.mask_token_id, np.int32)
        ids[:, 0] = [a.anchor for a in asks]
        positions = np.arange(r, dtype=np.int32) + np.array([[a.position] for a in asks], np.int32)
        wanted = np.arange(seqs)[:, None] * r + self.cfg.first_row + np.arange(k)
        seeds = np.array([(a.seed & 0xFFFFFFFF, a.seed >> 32) for a in asks], np.uint32).view(np.int32)
        self._inputs.send(self.memories, self.stream, token_ids=ids, row_slot=np.repeat([a.slot for a in asks], r), row_position=positions,
                          row_last=np.repeat(positions[:, -1], r), logit_rows=wanted, seq_seed=seeds, seq_temperature=[a.temperature for a in asks])
        self.graph(self.block, seqs * r).launch(self.stream)
        self.places = {a.slot: s for s, a in enumerate(asks)}
        if not any(a.is_read for a in asks):
            stride = self.memories[0].dims["seqs"]
            return [Drafted(tuple(AS_DRAFTED - (i * stride + s) for i in range(k))) for s in range(seqs)]
        found = self.ids()[:, :seqs].T
        sure = self.memories[0].buffer("draft_confidence").get(stream=self.stream)[:, :seqs].T if self._sure else None
        out = []
        for s, tokens in enumerate(found):
            count = k if (tokens >= 0).all() else int((tokens >= 0).argmin())
            out.append(Drafted(tuple(tokens[:count].tolist()), None if sure is None else tuple(sure[s, :count].tolist())))
        return out

    def ids(self) -> np.ndarray:
        """int32 [num_drafts, sequences] of the last proposal. Waits for them."""
        return self.memories[0].buffer("draft_ids").get(stream=self.stream)

    def close(self) -> None:
        self.unbind()
        for kernels in self._kernels.values():
            kernels.close()
        self._kernels.clear()
        self._weights = []

    # ---- kernels and graphs ----

    def kernels(self, rows: int) -> BucketKernels:
        if rows not in self._kernels:
            with self._building(), self._loading.phase("compile"):
                compiled = compile_bucket(self.plan, rows, "bf16", self.device.arch, sms=self.device.sms, ride=self._carry is None)
            self._kernels[rows] = BucketKernels(self.plan, rows, compiled, self._carry is None)
        return self._kernels[rows]

    def launches(self, ops: tuple[Op, ...], rows: int, first: int) -> list:
        """Of every operation, rank after rank for each kernel; each may begin under the one before it, if that cannot be a carrier's. `first`: taps of
        the step's rows from there on."""
        kernels, rides, out = self.kernels(rows), self._carry is None, []
        for op in ops:
            if op.stage.moves and not rides:
                out += self._carry(op, self.memories[0], rows)
                continue
            for name, _ in launches_of(op.stage, self.plan, rows, rides):
                for memory, step in zip(self.memories, self._steps):
                    out.append(kernels.launch(name, step, memory.op_struct(op, first), self._raw_stream, dependent=bool(out) and rides))
        return out

    def graph(self, ops: tuple[Op, ...], rows: int, first: int = 0):
        """Of `launches` in the smallest bucket that holds `rows`; captured at its first use."""
        bucket = bucket_of(rows)
        key = (ops is self.plan.context, bucket, first)
        if key not in self._graphs:
            launches = self.launches(ops, bucket, first)
            with self._loading.phase("capture"), self.stream:
                self.stream.begin_capture()
                for launch in launches:
                    launch.launch()
                self._graphs[key] = self.stream.end_capture(), launches
        return self._graphs[key][0]
