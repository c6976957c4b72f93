"""When every launch of a step began, stopped waiting and ended, as its blocks noted it (`traced` in kernels_cu/stages/common.cuh), and of a whole step's launch
every phase (LaunchStamps in kernels_cu/launch_ring.cuh)."""
from dataclasses import dataclass

import cupy
import numpy as np

from ..block_program import BlockProgram
from ..chrome_trace import bar
from ..config import DECODE_ROWS, MAX_ROWS
from ..emit import launches_of
from ..launch_source import ISSUE_BINS, STAMPS, LaunchStamps
from ..launch_trace import LaunchTrace, phases_of
from ..plan import Plan

WORDS = 8  # of 64 bits, a launch
_NEVER = 1 << 63


@dataclass(frozen=True)
class Traced:
    """One launch; times in nanoseconds since the first block of the step began, over all blocks of the launch.

    Attributes:
        kernel, layer: what ran; the layer is None outside of layers.
        begin, last_begin: of the first and of the last block.
        waited: the last block found the kernel before complete.
        first_end, end: of the first and of the last block.
    """

    kernel: str
    layer: int | None
    begin: int
    last_begin: int
    waited: int
    first_end: int
    end: int


class TraceMemory:
    """Where launches of a traced build note their times.

    Args:
        steps: StepStructs of the ranks, which get its address.
        plan: of the step.

    Attributes:
        names: (kernel, layer) of every launch of the last step, in order.
    """

    def __init__(self, steps, plan: Plan):
        self.names: list[tuple[str, int | None]] = []
        most = max(sum(len(launches_of(op.stage, plan, rows, False)) for op in plan.ops) for rows in (DECODE_ROWS, MAX_ROWS))
        self.words = cupy.zeros((most * len(steps), WORDS), cupy.uint64)
        for step in steps:
            step.trace = self.words.data.ptr

    def clear(self) -> None:
        """Before a step whose times are wanted; minima start from never."""
        self.words[:] = 0
        self.words[:, 0] = self.words[:, 3] = _NEVER
        cupy.cuda.get_current_stream().synchronize()

    def read(self) -> list[Traced]:
        """Times of the last step, which must be complete, in order of launches."""
        times = self.words.get()[:, :5].astype(np.int64)
        times -= times[0, 0]
        return [Traced(kernel, layer, *map(int, row)) for (kernel, layer), row in zip(self.names, times)]


def chrome(launches: list[Traced]) -> list[dict]:
    """A bar a kernel, from its first begin to its last end, on four lines in turn since neighbours overlap."""
    return [bar(t.kernel, 0, i % 4, t.begin, t.end, layer=t.layer, waited_us=t.waited / 1e3) for i, t in enumerate(launches)]


class PhaseMemory:
    """Where a stamped launch of `program` notes times of the phases of `layers`, all of them by default; `address` is that of its LaunchStamps."""

    def __init__(self, program: BlockProgram, layers: range | None):
        self._program, self._phases = program, phases_of(program, layers)
        self._words = cupy.zeros((program.grid.sms, len(self._phases), len(STAMPS)), cupy.uint64)
        self._clocks = cupy.zeros((program.grid.sms, 2, 2), cupy.uint64)
        self._issued = cupy.zeros((program.grid.sms, ISSUE_BINS), cupy.uint32)
        arrays = (a.data.ptr for a in (self._words, self._clocks, self._issued))
        self._header = cupy.asarray(np.frombuffer(LaunchStamps(*arrays, self._phases.start, len(self._phases)), np.uint8))
        self.address = self._header.data.ptr

    def clear(self) -> None:
        """Before a step whose times are wanted."""
        self._words[:] = self._issued[:] = 0
        cupy.cuda.get_current_stream().synchronize()

    def read(self) -> LaunchTrace:
        """Of the last step, which must be complete."""
        return LaunchTrace(self._program, self._phases.start, self._words.get(), self._clocks.get(), self._issued.get())
