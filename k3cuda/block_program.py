"""A schedule as the words that the blocks of a single launch read. kernels_cu/launch_core.cuh says what they mean."""
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from .errors import PlanError
from .launch_kinds import MAX_TOKENS, VECTOR_BYTES, Field, Kind, Route, linked
from .phases import Grid, Phase, Wait
from .schedule import Schedule, check, deal

NO_SLOT = 15
SLOTS = 4             # of the exchange, where phases read the phase before: two phases lie between clearing one and using it again
MOST_SLOTS = 12       # where results have readers further on
HEAD_WORDS = 3        # of a phase, before its units: kHeadWords in launch_fields.cuh
MOST_VECTORS = 0xFFFF   # of a row, sixteen bits of a LaunchLink
MOST_EXTRA = 255      # eight bits of a word
PAGE_WORDS = 384      # of a block's program, of which two pages are in shared memory
TURN_PAGE = 0xFFFFFFFF   # kTurnPage in launch_program.cuh
MAX_KINDS, MAX_INPUTS, MAX_FIELDS, MAX_CLEARS = 32, 4, 4, 2   # launch_fields.cuh, launch_args.cuh


@dataclass(frozen=True)
class Step:
    """A phase to be: its kind's name, its layer, and a number of the kind's own, up to MOST_EXTRA."""

    name: str
    layer: int
    extra: int = 0


@dataclass(frozen=True)
class Link:
    """Of a kind, in vectors: LaunchLink. `inputs`: (at, row, vectors) of the fields it reads. `fields`: (at, width, limit, copies, own) of those it makes."""

    inputs: tuple[tuple[int, int, int], ...]
    fields: tuple[tuple[int, int, int, int, int], ...]
    row: int
    record_row: int
    vectors: int


@dataclass(frozen=True)
class BlockProgram:
    """`words` [blocks, n]: pages of `page` words. `steps`: the phases. `sources`: for each of them which phases it reads, None the launch's input. `weights`: for each phase which
    (kind, layer) it multiplies by. `slots` of the exchange, each of `slot_vectors`. `most`: units that a block has of a kind, at most.
    `ranks`: that exchange with one another, each by this program; 1: a rank that stands for all."""

    kinds: tuple[Kind, ...]
    links: tuple[Link, ...]
    most: tuple[int, ...]
    grid: Grid
    rows: int
    top_k: int
    schedule: Schedule
    words: np.ndarray
    steps: tuple[Step, ...]
    sources: tuple[tuple[int | None, ...], ...]
    weights: tuple[tuple[int, int], ...]
    clearings: int
    slots: int
    slot_vectors: int
    page: int
    ranks: int = 1

    def places(self, block: int) -> list[int]:
        """Where in its words the phases of a block begin."""
        words, out, at = self.words[block], [], 1
        for _ in range(self.phases):
            at = (at // self.page + 1) * self.page + 1 if words[at] == TURN_PAGE else at
            out.append(at)
            at += HEAD_WORDS + (int(words[at]) >> 16)
        return out

    @property
    def phases(self) -> int:
        return len(self.weights)

    @property
    def tokens(self) -> int:
        """Rows that the kernel has room for."""
        return 1 << (self.rows - 1).bit_length()

    @property
    def record_vectors(self) -> int:
        return max(self.rows_out(kind) * link.record_row for kind, link in enumerate(self.links))

    def rows_out(self, kind: int) -> int:
        """Rows of a phase's results."""
        return self.rows * (self.top_k if self.kinds[kind].of_items else 1)

    @property
    def input_vectors(self) -> int:
        """Of a row of the launch's input."""
        at = next(i for i, found in enumerate(self.sources) if found and found[0] is None)
        return self.links[self.weights[at][0]].inputs[0][1]

    @property
    def output_vectors(self) -> int:
        """Of a row of its result."""
        return self.links[self.weights[-1][0]].row


def chain(kinds: tuple[Kind, ...], layers: int, rows: int, grid: Grid, top_k: int = 0) -> BlockProgram:
    """All kinds in a row, `layers` times, each reading the one before (`linked`)."""
    kinds = kinds if kinds[0].fields else linked(kinds)
    return program(kinds, tuple(Step(k.name, layer) for layer in range(layers) for k in kinds), rows, grid, top_k)


def program(kinds: tuple[Kind, ...], steps: tuple[Step, ...], rows: int, grid: Grid, top_k: int = 0, slots: int = SLOTS, page: int = PAGE_WORDS,
            ranks: int = 1) -> BlockProgram:
    """Phases of these steps, in order. A phase reads the latest makers of its fields; the one field that is read before any phase has made it is the
    launch's input, and what the last phase makes its result.

    Raises PlanError for what the kernel cannot do, and for steps in an order in which another field would be missing.
    """
    if not 1 <= rows <= MAX_TOKENS or grid.sms % grid.cluster:
        raise PlanError(f"{rows} rows on {grid.sms} blocks in clusters of {grid.cluster}; wanted 1 to {MAX_TOKENS} rows and whole clusters")
    if slots > MOST_SLOTS:
        raise PlanError(f"found {slots} slots of the exchange, wanted at most {MOST_SLOTS}")
    if len(kinds) > MAX_KINDS or any(len(k.reads) > MAX_INPUTS or len(k.fields) > MAX_FIELDS for k in kinds):
        raise PlanError(f"found {len(kinds)} kinds of phases, wanted at most {MAX_KINDS}, with {MAX_INPUTS} inputs and {MAX_FIELDS} fields each")
    number, maker = {k.name: i for i, k in enumerate(kinds)}, {f.name: (i, f) for i, k in enumerate(kinds) for f in k.fields}
    for k in kinds:
        for f in k.fields:   # one that several kinds make lies in the same place of all
            if _layout(k, f.name) != _layout(kinds[maker[f.name][0]], f.name):
                raise PlanError(f"{k.name} and {kinds[maker[f.name][0]].name} make {f.name} in different places of a row")
        if unmade := [name for name in k.reads if name not in maker]:
            raise PlanError(f"{k.name} reads {unmade[0]}, which no kind of phase makes")
    latest: dict[str, int] = {}
    phases, sources, first = [], [], None   # first: name of the launch's input
    for at, step in enumerate(steps):
        k = kinds[number[step.name]]
        k.kind(1 << 20, 1)
        if not 0 <= step.extra <= MOST_EXTRA:
            raise PlanError(f"{step} has the number {step.extra}, wanted 0 to {MOST_EXTRA}")
        read = [latest.get(name) for name in k.reads]
        for name in (name for name, source in zip(k.reads, read) if source is None and k.needs(name, step.extra)):
            first = first or name
            if name != first:
                raise PlanError(f"{step} reads {name}, which no phase before it makes; the launch's input is {first}")
        nbytes = Counter()
        for name, source in zip(k.reads, read):
            if source is not None:
                nbytes[source] += k.read_bytes(maker[name][1], rows)
        phases.append(Phase(k.name, step.layer, k.units(grid, rows), tuple(Wait(*w) for w in nbytes.items()), k.parts, chosen=k.is_chosen, home=k.home, beside=k.beside))
        sources.append(tuple(read))
        latest |= {f.name: at for f in k.fields}
    phases = [replace(phase, late=_readers_home(at, phases, grid)) if phase.home is None and not phase.chosen else phase for at, phase in enumerate(phases)]
    schedule = Schedule(grid, rows, tuple(phases), deal(phases, grid))
    check(schedule)
    items = [rows * (top_k if k.of_items else 1) for k in kinds]
    row = [sum(f.nbytes for f in k.fields) // VECTOR_BYTES for k in kinds]
    links = tuple(_link(k, maker, row, items[i] * row[i], top_k, ranks) for i, k in enumerate(kinds))
    made = tuple((number[step.name], step.layer) for step in steps)
    words, clearings = _words(schedule, made, sources, [step.extra for step in steps], slots, page)
    most = [1] * len(kinds)
    for own in schedule.programs:
        for at, units in Counter(phase for phase, _ in own).items():
            most[made[at][0]] = max(most[made[at][0]], units)
    read = {made[w.phase][0] for phase in phases for w in phase.waits}   # kinds whose results lie in slots
    return BlockProgram(kinds, links, tuple(most), grid, rows, top_k, schedule, words, steps, tuple(sources), made, clearings, slots,
                        max(items[i] * row[i] for i in read), page, ranks)


def _readers_home(at: int, phases: list[Phase], grid: Grid) -> frozenset[int]:
    """Blocks in which those are at home that read a phase: they load what they read beside it meanwhile."""
    return frozenset((reader.home + unit) % grid.sms for reader in phases if reader.home is not None and reader.units and len(reader.units) < grid.sms
                     and any(w.phase == at for w in reader.waits) for unit in range(len(reader.units)))


def _layout(k: Kind, name: str) -> tuple:
    """Where a field lies: bytes before it, of a row and of itself, and its type."""
    at = [f.name for f in k.fields].index(name)
    return sum(f.nbytes for f in k.fields[:at]), sum(f.nbytes for f in k.fields), k.fields[at].nbytes, k.fields[at].dtype


def _link(k: Kind, maker: dict, row: list[int], vectors: int, top_k: int, ranks: int) -> Link:
    vectors_of = lambda f: f.row // f.per
    inputs = []
    for name in k.reads:
        source, found = maker[name]
        before = [f for i, f in maker.values() if i == source]
        inputs.append((sum(vectors_of(f) for f in before[:before.index(found)]), row[source], vectors_of(found)))
    fields, at, own = [], 0, 0
    for f in k.fields:
        fields.append((at, f.width // f.per, vectors_of(f), _copies(f, ranks), own))
        at, own = at + vectors_of(f), own + f.width // f.per
    if isinstance(k, Route):
        own = 2 * top_k * 4 // VECTOR_BYTES   # ids and weights, in the record alone
    if max(at, own, *(n for numbers in (*inputs, *fields) for n in numbers)) > MOST_VECTORS:
        raise PlanError(f"{k.name} has rows of {at} vectors, wanted at most {MOST_VECTORS}")
    return Link(tuple(inputs), tuple(fields), at, own, vectors)


def _copies(f: Field, ranks: int) -> int:
    """LaunchField.copies."""
    copies = -(-f.row // f.width)
    if ranks == 1:
        return copies
    if copies not in (1, ranks) or f.width // f.per % (ranks if f.scattered else 1):
        raise PlanError(f"{f.name} has rows of {f.width} values, {f.row} when read; {ranks} ranks cannot make them")
    return 0 if f.scattered else copies


def _words(schedule: Schedule, made, sources, extra: list[int], slots: int, page: int) -> tuple[np.ndarray, int]:
    """[blocks, words] and how many phases have slots to clear."""
    phases, free = schedule.phases, [(slot, 0) for slot in range(slots)]   # (slot, phases that must have been cleaned up before it is used)
    taken, needs, heads, clearings = {}, {}, [], 0
    last_reader = {w.phase: at for at, phase in enumerate(phases) for w in phase.waits}
    for at, phase in enumerate(phases):
        if at in last_reader:
            if not free:
                raise PlanError(f"no slot of the exchange is free for {phase}: {slots} are not enough")
            taken[at], needs[at] = free.pop(0)
        ended = [w.phase for w in phase.waits if last_reader[w.phase] == at]
        if len(ended) > MAX_CLEARS:
            raise PlanError(f"{phase} is the last to read {len(ended)} phases, wanted at most {MAX_CLEARS}")
        free += [(taken[source], at + 1) for source in ended]
        clearings += bool(ended)
        slot = lambda source: NO_SLOT if source is None else taken[source]
        reads, clears = [*map(slot, sources[at]), *[NO_SLOT] * MAX_INPUTS][:MAX_INPUTS], [*map(slot, ended), *[NO_SLOT] * MAX_CLEARS][:MAX_CLEARS]
        need = max(needs.get(source, 0) for source in (at, *(w.phase for w in phase.waits)))
        heads.append((made[at][0] | extra[at] << 8, sum(slot << 4 * i for i, slot in enumerate((*reads, taken.get(at, NO_SLOT), *clears))),
                      need | sum(made[source][0] << 16 + 8 * i for i, source in enumerate(ended))))
    rows = []
    for block, program in enumerate(schedule.programs):
        units = [[] for _ in phases]
        for at, unit in program:
            parts = phases[at].parts
            if parts > 1 and unit % parts != block % parts:
                raise PlanError(f"block {block} has part {unit % parts} of {phases[at]}, the other blocks of its cluster count on part {block % parts}")
            units[at].append(unit // parts)
        for phase, own, first in zip(phases, units, rows[block - block % schedule.grid.cluster] if block % schedule.grid.cluster else units):
            if phase.parts > 1 and own != first:
                raise PlanError(f"blocks of one cluster have different tiles of {phase}: {own} and {first}")
        rows.append(units)
    return _pages([[(kind | len(tiles) << 16, slot_word, end, *tiles) for (kind, slot_word, end), tiles in zip(heads, units)] for units in rows], page), clearings


def _pages(programs: list[list[tuple[int, ...]]], page: int) -> np.ndarray:
    """[blocks, words]: of every block the words of its phases, in pages that begin with their number and end with TURN_PAGE where another follows."""
    blocks = []
    for phases in programs:
        pages = [[1]]
        for words in phases:
            if len(words) > page - 2:
                raise PlanError(f"a phase has {len(words)} words of a block's program, wanted at most {page - 2}")
            if len(pages[-1]) + len(words) >= page:
                pages[-1].append(TURN_PAGE)
                pages.append([len(pages) + 1])
            pages[-1] += words
        blocks.append(pages)
    out = np.zeros((len(blocks), max(map(len, blocks)), page), np.uint32)
    for block, pages in enumerate(blocks):
        for number, words in enumerate(pages):
            out[block, number, :len(words)] = words
    return out.reshape(len(blocks), -1)
