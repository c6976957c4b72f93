"""Walks operations through the NumPy stages on any number of virtual ranks: what the target's step and a draft's have in common."""
from types import SimpleNamespace

import ml_dtypes
import numpy as np
from threadpoolctl import ThreadpoolController

from ..buffers import Buffer, buffer_shape
from ..plan import Op
from ..reference import FUNCTIONS
from ..reference.numerics import Numerics
from ..stages import GATHER, SCATTER
from .collectives import Collectives, VirtualRanks
from .row_check import PADDING, sequences

NUMPY_DTYPE = {"i32": np.int32, "u8": np.uint8}  # every other dtype is held as F32
# A matrix-vector product with fewer weights than this is done before a second BLAS thread is awake; on a busy machine waiting
# for that thread made a step of `tiny-random` six times slower.
_THREADED_WEIGHTS = 1 << 22


class Model:
    """What a stage sees beside its weights and buffers: the config, the numerics, its rank, its place among the `dcp` ranks that hold one MLA
    cache, and which rows are whose."""

    def __init__(self, cfg, num: Numerics, rank: int, tp: int, dcp: int = 1):
        self.cfg, self.num, self.rank, self.tp, self.dcp, self.place = cfg, num, rank, tp, dcp, rank % dcp

    sequences = staticmethod(sequences)


class NumpyProgram:
    """Arenas, weights and bound stages of one set of tables.

    Args:
        cfg: of the model whose stages run, a K3Config or a DraftConfig.
        table: its buffers by name.
        dims: every size that they name.
        aliases: of the plan.
        held: for each rank of this process layer (None: outside the layers) -> weight's name -> array.
        shared: for each of them arrays that another program owns, by buffer name.
        collectives: which ranks these are, and what carries parts between them; None: all there are.
    """

    def __init__(self, cfg, num: Numerics, table: dict[str, Buffer], dims: dict[str, int], aliases: dict[str, str], held: list[dict], shared=(),
                 collectives: Collectives | None = None):
        self.table, self.dims, self.weights = table, dims, held
        self.collectives = collectives or VirtualRanks(len(held))
        self._group = dims.get("group", 0)   # a draft has none
        self.models = [Model(cfg, num, r, self.collectives.tp, self._group or 1) for r in self.collectives.ranks]
        self.arenas = [_arena(table, dims, aliases, shared[r] if shared else {}) for r in range(len(held))]
        largest = max((np.size(x) for layers in held for names in layers.values() for x in names.values()), default=0)
        self._blas_threads = None if largest >= _THREADED_WEIGHTS else 1
        self._blas = ThreadpoolController()
        self._bound: dict[tuple, list] = {}

    def write(self, **values) -> None:
        """Fills input buffers of every rank; what is behind the given rows is padding."""
        for arena in self.arenas:
            for name, array in values.items():
                arena[name][:] = PADDING.get(name, 0)
                arena[name][:len(array)] = array

    def run(self, ops: tuple[Op, ...], counts: dict[str, int], observe=None) -> None:
        """Runs `ops`; `counts` says how much of a size that belongs to the step ("rows", "head_rows", "seqs") this one has.

        `observe(op, arenas)`, for tests and scripts, is called after every operation.
        """
        key = (id(ops), *counts.values())
        if key not in self._bound:
            self._bound[key] = [[self.bind(op, r, counts) for r in range(len(self.arenas))] for op in ops]
        # Padding rows hold anything, and a NaN row must stay one row's trouble.
        with np.errstate(all="ignore"), self._blas.limit(limits=self._blas_threads, user_api="blas"):
            for op, calls in zip(ops, self._bound[key]):
                if op.stage.moves:
                    self._exchange(op, [c.b for c in calls])
                else:
                    for c in calls:
                        c.stage(c.m, c.w, c.b, op)
                if observe:
                    observe(op, self.arenas)

    def bind(self, op: Op, rank: int, counts: dict[str, int]) -> SimpleNamespace:
        """The stage with exactly the weights and buffers it declares: anything else is an AttributeError, a read is read-only."""
        b = SimpleNamespace()
        for name in op.stage.inputs + op.stage.outputs:
            view = _rows_view(self.table[name], self.arenas[rank][name], op, counts)
            view.flags.writeable = name in op.stage.outputs
            setattr(b, name, view)
        names = self.weights[rank][op.layer]
        w = SimpleNamespace(**{name: names[name] for name in op.stage.weights})
        return SimpleNamespace(stage=FUNCTIONS.get(op.stage.name), m=self.models[rank], w=w, b=b)

    def close(self) -> None:
        self.arenas, self.weights, self._bound = [], [], {}

    def _exchange(self, op: Op, ranks: list[SimpleNamespace]) -> None:
        """Moves every rank's source to every rank's target; adds nothing."""
        for move in op.stage.moves:
            source = self.table[move.source]
            axis = source.cut - source.is_layered if source.cut is not None else None
            carry = self.collectives.scatter if move.how == SCATTER else self.collectives.gather
            sources = [getattr(b, move.source) for b in ranks]
            if move.how == SCATTER:   # a row's values side by side
                sources = [s.reshape(len(s), -1) for s in sources]
            for b, parts in zip(ranks, carry(sources, self._group if move.in_group else self.collectives.tp)):
                target = getattr(b, move.target)
                for r, part in enumerate(parts):
                    if move.how == GATHER:
                        size = part.shape[axis]
                        target[(slice(None),) * axis + (slice(r * size, (r + 1) * size),)] = part
                    else:
                        target[r] = part.reshape(target[r].shape)


def widened(raw: np.ndarray) -> np.ndarray:
    """A stored tensor as the stages get it: BF16 as F32."""
    return raw.astype(np.float32) if raw.dtype == ml_dtypes.bfloat16 else np.ascontiguousarray(raw)


def _rows_view(buffer: Buffer, whole: np.ndarray, op: Op, counts: dict[str, int]) -> np.ndarray:
    names = buffer.shape
    if buffer.is_layered:
        whole, names = whole[op.kind_index], names[1:]
    return whole[tuple(slice(counts.get(name)) for name in names)]


def _arena(table: dict[str, Buffer], dims: dict[str, int], aliases: dict[str, str], shared: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """One array a buffer. Undefined contents are NaN or a wild index, so that reading them shows."""
    arena = dict(shared)
    for b in table.values():
        if b.name in aliases or b.name in shared:
            continue
        dtype = NUMPY_DTYPE.get(b.dtype, np.float32)
        arena[b.name] = np.zeros(buffer_shape(b, dims), dtype)  # zero pages cost nothing until touched
        if b.life in ("step", "record"):
            arena[b.name][...] = np.nan if dtype is np.float32 else np.iinfo(dtype).max
    for target, source in aliases.items():
        if target in table:
            arena[target] = arena[source].reshape(buffer_shape(table[target], dims))
    return arena
