"""A draft model on a GPU, beside the memory of its target: context rows of committed rows, and blocks of drafts. A graph for each of both."""
import cupy
import numpy as np

from ..buffers import DTYPE_BYTES, buffer_shape
from ..config import DECODE_ROWS
from ..draft_plan import DraftPlan, build_draft_plan
from ..draft_weights import BY_NAME as WEIGHT
from ..draft_weights import is_shared
from ..emit import launches_of
from ..plan import Op
from .backend import DraftAsk, Drafted, StepRows
from .cuda_kernels import BucketKernels, compile_bucket
from .cuda_memory import VIEW_DTYPES, RankMemory
from .cuda_weights import op_arrays
from .drafting import Drafting
from .row_check import PADDING

BUCKETS = (1, 2, 4, 8, 16, 32, DECODE_ROWS)   # rows of a context slice or of all blocks; a step runs in the smallest that holds them


class HostCopy:
    """Pinned memory that mirrors what the host writes at the start of an arena. It is refilled only once the copies before it have been made."""

    def __init__(self, memory: RankMemory):
        t = memory.tables
        self._spans = {}
        for name, b in t.arena.items():
            if b.life == "input":
                start, shape = memory.offsets[name], buffer_shape(b, t.dims)
                self._spans[name] = start, start + int(np.prod(shape)) * DTYPE_BYTES[b.dtype], VIEW_DTYPES[b.dtype]
        self.nbytes = max(end for _, end, _ in self._spans.values())
        self._pinned = cupy.cuda.alloc_pinned_memory(self.nbytes)
        self._whole = np.frombuffer(self._pinned, np.uint8, self.nbytes)
        self._copied = cupy.cuda.Event(disable_timing=True)

    def send(self, memories: list[RankMemory], stream, **values) -> None:
        """Input buffers by name, padded, to every rank; the others hold what they held last."""
        self._copied.synchronize()
        for name, array in values.items():
            start, end, dtype = self._spans[name]
            flat, array = self._whole[start:end].view(dtype), np.asarray(array).reshape(-1)
            flat[:len(array)] = array
            flat[len(array):] = PADDING.get(name, 0)
        for m in memories:
            m.arena.data.copy_from_host_async(self._whole.ctypes.data, self.nbytes, stream)
        self._copied.record(stream)


class CudaDraft:
    """runtime/numpy_draft.py on a GPU.

    Args:
        drafting: the draft and how it is used.
        targets: memory of the target's ranks on this GPU, with their weights; pages and taps are lent by it.
        ranks: which ones they are, of `tp`.
        device: `cuda_driver.Device`. stream: of the target's backend; all that is done here is done in its order.
    """

    def __init__(self, drafting: Drafting, targets: list[RankMemory], ranks: list[int], tp: int, device, stream):
        self.cfg, self.num_drafts, self.device, self.stream, self._ranks = drafting.source.cfg, drafting.num_drafts, device, stream, ranks
        self.plan: DraftPlan = build_draft_plan(self.cfg, tp, drafting.num_drafts, drafting.block_rows)
        sizes = [targets[0].dims[name] for name in ("slots", "pages", "slot_pages")]
        self.memories = [RankMemory(self.plan, *sizes, "bf16", {name: target.buffer(name) for name in ("page_table", "taps")}) for target in targets]
        for memory, target, rank in zip(self.memories, targets, ranks):
            memory.weights = self._upload(drafting.source, target, tp, rank)
        looped = len(ranks) < tp
        self._steps = [m.step_struct(r, self.memories, looped) for m, r in zip(self.memories, ranks)]
        self._raw_stream = stream.__cuda_stream__()[1]
        self._inputs = HostCopy(self.memories[0])
        self._kernels: dict[int, BucketKernels] = {}
        self._graphs: dict[tuple, object] = {}
        self.places: dict[int, int] = {}   # slot -> its place among the sequences of the last proposal
        cupy.cuda.get_current_stream().synchronize()   # which has cleared and filled all of it; ours does not wait for that one

    def commit(self, rows: StepRows, accepted: np.ndarray) -> None:
        """Context rows of the accepted rows of the target's last step; positions behind the draft's own limit get none."""
        inside = accepted & (rows.positions < self.cfg.max_position_embeddings)
        for first in range(0, len(rows), DECODE_ROWS):
            part = slice(first, first + DECODE_ROWS)
            slots = rows.slots[part]
            self._inputs.send(self.memories, self.stream, row_slot=slots, row_position=rows.positions[part], row_accepted=inside[part])
            self._replay(self.plan.context, len(slots), first)

    def propose(self, asks: list[DraftAsk]) -> list[Drafted]:
        """`num_drafts` tokens for each sequence, fewer where the draft's logits are not finite. Waits for them."""
        seqs, k, r = len(asks), self.num_drafts, self.plan.block_rows
        ids = np.full((seqs, r), self.cfg.mask_token_id, np.int32)
        ids[:, 0] = [a.anchor for a in asks]
        positions = np.arange(r, dtype=np.int32) + np.array([[a.position] for a in asks], np.int32)
        wanted = np.arange(seqs)[:, None] * r + self.cfg.first_row + np.arange(k)
        seeds = np.array([(a.seed & 0xFFFFFFFF, a.seed >> 32) for a in asks], np.uint32).view(np.int32)
        self._inputs.send(self.memories, self.stream, token_ids=ids, row_slot=np.repeat([a.slot for a in asks], r), row_position=positions,
                          row_last=np.repeat(positions[:, -1], r), logit_rows=wanted, seq_seed=seeds, seq_temperature=[a.temperature for a in asks])
        self._replay(self.plan.ops, seqs * r, 0)
        self.places = {a.slot: s for s, a in enumerate(asks)}
        found = self.memories[0].buffer("draft_ids").get(stream=self.stream)[:, :seqs].T
        sure = self.memories[0].buffer("draft_confidence").get(stream=self.stream)[:, :seqs].T if self.cfg.confidence_head else None
        out = []
        for s, tokens in enumerate(found):
            count = k if (tokens >= 0).all() else int((tokens >= 0).argmin())
            out.append(Drafted(tuple(tokens[:count].tolist()), None if sure is None else tuple(sure[s, :count].tolist())))
        return out

    def close(self) -> None:
        self._graphs.clear()
        for kernels in self._kernels.values():
            kernels.close()
        self._kernels.clear()
        self.memories = []

    def _upload(self, source, target: RankMemory, tp: int, rank: int) -> dict:
        """(layer, stage) -> packed arrays on the device; what the draft has not is its target's array."""
        held = {}
        for op in self.plan.context + self.plan.ops:
            if any(is_shared(WEIGHT[name], self.cfg) for name in op.stage.weights):
                held[op.layer, op.stage.name] = target.weights[None, op.stage.name]
            elif (op.layer, op.stage.name) not in held:
                t = self.memories[0].tables
                arrays = op_arrays(op, self.cfg, tp, lambda name: source.rank_slices(WEIGHT[name], op.layer, tp, rank), t.packed, t.weights)
                held[op.layer, op.stage.name] = [cupy.asarray(np.ascontiguousarray(a).view(np.uint8).reshape(-1)) for a in arrays]
        return held

    # ---- kernels and graphs ----

    def kernels(self, rows: int) -> BucketKernels:
        if rows not in self._kernels:
            self._kernels[rows] = BucketKernels(self.plan, rows, compile_bucket(self.plan, rows, "bf16", self.device.arch, sms=self.device.sms))
        return self._kernels[rows]

    def launches(self, ops: tuple[Op, ...], rows: int, first: int) -> list:
        """Of every operation, rank after rank for each kernel; each may begin under the one before it. `first`: taps of the step's rows from there on."""
        kernels, out = self.kernels(rows), []
        for op in ops:
            for name, _ in launches_of(op.stage, self.plan, rows, True):
                for memory, step in zip(self.memories, self._steps):
                    out.append(kernels.launch(name, step, memory.op_struct(op, first), self._raw_stream, dependent=bool(out)))
        return out

    def _replay(self, ops: tuple[Op, ...], rows: int, first: int) -> None:
        bucket = next(b for b in BUCKETS if b >= rows)
        key = (ops is self.plan.context, bucket, first)
        if key not in self._graphs:
            launches = self.launches(ops, bucket, first)
            with self.stream:
                self.stream.begin_capture()
                for launch in launches:
                    launch.launch()
                self._graphs[key] = self.stream.end_capture(), launches
        self._graphs[key][0].launch(self.stream)
