"""A step taken apart on the device: one operation at a time against the reference function of its stage.

Before an operation everything that it does not declare as an input is filled with 0xFF, which is NaN in every floating-point
format of a buffer; afterwards every byte outside its outputs must be what it was. Buffers that the host writes are exempt from
the poison: no wait is derived from them. Collectives are looped back, so their targets are known to the byte; where they ride on
the stores of the stage before them, that stage's part lies in every rank's place of the target, and counts as the collective's.
"""
from dataclasses import dataclass, field
from types import SimpleNamespace

import cupy as cp
import ml_dtypes
import numpy as np
from unpacked import Unpacked

from k3cuda.buffers import BUFFERS, BY_NAME
from k3cuda.emit import kernels_of, work_bytes
from k3cuda.plan import instance
from k3cuda.reference import FUNCTIONS
from k3cuda.reference.numerics import Numerics
from k3cuda.runtime.cuda_kernels import bucket_of
from k3cuda.runtime.numpy_backend import Model
from k3cuda.stages import GATHER, STACK, STAGES
from stage_limits import allowed

INPUTS = tuple(b.name for b in BUFFERS if b.life == "input")
HOST_DTYPE = {"bf16": ml_dtypes.bfloat16, "f32": np.float32, "i32": np.int32, "u8": np.uint8}


def launch_groups(be, what: str, bucket: int):
    """[(operations, their launches)] of a step or a commit; a commit is one launch for all its operations."""
    launches = iter(be.launches(what, bucket))
    if what == "commit":
        return [(be.plan.commit, list(launches))]
    groups = [((op,), [next(launches) for _ in kernels_of(op.stage) for _ in be.memories])
              for op in be.plan.ops if not (be.ride and op.stage.moves)]
    assert next(launches, None) is None, "a step has launches that belong to no operation"
    return groups


def write_rows(be, rows) -> None:
    """Everything of `CudaBackend.step` but the launches."""
    be._check.step(rows)
    be._write(token_ids=rows.token_ids, row_slot=rows.slots, row_position=rows.positions, logit_rows=rows.logit_rows)


@dataclass
class Found:
    """Of one stage: what is wrong, and the largest part of an allowed error that was used, by buffer."""

    problems: list[str] = field(default_factory=list)
    used: dict[str, float] = field(default_factory=dict)


class Walk:
    """Runs steps of a CudaBackend with one rank in memory, looped back, and compares every operation."""

    def __init__(self, be):
        assert len(be.memories) == 1 and be.tp > 1, "one rank of several"
        self.be, self.memory, self.weights = be, be.memories[0], Unpacked(be)
        self.model = Model(be.cfg, Numerics("f32", be.kv_cache_dtype), be._steps[0].rank, be.tp)
        self.blocks = {"": self.memory.arena, **self.memory.session}
        self.rides = {m.source: (s, m) for s in STAGES for m in s.moves} if be.ride else {}

    def step(self, rows) -> dict[str, Found]:
        """Stage -> what was found at any of its layers; outputs stay as the kernels left them."""
        write_rows(self.be, rows)
        return self._run("step", len(rows))

    def commit(self, accepted) -> dict[str, Found]:
        self.be._check.commit(accepted)
        self.be._write(row_accepted=accepted)
        return self._run("commit", len(accepted))

    def _run(self, what, rows):
        found = {}
        for ops, launches in launch_groups(self.be, what, bucket_of(rows)):
            self._group(ops, launches, rows, found)
        return found

    def _group(self, ops, launches, rows, all_found):
        stage = ops[0].stage
        found = all_found.setdefault(stage.name, Found())
        self.be.stream.synchronize()
        n = rows
        bound = [SimpleNamespace(**{name: self.host(name, op, n) for name in stage.inputs + stage.outputs}) for op in ops]
        exempt = [self._work(name) for name in work_bytes(self.be.cfg)]
        inputs = [self._extent(name, op) for op in ops for name in (*stage.inputs, *INPUTS)] + exempt
        outputs = [self._extent(self._stored(name), op) for op in ops for name in stage.outputs] + exempt
        saved = {key: block.copy() for key, block in self.blocks.items()}
        for key, block in self.blocks.items():
            block.fill(0xFF)
            _copy(block, saved[key], inputs, key)
        image = {key: block.copy() for key, block in self.blocks.items()}
        cp.cuda.Device().synchronize()
        for launch in launches:
            launch.launch()
        self.be.stream.synchronize()
        for key, block in self.blocks.items():
            _copy(image[key], block, outputs, key)
            for at in cp.flatnonzero(block != image[key])[:1].get():
                found.problems.append(f"{ops[0]} writes {self._owner(key, int(at))}, which it does not declare")
            _copy(saved[key], block, outputs, key)
            block[...] = saved[key]
        for op, b in zip(ops, bound):
            self._compare(op, b, rows, n, all_found)

    def _stored(self, name):
        """Where a stage's output lies: a buffer that a collective would move is not written if it rides."""
        return self.rides[name][1].target if name in self.rides else name

    def _compare(self, op, b, rows, n, all_found):
        if op.stage.moves:
            want = {m.target: self._looped_back(m, getattr(b, m.source)) for m in op.stage.moves}
        else:
            with np.errstate(all="ignore"):   # padding rows hold anything
                FUNCTIONS[op.stage.name](self.model, self.weights.of(op), b, op)
            want = {name: self._looped_back(self.rides[name][1], x) if name in self.rides else x for name, x in vars(b).items()}
        undecided = np.zeros(rows, bool)
        for name in op.stage.outputs:
            found = all_found.setdefault(self.rides[name][0].name if name in self.rides else op.stage.name, Found())
            at = self._stored(name)
            got, expected = live(at, self.host(at, op, n), op, rows), live(at, want[name], op, rows)
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
        """Experts may differ from the reference's only where two biased scores are the same but for the sigmoid's last bits."""
        scores = 1 / (1 + np.exp(-b.router_logits[:len(got)].astype(np.float64))) + self.weights.of(op).e_score_correction_bias
        chosen, best = (np.take_along_axis(scores, np.clip(x, 0, scores.shape[1] - 1), -1) for x in (got, want))
        wrong = (np.abs(chosen - best) > 2**-20).any(-1) | (np.diff(np.sort(got), axis=-1) == 0).any(-1)
        return f"of row {int(wrong.argmax())} are {got[wrong.argmax()]}, wanted {want[wrong.argmax()]}" if wrong.any() else ""

    def _looped_back(self, move, part):
        """This rank's part in every rank's place."""
        if move.how == GATHER:
            return np.concatenate([part] * self.be.tp, axis=BY_NAME[move.source].cut)
        size = part.shape[-1] // (1 if move.how == STACK else self.be.tp)
        first = 0 if move.how == STACK else self.model.rank * size
        return np.stack([part[..., first:first + size]] * self.be.tp)

    # ---- memory ----

    def host(self, name, op, n):
        """A copy of the first `n` rows of a buffer, or of the part of it that belongs to the operation's layer; F32 for floats."""
        b, array = BY_NAME[name], self.memory.buffer(name)
        names, array = (b.shape[1:], array[op.kind_index]) if len(instance(name, op)) > 1 else (b.shape, array)
        array = array[tuple(slice(n) if s in ("rows", "head_rows") else slice(None) for s in names)]
        kv = ml_dtypes.float8_e4m3fn if self.be.kv_cache_dtype == "fp8_e4m3" else ml_dtypes.bfloat16
        values = np.ascontiguousarray(array.get()).view(kv if b.dtype == "kv" else HOST_DTYPE[b.dtype])
        return values if b.dtype in ("i32", "u8", "f32") else values.astype(np.float32)

    def _extent(self, name, op):
        """(block, first byte, byte behind the last) of what an operation touches under this name."""
        array = self.memory.buffer(name)
        array = array[op.kind_index] if len(instance(name, op)) > 1 else array
        key = name if name in self.memory.session else ""
        start = array.data.ptr - self.blocks[key].data.ptr
        return key, start, start + array.nbytes

    def _work(self, name):
        """What passes between kernels and is no buffer of the tables."""
        start = self.memory.offsets[name]
        return "", start, start + work_bytes(self.be.cfg)[name]

    def _owner(self, key, at):
        if key:
            return f"byte {at} of {key}"
        name = max((n for n, start in self.memory.offsets.items() if start <= at), key=self.memory.offsets.get)
        return f"byte {at - self.memory.offsets[name]} of {name}"


def _copy(to, source, extents, key):
    for k, start, stop in extents:
        if k == key:
            to[start:stop] = source[start:stop]


def live(name, array, op, rows):
    """The rows of the step; what lies in padding is nobody's business."""
    names = BY_NAME[name].shape[1:] if len(instance(name, op)) > 1 else BY_NAME[name].shape
    axis = next((i for i, s in enumerate(names) if s in ("rows", "head_rows")), None)
    return array if axis is None else array.take(range(rows), axis)
