"""The reference decode backend: walks the plan through the NumPy stages, on any number of virtual ranks in one process."""
import os
from types import SimpleNamespace

import ml_dtypes
import numpy as np
from threadpoolctl import ThreadpoolController

from .. import buffers, weights
from ..buffers import BUFFERS, Buffer, buffer_shape, step_dims
from ..config import MAX_ROWS, PAGE_SIZE, K3Config
from ..errors import ConfigError, OutOfMemory
from ..plan import Op, Plan, build_plan
from ..reference import FUNCTIONS
from ..reference.mxfp4 import ExpertMatrix
from ..reference.numerics import CACHE_ROUNDING, Numerics
from ..reference.sample import sample_row
from ..stages import GATHER, STACK
from .backend import StepCounts, StepRows, check_buffer, check_room
from .machine import REFERENCE
from .row_check import PADDING, RowCheck, sequences

NUMPY_DTYPE = {"i32": np.int32, "u8": np.uint8}  # every other dtype is held as F32
# A matrix-vector product with fewer weights than this is done before a second BLAS thread is awake; on a busy machine waiting
# for that thread made a step of `demo` six times slower.
_THREADED_WEIGHTS = 1 << 22


class Model:
    """What a stage sees beside its weights and buffers: the config, the numerics, its rank, and which rows are whose."""

    def __init__(self, cfg: K3Config, num: Numerics, rank: int, tp: int):
        self.cfg, self.num, self.rank, self.tp = cfg, num, rank, tp

    sequences = staticmethod(sequences)


class NumpyBackend:
    """runtime/backend.py on the CPU.

    Args:
        checkpoint: has `cfg` and `rank_slices(weight, layer, tp, rank)` (runtime/tensor_source.py).
        tp: virtual ranks, each holding only its own slices.
        max_batch: slots, 1 to 64.
        max_model_len: tokens a slot can hold; None: what fits half of the free memory, at most the model's own limit.
        activation_dtype: "f32", or "bf16" to round where the release does.
        kv_cache_dtype: "auto" (as the activations), "f32", "bf16" or "fp8_e4m3"; the cache is rounded so, and held as F32.
    Raises:
        ConfigError: the model cannot be cut over `tp` ranks.
        OutOfMemory: the cache does not fit; the message names the longest that would.
    """

    name, ranks, gpu, overlaps = REFERENCE, "virtual", None, False

    def __init__(self, checkpoint, tp: int = 1, *, max_batch: int = 8, max_model_len: int | None = None,
                 activation_dtype: str = "f32", kv_cache_dtype: str = "auto"):
        check_room(checkpoint.cfg, max_batch, max_model_len)
        if kv_cache_dtype not in ("auto", *CACHE_ROUNDING):
            raise ConfigError(f"kv_cache_dtype {kv_cache_dtype!r} is unknown", f"use auto, {', '.join(CACHE_ROUNDING)}")
        self.cfg, self.tp, self.num_slots, self.max_rows = checkpoint.cfg, tp, max_batch, MAX_ROWS
        self.plan: Plan = build_plan(self.cfg, tp)
        self.kv_cache_dtype = activation_dtype if kv_cache_dtype == "auto" else kv_cache_dtype
        self.max_model_len = _fitting_length(self.cfg, max_batch, max_model_len)
        slot_pages = -(-self.max_model_len // PAGE_SIZE)
        self.num_pages = slot_pages * max_batch
        self.dims = step_dims(self.cfg, tp=tp, slots=max_batch, pages=self.num_pages, slot_pages=slot_pages)
        self.max_logits = self.dims["head_rows"]
        num = Numerics(activation_dtype, kv_cache_dtype)
        self.models = [Model(self.cfg, num, r, tp) for r in range(tp)]
        self.arenas = [_arena(self.dims, self.plan.aliases) for _ in range(tp)]
        self._weights = [_load_weights(checkpoint, tp, r) for r in range(tp)]
        largest = max((np.size(x) for layers in self._weights for held in layers.values() for x in held.values()), default=0)
        self._blas_threads = None if largest >= _THREADED_WEIGHTS else 1
        self._blas = ThreadpoolController()
        self._bound: dict[tuple, list] = {}
        self._check = RowCheck(max_batch, self.max_model_len, self.max_rows)
        self.counts = StepCounts()

    def open_slot(self, slot: int, pages) -> None:
        for arena in self.arenas:
            arena["kda_state"][:, slot] = 0
            arena["conv_state"][:, slot] = 0
            arena["page_table"][slot] = -1
            arena["page_table"][slot, :len(pages)] = pages
        self._check.open(slot)

    def copy_slot(self, source: int, target: int, pages) -> None:
        used = -(-self._check.copy(source, target) // PAGE_SIZE)
        for arena in self.arenas:
            for name in ("kda_state", "conv_state"):
                arena[name][:, target] = arena[name][:, source]
            for old, new in zip(arena["page_table"][source, :used], pages):
                if old != new:
                    arena["mla_cache"][:, new] = arena["mla_cache"][:, old]
            arena["page_table"][target] = -1
            arena["page_table"][target, :len(pages)] = pages

    def step(self, rows: StepRows, observe=None) -> None:
        """See Backend.step. `observe(op, arenas)`, for tests and scripts, is called after every operation."""
        self._check.step(rows)
        n, m = len(rows), len(rows.logit_rows)
        self._write(token_ids=rows.token_ids, row_slot=rows.slots, row_position=rows.positions, logit_rows=rows.logit_rows)
        self._run(self.plan.ops, n, m, observe)
        self.counts.steps[self.name] += 1

    def logits(self) -> np.ndarray:
        return self.arenas[0]["logits"][:len(self._check.rows.logit_rows)]

    def new_logits(self, rows: int) -> np.ndarray:
        return np.empty((rows, self.cfg.vocab_size), np.float32)

    def copy_logits(self, out: np.ndarray) -> None:
        out[:] = self.logits()

    def buffer(self, name: str, rank: int = 0) -> np.ndarray:
        check_buffer(name, rank, self.tp)
        return self.arenas[rank][name]

    def sample(self, draws):
        return [sample_row(row, draw) for row, draw in zip(self.logits(), draws, strict=True)]

    def commit(self, accepted: np.ndarray) -> None:
        self._check.commit(accepted)
        self._write(row_accepted=accepted)
        self._run(self.plan.commit, len(accepted), 0, None)

    def close(self) -> None:
        self.arenas, self._weights, self._bound = [], [], {}

    def _write(self, **values) -> None:
        for arena in self.arenas:
            for name, array in values.items():
                arena[name][:] = PADDING[name]
                arena[name][:len(array)] = array

    def _run(self, ops: tuple[Op, ...], n: int, m: int, observe) -> None:
        key = (ops is self.plan.commit, n, m)
        if key not in self._bound:
            self._bound[key] = [[self._bind(op, r, n, m) for r in range(self.tp)] for op in ops]
        # Padding rows hold anything, and a NaN row must stay one row's trouble.
        with np.errstate(all="ignore"), self._blas.limit(limits=self._blas_threads, user_api="blas"):
            for op, calls in zip(ops, self._bound[key]):
                if op.stage.moves:
                    _exchange(op, [c.b for c in calls])
                else:
                    for c in calls:
                        c.stage(c.m, c.w, c.b, op)
                if observe:
                    observe(op, self.arenas)

    def _bind(self, op: Op, rank: int, n: int, m: int) -> SimpleNamespace:
        """The stage with exactly the weights and buffers it declares: anything else is an AttributeError, a read is read-only."""
        b = SimpleNamespace()
        for name in op.stage.inputs + op.stage.outputs:
            view = _rows_view(buffers.BY_NAME[name], self.arenas[rank][name], op, n, m)
            view.flags.writeable = name in op.stage.outputs
            setattr(b, name, view)
        held = self._weights[rank][op.layer]
        w = SimpleNamespace(**{name: held[name] for name in op.stage.weights})
        return SimpleNamespace(stage=FUNCTIONS.get(op.stage.name), m=self.models[rank], w=w, b=b)


def _rows_view(buffer: Buffer, whole: np.ndarray, op: Op, n: int, m: int) -> np.ndarray:
    names = buffer.shape
    if buffer.is_layered:
        whole, names = whole[op.kind_index], names[1:]
    index = tuple(slice(n) if s == "rows" else slice(m) if s == "head_rows" else slice(None) for s in names)
    return whole[index]


def _arena(dims: dict[str, int], aliases: dict[str, str]) -> dict[str, np.ndarray]:
    """One array a buffer. Undefined contents are NaN or a wild index, so that reading them shows."""
    arena = {}
    for b in BUFFERS:
        if b.name in aliases:
            continue
        dtype = NUMPY_DTYPE.get(b.dtype, np.float32)
        arena[b.name] = np.zeros(buffer_shape(b, dims), dtype)  # zero pages cost nothing until touched
        if b.life in ("step", "record"):
            arena[b.name][...] = np.nan if dtype is np.float32 else np.iinfo(dtype).max
    for target, source in aliases.items():
        arena[target] = arena[source].reshape(buffer_shape(buffers.BY_NAME[target], dims))
    return arena


def _load_weights(checkpoint, tp: int, rank: int) -> dict:
    """layer (None: outside the layers) -> name -> F32 array, or ExpertMatrix for an MXFP4 pair."""
    held = {}
    for layer in (None, *range(checkpoint.cfg.num_hidden_layers)):
        raw = {w.name: checkpoint.rank_slices(w, layer, tp, rank) for w in weights.layer_weights(checkpoint.cfg, layer)}
        held[layer] = {name: x.astype(np.float32) if x.dtype == ml_dtypes.bfloat16 else np.ascontiguousarray(x) for name, x in raw.items()}
        for w in weights.layer_weights(checkpoint.cfg, layer):
            if w.mxfp4 == "packed":
                held[layer][w.name] = ExpertMatrix(raw[w.name], raw[w.name + "_scale"])
    return held


def _exchange(op: Op, ranks: list[SimpleNamespace]) -> None:
    """Moves every rank's source to every rank's target; adds nothing."""
    for move in op.stage.moves:
        axis = buffers.BY_NAME[move.source].cut
        for r, sender in enumerate(ranks):
            part = getattr(sender, move.source)
            for receiver_rank, receiver in enumerate(ranks):
                target = getattr(receiver, move.target)
                if move.how == GATHER:
                    size = part.shape[axis]
                    target[(slice(None),) * axis + (slice(r * size, (r + 1) * size),)] = part
                elif move.how == STACK:
                    target[r] = part
                else:
                    size = target.shape[-1]
                    target[r] = part[..., receiver_rank * size:(receiver_rank + 1) * size]


def _fitting_length(cfg: K3Config, slots: int, asked: int | None) -> int:
    """Tokens a slot can hold. The cache is F32 and may take half of the memory that is free now."""
    dims = cfg.dims()
    token_bytes = dims["num_mla_layers"] * dims["mla_cache_dim"] * 4 * slots
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    fits = cfg.max_position_embeddings
    if token_bytes:
        fits = min(fits, free // 2 // token_bytes // PAGE_SIZE * PAGE_SIZE)  # pages are whole
    if asked is None:
        asked = fits
    if asked > fits or fits < 1:
        raise OutOfMemory(f"a cache of {slots} x {asked} tokens needs {asked * token_bytes / 1e9:.1f} GB of the {free / 1e9:.1f} GB free",
                          f"use a max_model_len of at most {fits}, or a smaller max_batch")
    return asked
