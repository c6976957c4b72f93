"""What goes into a step and what comes out of it, through memory that the host and the GPU both see.

Nothing is copied by a copy engine and nothing waits: kernels of kernels_cu/step_io.cuh fetch the inputs and lay down the tokens. Two
sets of this memory take turns, so that the host fills one while the GPU still reads the other.
"""
from dataclasses import dataclass
from math import prod
from typing import Sequence

import cupy
import numpy as np

from ..buffers import BUFFERS, BY_NAME, DTYPE_BYTES, buffer_shape
from ..emit import ALIGN
from ..errors import PlanError
from ..tables import SESSION
from .cuda_driver import Launch, Module, check, driver
from .cuda_kernels import compile_step_io, no_sampler
from .cuda_memory import VIEW_DTYPES, RankMemory
from .row_check import PADDING
from .sampling import Draw, Drawn
from .step_records import CLUSTER, PENALTY, ROW, Answers, SampleArgs, StepLoad, penalty_entries, row_record, sampler_warps

# The input buffers in the order in which they stand at the start of an arena.
INPUTS = tuple(b.name for b in BUFFERS if b.life == "input" and b.name not in SESSION)
MAX_PENALTIES = 1 << 16   # entries of all rows of a step: 512 KB
_WORD, _LOAD_BLOCKS = 16, 8


class Half:
    """One of the two sets of memory. The GPU is done with it once `event` has passed.

    Attributes:
        inputs: uint8, as an arena begins. records, penalties: of the draws. answers: of the sampler.
        began: uint64 [1], when its last load began, nanoseconds of the device's clock.
        reader: who reads its answers; None where somebody else's may stand there.
        written: of each row what its record was made from; None where that must be done again.
    """

    def __init__(self, index: int, input_bytes: int, head_rows: int):
        self.index, self.reader, self.written = index, None, []
        sizes = {"inputs": input_bytes, "records": head_rows * ROW.itemsize, "words": _WORD, "penalties": MAX_PENALTIES * PENALTY.itemsize,
                 "began": _WORD, "answers": Answers.nbytes(head_rows)}
        starts, at = {}, 0
        for name, nbytes in sizes.items():
            starts[name] = at
            at += -(-nbytes // ALIGN) * ALIGN
        self._memory = cupy.cuda.alloc_pinned_memory(at)
        whole = np.frombuffer(self._memory, np.uint8, at)
        whole[:] = 0
        part = {name: whole[start:start + sizes[name]] for name, start in starts.items()}
        self.inputs, self.records, self.penalties = part["inputs"], part["records"].view(ROW), part["penalties"].view(PENALTY)
        self.penalty_words, self.began = part["words"].view(np.int32)[:1], part["began"].view(np.uint64)[:1]
        self.answers = Answers(head_rows, part["answers"])
        cu = driver()
        self.event = check(cu.cuEventCreate(int(cu.CUevent_flags.CU_EVENT_DISABLE_TIMING)))

    def wait(self) -> None:
        check(driver().cuEventSynchronize(self.event))


@dataclass(eq=False)
class CudaPending:
    """runtime/backend.py's Pending. `on_host`: row -> what the host has drawn for it."""

    half: Half
    draws: Sequence[Draw]
    vocab_size: int
    on_host: dict[int, Drawn]

    def __post_init__(self):
        self.half.reader = self

    def drawn(self) -> list[Drawn]:
        if self.half.reader is not self:
            raise PlanError("these tokens are gone: two later draws came before they were read")
        self.half.wait()
        out = self.half.answers.drawn(self.draws, self.vocab_size)
        for row, drawn in self.on_host.items():
            out[row] = drawn
        return out

    def times(self) -> tuple[int, int]:
        """(when the step's first kernel began, when the last row was drawn), nanoseconds of the device's clock. Call it after `drawn`."""
        return int(self.half.began[0]), int(self.half.answers.arrays["ended"][:len(self.draws)].max(initial=0))


class StepIO:
    """Inputs, draws and tokens of the steps of one backend.

    Args:
        memories: of the ranks on this GPU; the first one's logits are drawn from.
        arch: of the GPU.
        stream: of the backend.
        draft_ids: address of a draft's proposals; 0 without one.
    """

    def __init__(self, memories: list[RankMemory], arch: str, stream: cupy.cuda.Stream, draft_ids: int = 0):
        self.memories, self.stream, self._draft_ids, first = memories, stream, draft_ids, memories[0]
        self._raw_stream = stream.__cuda_stream__()[1]
        self.vocab_size, self.head_rows = first.plan.cfg.vocab_size, first.dims["head_rows"]
        spans = {n: self._span(n) for n in INPUTS}
        self._starts = {n: start for n, (start, _) in spans.items()}
        self.input_bytes = max(end for _, end in spans.values())
        self._inputs = np.zeros(-(-self.input_bytes // _WORD) * _WORD, np.uint8)
        self._views = {n: self._inputs[start:end].view(VIEW_DTYPES[BY_NAME[n].dtype]) for n, (start, end) in spans.items()}
        for name, view in self._views.items():
            view[:] = PADDING[name]
        self.slot_tokens = cupy.zeros(first.dims["slots"], np.int32)
        self._arenas = cupy.asarray(np.array([m.arena.data.ptr for m in memories], np.uint64))
        self._draws, self._penalties = cupy.zeros(self.head_rows * ROW.itemsize, np.uint8), cupy.zeros(MAX_PENALTIES * PENALTY.itemsize, np.uint8)
        self._module = Module(compile_step_io(self.vocab_size, arch).cubin)
        self.no_sampler = no_sampler(self.vocab_size)
        self._load = self._module.function("k_load")
        self._sample = None if self.no_sampler else self._module.function("k_sample")
        self._halves = [Half(i, len(self._inputs), self.head_rows) for i in range(2)]
        self._turn = 0
        # One set of arguments for launches of its own, changed before each; a captured launch keeps its copy.
        self._loads = [self.load_launch(half) for half in self._halves]
        self._samples: dict[tuple[int, int], Launch] = {}

    def next_half(self) -> Half:
        """The half whose turn it is, once the GPU has left it: it was used two turns ago."""
        half = self._halves[self._turn]
        self._turn ^= 1
        half.wait()
        half.reader = None
        return half

    def done(self, half: Half) -> None:
        """Marks the end of the work that uses it."""
        check(driver().cuEventRecord(half.event, self._raw_stream))

    # ---- inputs ----

    def set(self, **values) -> int:
        """Input buffers by name, padded; returns where the first of them begins. They go to the GPU with the next load."""
        for name, array in values.items():
            view = self._views[name]
            view[:len(array)] = array
            view[len(array):] = PADDING[name]
        return min(self._starts[n] for n in values)

    def write(self, **values) -> None:
        """`set`, and loads them and what stands behind them."""
        first = self.set(**values)
        half = self.next_half()
        half.inputs[:] = self._inputs
        self._launch_load(half, first, draws=False)
        self.done(half)

    def fill(self, half: Half) -> None:
        half.inputs[:] = self._inputs

    def load_launch(self, half: Half) -> Launch:
        """Loads all inputs and draws of `half`."""
        m = self.memories[0]
        args = StepLoad(inputs=half.inputs.ctypes.data, arenas=self._arenas.data.ptr, ranks=len(self.memories), first=0, last=len(self._inputs) // _WORD,
                        token_ids=m.offsets["token_ids"], row_slot=m.offsets["row_slot"], rows=m.dims["rows"], slot_tokens=self.slot_tokens.data.ptr, draft_ids=self._draft_ids,
                        draws=half.records.ctypes.data, penalties=half.penalties.ctypes.data, draws_to=self._draws.data.ptr,
                        penalties_to=self._penalties.data.ptr, draw_words=-(-self.head_rows * ROW.itemsize // _WORD),
                        penalty_words=half.penalty_words.ctypes.data, began=half.began.ctypes.data)
        return Launch(self._load, _LOAD_BLOCKS, 512, [args], stream=self._raw_stream)

    def _launch_load(self, half: Half, first: int, *, draws: bool, inputs: bool = True) -> None:
        launch = self._loads[half.index]
        args = launch.arguments[0]
        args.first, args.last = first // _WORD, len(self._inputs) // _WORD if inputs else 0
        args.draw_words = -(-self.head_rows * ROW.itemsize // _WORD) if draws else 0
        launch.launch()

    def _span(self, name: str) -> tuple[int, int]:
        m, b = self.memories[0], BY_NAME[name]
        start = m.offsets[name]
        return start, start + prod(buffer_shape(b, m.dims)) * DTYPE_BYTES[b.dtype]

    # ---- draws ----

    def fill_draws(self, half: Half, draws: Sequence[Draw], slots: Sequence[int]) -> dict[int, str]:
        """Records of the draws; row -> why the kernel cannot draw for it. `slots`: whose token each is, -1 where no later row asks for it."""
        if len(draws) > self.head_rows:
            raise PlanError(f"{len(draws)} draws, wanted at most {self.head_rows}")
        used, refused = 0, {}
        half.records["active"][len(draws):] = 0
        half.records["position"][:len(draws)] = [draw.position & 0xFFFFFFFF for draw in draws]
        del half.written[len(draws):]
        for i, (draw, slot) in enumerate(zip(draws, slots, strict=True)):
            same = (draw.params, draw.seed, draw.stream, slot)   # what a record of a draw without penalties holds beside its position
            if i < len(half.written) and half.written[i] == same:
                continue
            entries = penalty_entries(draw)
            room = used + len(entries) <= MAX_PENALTIES
            half.written[i:i + 1] = [None]
            if self.no_sampler or not room:
                half.records["active"][i] = 0
                refused[i] = self.no_sampler or f"sampled on the host: penalties of more than {MAX_PENALTIES} tokens in a step"
                continue
            half.penalties[used:used + len(entries)] = entries
            half.records[i] = row_record(draw, used, len(entries), slot)
            half.written[i] = None if draw.params.has_penalties else same
            used += len(entries)
        half.penalty_words[0] = -(-used * PENALTY.itemsize // _WORD)
        return refused

    def sample_launch(self, half: Half, rows: int, dependent: bool = False) -> Launch:
        """Draws for the first `rows` rows of logits; only where there is a kernel for it."""
        m = self.memories[0]
        answers = {name: array.ctypes.data for name, array in half.answers.arrays.items()}
        args = SampleArgs(logits=m.arena.data.ptr + m.offsets["logits"], rows=self._draws.data.ptr, penalties=self._penalties.data.ptr,
                          slot_tokens=self.slot_tokens.data.ptr, **answers)
        return Launch(self._sample, rows * CLUSTER, sampler_warps(self.vocab_size) * 32, [args], stream=self._raw_stream, cluster=CLUSTER, dependent=dependent)

    def sample(self, half: Half, rows: int) -> None:
        """Loads the draws of `half` and draws."""
        self._launch_load(half, _WORD, draws=True, inputs=False)
        if self._sample is None:
            return
        if (half.index, rows) not in self._samples:
            self._samples[half.index, rows] = self.sample_launch(half, rows)
        self._samples[half.index, rows].launch()

    def slot_token(self, slot: int, token: int | None = None) -> int:
        """The token last drawn for `slot`, or sets it. Waits for the GPU."""
        kept = self.slot_tokens.get(stream=self.stream)
        if token is not None:
            kept[slot] = token
            self.slot_tokens.data.copy_from_host_async(kept.ctypes.data, kept.nbytes, self.stream)
            self.stream.synchronize()
        return int(kept[slot])

    def close(self) -> None:
        self._module.close()
        for half in self._halves:
            check(driver().cuEventDestroy(half.event))
