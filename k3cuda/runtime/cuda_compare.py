"""Operations of a CudaBackend that runs one rank looped back, each against the reference function of its stage.

Inputs are what the kernels find in device memory, so every stage is judged alone. Where a collective rides on the stores of the stage
before it, that stage's part must lie in every rank's place of the target, and counts as the collective's.
"""
from dataclasses import dataclass, field
from types import SimpleNamespace

import ml_dtypes
import numpy as np

from ..buffers import BY_NAME, ROW_AXES
from ..cache_layout import in_order
from ..emit import sums_ranks
from ..plan import Op, instance
from ..reference import FUNCTIONS
from ..reference.numerics import Numerics
from ..stages import GATHER, STACK, Move, Stage
from .cuda_kernels import bucket_of
from .cuda_unpack import Unpacked
from .numpy_program import Model
from .stage_limits import allowed

HOST_DTYPE = {"bf16": ml_dtypes.bfloat16, "f32": np.float32, "i32": np.int32, "u8": np.uint8}
TIE = 2**-20   # biased scores closer than this differ by the sigmoid's last bits only


def launch_groups(be, what: str, bucket: int, overlap: bool = True) -> list[tuple[tuple[Op, ...], list]]:
    """[(operations, their launches)] of a step or a commit; a commit is one launch for all its operations."""
    return [(be.plan.commit if what == "commit" else (op,), launches) for op, launches in be.launches(what, bucket, overlap)]


@dataclass
class Found:
    """Of one stage: what is wrong, and the largest part of an allowed error that was used, by buffer."""

    problems: list[str] = field(default_factory=list)
    used: dict[str, float] = field(default_factory=dict)


class Compare:
    """Compares operations.

    Args:
        be: a CudaBackend with one rank in memory.
        pages: how many pages of the MLA cache are copied to the host, from the first; None: all.
        compared_pages: which of them an operation that writes the cache is judged by; None: all.
        weights: of the backend, from an earlier comparison.
    """

    def __init__(self, be, pages: int | None = None, compared_pages=None, weights: Unpacked | None = None):
        assert len(be.memories) == 1 and be.tp > 1, "one rank of several"
        self.be, self.memory, self.weights = be, be.memories[0], weights or Unpacked(be)
        self.pages, self.compared_pages = pages, slice(None) if compared_pages is None else compared_pages
        self._moves = [(s, m) for s in dict.fromkeys(op.stage for op in be.plan.ops) for m in s.moves]   # those of other stages carry nothing
        self.model = Model(be.cfg, Numerics("f32", be.kv_cache_dtype), be._steps[0].rank, be.tp)

    def summed(self, rows: int) -> dict[str, Move]:
        """Target -> the move that sums the ranks' parts in place, in a step of `rows` rows."""
        return {m.target: m for _, m in self._moves if m.how == STACK and sums_ranks(self.be.plan, bucket_of(rows), self.be.ride)}

    def rides(self, rows: int) -> dict[str, tuple[Stage, Move]]:
        """Source -> the move that rides on the stores of who makes it, and its stage."""
        summed = self.summed(rows)
        return {m.source: (s, m) for s, m in self._moves if m.target not in summed and not m.in_group} if self.be.ride else {}

    def outputs(self, stage: Stage, rows: int) -> list[str]:
        """What the stage's launches write: a collective nothing that has come by riding."""
        came = {m.target for m in stage.moves if m.source in self.rides(rows)}
        return [name for name in stage.outputs if name not in came]

    def bind(self, op: Op, rows: int) -> SimpleNamespace:
        """Host copies of everything an operation declares, as the reference takes them; make them before its launch."""
        found = SimpleNamespace(**{name: self._found(name, op, rows) for name in op.stage.inputs + op.stage.outputs})
        if op.stage.name == "embed" and self.be.ranks == "loopback":   # as the kernel: the row of this rank that stands where the token's does in its owner's part
            own = self.be.cfg.vocab_size // self.be.tp
            found.token_ids = self.be._steps[0].rank * own + found.token_ids % own
        return found

    def _found(self, name, op, rows):
        """What the reference finds under the name: of parts that are summed in place their sum, and nothing from the other ranks."""
        if name not in self.summed(rows):
            return self.host(name, op, rows)
        total = self.host(self.summed(rows)[name].source, op, rows)
        return np.stack([total] + [np.zeros_like(total)] * (self.be.tp - 1))

    def compare(self, op: Op, b: SimpleNamespace, rows: int, all_found: dict[str, Found]) -> None:
        """Runs the reference on `b` and notes where the device's outputs differ from it by more than stage_limits.py allows."""
        rides, summed, names = self.rides(rows), self.summed(rows), self.outputs(op.stage, rows)
        if op.stage.moves:
            want = {self.stored(m.target, rows): getattr(b, m.source) * self.be.tp if m.target in summed else self._looped_back(m, getattr(b, m.source))
                    for m in op.stage.moves if m.target in names}
        else:
            with np.errstate(all="ignore"):   # padding rows hold anything
                FUNCTIONS[op.stage.name](self.model, self.weights.of(op), b, op)
            want = {self.stored(name, rows): self._looped_back(rides[name][1], x) if name in rides else x for name, x in vars(b).items()}
        undecided = np.zeros(rows, bool)
        for name in names:
            found = all_found.setdefault(rides[name][0].name if name in rides else op.stage.name, Found())
            at = self.stored(name, rows)
            got, expected = self._live(at, self.host(at, op, rows), op, rows), self._live(at, want[at], op, rows)
            if name == "expert_ids":
                undecided = (got != expected).any(-1)
                error = self._other_choice(op, b, got, expected)
            elif op.stage.moves or got.dtype.kind in "iu":
                error = "" if got.tobytes() == expected.tobytes() else "is not what was sent"
            else:
                if name == "expert_weights":
                    got, expected = got[~undecided], expected[~undecided]
                error = self._error(op, name, got, expected, found)
            if error:
                found.problems.append(f"{op}: {at} {error}")

    def stored(self, name: str, rows: int) -> str:
        """Where it lies in a step of `rows` rows: what a collective would move is not written if it rides, what is summed in place is its source."""
        rides, summed = self.rides(rows), self.summed(rows)
        return rides[name][1].target if name in rides else summed[name].source if name in summed else name

    def _error(self, op, name, got, want, found) -> str:
        both = np.isnan(got) & np.isnan(want)   # cache positions that no token has reached
        with np.errstate(invalid="ignore"):
            part = np.where(both, 0, np.abs(got - want) / allowed(self.be, op, name, want))
        part = np.where(np.isfinite(part), part, np.inf)
        worst = np.unravel_index(part.argmax(), part.shape) if part.size else ()
        found.used[name] = max(found.used.get(name, 0.0), float(part[worst]) if part.size else 0.0)
        if part.size and part[worst] > 1:
            return (f"at {tuple(map(int, worst))} is {got[worst]:.8g}, wanted {want[worst]:.8g}: {part[worst]:.3g} x the allowed error; "
                    f"{np.count_nonzero(part > 1)} of {part.size} are wrong")
        return ""

    def _other_choice(self, op, b, got, want) -> str:
        """Experts may differ from the reference's only where two biased scores are as good as the same."""
        scores = 1 / (1 + np.exp(-b.router_logits[:len(got)].astype(np.float64))) + self.weights.of(op).e_score_correction_bias
        chosen, best = (np.take_along_axis(scores, np.clip(x, 0, scores.shape[1] - 1), -1) for x in (got, want))
        wrong = (np.abs(chosen - best) > TIE).any(-1) | (np.diff(np.sort(got), axis=-1) == 0).any(-1)
        return f"of row {int(wrong.argmax())} are {got[wrong.argmax()]}, wanted {want[wrong.argmax()]}" if wrong.any() else ""

    def _looped_back(self, move, part):
        """This rank's part, or what it sends to a rank, in that rank's place."""
        if move.how == GATHER:
            return np.concatenate([part] * self.be.tp, axis=BY_NAME[move.source].cut)
        return np.stack([part] * self.be.tp if move.how == STACK else np.split(part, self.be.tp, axis=-1))

    def host(self, name: str, op: Op, rows: int) -> np.ndarray:
        """A copy of the first rows of a buffer, or of the part of it that belongs to the operation's layer; F32 for floats."""
        b, array = BY_NAME[name], self.memory.buffer(name)
        names, array = (b.shape[1:], array[op.kind_index]) if len(instance(name, op)) > 1 else (b.shape, array)
        count = dict.fromkeys(ROW_AXES, rows) | {"pages": self.pages}
        array = array[tuple(slice(count.get(s)) for s in names)].get()
        kv = ml_dtypes.float8_e4m3fn if self.be.kv_cache_dtype == "fp8_e4m3" else ml_dtypes.bfloat16
        array = in_order(array) if name == "mla_cache" else array
        values = np.ascontiguousarray(array).view(kv if b.dtype == "kv" else HOST_DTYPE[b.dtype])
        return values if b.dtype in ("i32", "u8", "f32") else values.astype(np.float32)

    def _live(self, name, array, op, rows):
        """What an operation is judged by: the rows of the step, since padding is nobody's business."""
        if name == "mla_cache":
            return array[self.compared_pages]
        names = BY_NAME[name].shape[1:] if len(instance(name, op)) > 1 else BY_NAME[name].shape
        axis = next((i for i, s in enumerate(names) if s in ROW_AXES), None)
        return array if axis is None else array.take(range(rows), axis)
