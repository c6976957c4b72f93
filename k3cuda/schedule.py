"""The single-launch step as data: which block streams which weights in which order, and what each phase waits for. docs/megakernel.md.

Everything is derived from the tables and checked without a device; `timeline.py` says what a schedule would cost.
"""
from dataclasses import dataclass
from heapq import heapify, heapreplace

from .errors import PlanError
from .phases import MERGED, Arrangement, Grid, Phase, PhaseMaker
from .plan import Plan


@dataclass(frozen=True)
class Schedule:
    """`programs`: for each block the (phase, unit) pairs that it works off, in order."""

    grid: Grid
    rows: int
    phases: tuple[Phase, ...]
    programs: tuple[tuple[tuple[int, int], ...], ...]


def build(plan: Plan, rows: int, grid: Grid = Grid(), arrangement: Arrangement = MERGED, *, experts: float, context: int) -> Schedule:
    """The schedule of one rank's step of `rows` rows.

    Args:
        experts: distinct experts that a layer reads. context: cached positions of the one sequence, in an FP8 cache.
    Raises PlanError if check() finds it wrong.
    """
    maker = PhaseMaker(plan, rows, grid, arrangement, experts, context, [], {})
    for op in plan.ops:
        maker.add(op)
    schedule = Schedule(grid, rows, tuple(maker.phases), deal(maker.phases, grid))
    check(schedule)
    return schedule


def deal(phases: list[Phase], grid: Grid) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Deals the units of each phase: to the block of the unit's part with the fewest bytes in the phase, then since the last chosen phase.

    Units of a phase that has a home go to their own blocks, and those of a phase beside another one to the blocks that this one leaves idle.
    """
    programs: list[list[tuple[int, int]]] = [[] for _ in range(grid.sms)]
    since = [0] * grid.sms
    for at, phase in enumerate(phases):
        if phase.chosen:
            since = [0] * grid.sms
        if phase.home is not None:
            for unit in range(len(phase.units)):
                programs[(phase.home + unit) % grid.sms].append((at, unit))
            continue
        if phase.parts > 1 and phase.parts == grid.cluster:
            _deal_to_clusters(at, phase, grid, programs, since)
            continue
        usable = grid.sms - grid.sms % phase.parts
        busy = {b for b, program in enumerate(programs) if phase.beside and program and program[-1][0] == at - 1}
        busy = busy if len(busy) < usable else set()
        if not busy and phase.parts == 1 and len(phase.late) < usable and -(-len(phase.units) // usable) == -(-len(phase.units) // (usable - len(phase.late))):
            busy = phase.late   # the others have no more for it
        queues = [[(0, 0, b in phase.late, since[b], b) for b in range(part, usable, phase.parts) if b not in busy] for part in range(phase.parts)]
        for queue in queues:
            heapify(queue)
        for unit, nbytes in enumerate(phase.units):
            own, count, late, _, block = queues[unit % phase.parts][0]
            since[block] += nbytes
            heapreplace(queues[unit % phase.parts], (own + nbytes, count + 1, late, since[block], block))
            programs[block].append((at, unit))
    return tuple(map(tuple, programs))


def _deal_to_clusters(at: int, phase: Phase, grid: Grid, programs: list[list[tuple[int, int]]], since: list[int]) -> None:
    """All parts of a tile to the blocks of one cluster, in the same order: they finish it together."""
    queue = [(0, 0, not phase.late.isdisjoint(range(first, first + grid.cluster)), max(since[first:first + grid.cluster]), first)
             for first in range(0, grid.sms - grid.sms % grid.cluster, grid.cluster)]
    heapify(queue)
    for tile in range(0, len(phase.units), phase.parts):
        own, count, late, _, first = queue[0]
        for part, nbytes in enumerate(phase.units[tile:tile + phase.parts]):
            since[first + part] += nbytes
            programs[first + part].append((at, tile + part))
        heapreplace(queue, (own + sum(phase.units[tile:tile + phase.parts]), count + 1, late, max(since[first:first + grid.cluster]), first))


def check(schedule: Schedule) -> None:
    """Runs the programs as the blocks would, with nothing but their waits, and raises PlanError if anything is left.

    Found so: a unit that no block or more than one does, a phase that waits for itself or for a later one that waits for it, a unit that does
    not fit the ring, a program that would never end.
    """
    phases = schedule.phases
    left = [set(range(len(p.units))) for p in phases]
    for block, program in enumerate(schedule.programs):
        for phase, unit in program:
            if unit not in left[phase]:
                raise PlanError(f"block {block} does unit {unit} of {phases[phase]}, which {'another block does' if unit < len(phases[phase].units) else 'does not exist'}")
            left[phase].discard(unit)
    if missing := [f"{len(units)} units of {phases[i]}" for i, units in enumerate(left) if units]:
        raise PlanError(f"nobody does {', '.join(missing)}")
    todo, at = [len(p.units) for p in phases], [0] * len(schedule.programs)
    moved = True
    while moved:
        moved = False
        for block, program in enumerate(schedule.programs):
            while at[block] < len(program) and not any(todo[w.phase] for w in phases[program[at[block]][0]].waits):
                todo[program[at[block]][0]] -= 1
                at[block] += 1
                moved = True
    stuck = [(block, program[at[block]][0]) for block, program in enumerate(schedule.programs) if at[block] < len(program)]
    if stuck:
        block, phase = stuck[0]
        waits = ", ".join(str(phases[w.phase]) for w in phases[phase].waits if todo[w.phase])
        raise PlanError(f"{len(stuck)} blocks never end: block {block} stands at {phases[phase]}, which waits for {waits}")
