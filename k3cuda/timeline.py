"""What a schedule of the single launch would cost: every block's copies, waits and chains of arithmetic on one clock. A prediction, not a measurement.

The model: a block's producer issues its copies in program order, at most `window` bytes in flight, into a ring that its units empty in
order; they land at the block's share of the memory's speed, a latency after their issue at the earliest. A phase begins where all blocks have
ended the phases it waits for and what they published was read. EXCHANGE and LATENCY were fitted to ten measured streams without
arithmetic (tests/data/handover.json) and are within 5 % of each; the chains are estimates of ours, each with its source.
"""
from dataclasses import dataclass

import numpy as np

from .phases import Phase
from .schedule import Schedule

# Microseconds of a hand-over: at least, for each KB that a block reads, for each square of it (all blocks' reads together clog the L2).
IDLE_EXCHANGE = (0.66, 0.017, 0.00015)   # while nothing else happens
EXCHANGE = (1.4, 0.036, 0.0)             # while weights stream
ROUNDS = 3
LATENCY = 1.2               # from the issue of a copy to its bytes, loaded memory
DRAIN = {"bf16": 100.0, "mxfp4": 41.0}   # bytes a nanosecond that a block's warps take out of its ring: shared memory; 44.8 weights a clock
STEP = 0.017                # of a chain of tensor products, each: 28 to 48 of them took 0.5 to 0.8
TAIL = 0.35                 # of a product behind its chain: sums over leaves, stores. Estimate
# The rest of a phase's own time. attn_mix: sums and its exchange of four scalars; mix_closed, mix_sums, mix_out: the same as rounds that hand over
# (launch_mix.cuh); kda_mix, for 1 row and for more: step-plan's estimate; kda_head, a block a head (launch_kda.cuh): estimate, for eight rows 6 of the
# 7.1 that the standard path's kernel took; route: a kernel of it took 2.6 with a hand-over of 1.3; expert_up: the list, 0.3 at one row and 1.0 at
# eight; mla_attend: estimate.
OWN = {"attn_mix": (2.0, 2.0), "ffn_mix": (2.0, 2.0), "output_mix": (2.0, 2.0), "routed_norm": (1.9, 1.9), "mla_norm": (0.6, 0.8), "kda_mix": (1.1, 2.0),
       "route": (1.3, 1.3), "choose": (1.3, 1.6), "add_parts": (0.3, 0.4), "mix_closed": (0.5, 0.5), "mix_sums": (0.5, 0.5), "mix_out": (0.3, 0.3),
       "kda_head": (3.0, 6.0), "expert_up": (0.3, 1.0), "mla_attend": (2.5, 3.0), "embed": (0.3, 0.5), "embed_sum": (0.3, 0.5), "dense_sum": (0.3, 0.5)}


@dataclass(frozen=True)
class Span:
    """Of one phase, in microseconds since the step began: its waits are met, its first and its last unit end, its last byte has landed."""

    phase: int
    ready: float
    first: float
    end: float
    landed: float


@dataclass(frozen=True)
class Timeline:
    """`spans` of all phases; `ends[phase]`: for each block when it ended its part, NaN where it has none. `us`: of the whole step. `nbytes`: all units'."""

    spans: tuple[Span, ...]
    ends: np.ndarray
    us: float
    nbytes: int

    def ratio(self, tb_s: float) -> float:
        return self.us / floor_us(self.nbytes, tb_s)


def floor_us(nbytes: int, tb_s: float) -> float:
    """Microseconds that reading so many bytes takes at `tb_s` terabytes a second."""
    return nbytes / tb_s / 1e6


def exchange_us(nbytes: int, busy: float) -> float:
    """A hand-over of which each block reads so many bytes; `busy`: how much of it happens while weights stream."""
    idle, loaded = (sum(c * (nbytes / 1024) ** i for i, c in enumerate(cost)) for cost in (IDLE_EXCHANGE, EXCHANGE))
    return busy * loaded + (1 - busy) * idle


def _own(phase: Phase, rows: int) -> float:
    """What the stages of a phase take beside their products: before the copies of a chosen phase, behind the last byte of any other."""
    return sum(OWN.get(name, (0.0, 0.0))[rows > 1] for name in phase.does)


def _chain(phase: Phase) -> float:
    """What a product takes behind its last byte."""
    return phase.steps * STEP + TAIL if phase.steps else 0.0


def simulate(schedule: Schedule, tb_s: float = 4.48, hop_us: float = 0.0) -> Timeline:
    """Runs the schedule at a memory speed of `tb_s` terabytes a second; `hop_us` is added to what crosses ranks.

    Whether a hand-over meets streaming weights depends on the hand-overs before it: settled by running several times.
    """
    busy, loads = np.ones(len(schedule.phases)), _loads(schedule)
    for _ in range(ROUNDS):
        found, streamed = _run(schedule, loads, tb_s, hop_us, busy)
        ends = np.array([span.end for span in found.spans])
        busy = np.array([_overlap(streamed, end, end + IDLE_EXCHANGE[0]) for end in ends])
    return found


def _overlap(intervals: np.ndarray, begin: float, end: float) -> float:
    """How much of begin to end lies in `intervals` [n, 2], which rise and do not meet."""
    return float(np.clip(np.minimum(intervals[:, 1], end) - np.maximum(intervals[:, 0], begin), 0, None).sum() / (end - begin))


def _run(schedule: Schedule, loads: tuple, tb_s: float, hop_us: float, busy: np.ndarray) -> tuple[Timeline, np.ndarray]:
    """One round, and the times [n, 2] in which the first block had copies in flight."""
    grid, phases = schedule.grid, schedule.phases
    blocks, rate = grid.sms, tb_s * 1e6 / grid.sms          # bytes a microsecond of one block
    units, copies, nbytes = loads
    slots, window = max(1, grid.ring // grid.copy), max(1, grid.window // grid.copy)
    landed, taken = np.zeros((blocks, slots)), np.zeros((blocks, slots))
    issued, stream, drained, number = np.zeros(blocks), np.zeros(blocks), np.zeros(blocks), np.zeros(blocks, int)
    at, spans, ends, flights = np.arange(blocks), [], np.full((len(phases), blocks), np.nan), []
    for index, phase in enumerate(phases):
        ready = max((spans[w.phase].end + exchange_us(w.block_bytes, busy[w.phase]) + hop_us * w.crosses for w in phase.waits), default=0.0)
        count, size = copies[index], nbytes[index] / np.maximum(copies[index], 1)
        if phase.chosen and not (index and phases[index - 1].chosen and phases[index - 1].layer == phase.layer):
            known = ready + _own(phase, schedule.rows)
        drain = DRAIN["mxfp4" if phase.chosen else "bf16"] * 1e3
        for copy in range(count.max(initial=0)):
            working = copy < count
            slot = number % slots
            start = np.maximum(issued, taken[at, slot])                       # the slot is empty
            start = np.where(number >= window, np.maximum(start, landed[at, (number - window) % slots]), start)
            start = np.maximum(start, known) if phase.chosen else start
            land = np.maximum(stream + size / rate, start + LATENCY)
            done = np.maximum(np.maximum(land, ready), drained) + size / drain
            issued, stream, drained = np.where(working, start, issued), np.where(working, land, stream), np.where(working, done, drained)
            landed[at[working], slot[working]], taken[at[working], slot[working]] = land[working], done[working]
            number = number + working
            if working[0]:
                if flights and start[0] <= flights[-1][1]:
                    flights[-1][1] = land[0]
                else:
                    flights.append([start[0], land[0]])
        works = units[index] > 0
        end = np.where(count > 0, drained, ready) + _chain(phase) + (0.0 if phase.chosen else _own(phase, schedule.rows))
        ends[index][works] = end[works]
        spans.append(Span(index, ready, float(end[works].min()), float(end[works].max()), float(stream[works].max())))
    return Timeline(tuple(spans), ends, spans[-1].end, sum(sum(p.units) for p in phases)), np.array(flights)


def _loads(schedule: Schedule) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """[phase, block]: units, copies and bytes."""
    out = np.zeros((3, len(schedule.phases), schedule.grid.sms), np.int64)
    for block, program in enumerate(schedule.programs):
        for phase, unit in program:
            nbytes = schedule.phases[phase].units[unit]
            out[:, phase, block] += 1, -(-nbytes // schedule.grid.copy), nbytes
    return tuple(out)
