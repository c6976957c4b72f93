"""A schedule as the words that the blocks of a single launch read. kernels_cu/launch_core.cuh says what they mean.

So far phases are products, one behind the other.
"""
from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from .config import MXFP4_GROUP, K3Config
from .errors import PlanError
from .packing import leaves_and_steps
from .phases import TILE_ROWS, Grid, Phase, Wait
from .schedule import Schedule, check, deal
from .weights import BY_NAME, MMA_K, TREE_LEAVES

VECTOR = 8            # BF16 values of a vector that is its own flag
NO_SLOT = 15
SLOTS = 4             # of the exchange: two phases lie between clearing one and using it again
MAX_TOKENS = 8


@dataclass(frozen=True)
class Product:
    """A matrix of packed tiles: `parts` blocks of a cluster share each tile's leaves."""

    name: str
    tiles: int
    leaves: int
    steps: int
    parts: int = 1

    @property
    def inputs(self) -> int:
        return self.leaves * self.steps * MMA_K

    @property
    def outputs(self) -> int:
        return self.tiles * TILE_ROWS

    @property
    def nbytes(self) -> int:
        return self.outputs * self.inputs * 2

    def units(self, grid: Grid) -> tuple[int, ...]:
        return (self.nbytes // self.tiles // self.parts,) * (self.tiles * self.parts)

    def kind(self, copy: int) -> str:
        if self.steps % 2 or TREE_LEAVES % (self.leaves // self.parts):
            raise PlanError(f"{self.name} has {self.leaves} leaves of {self.steps} k-steps in {self.parts} parts; "
                            f"wanted an even number of steps and at most {TREE_LEAVES} leaves a block, a power of two")
        return f"LaunchProduct<{self.leaves}, {self.steps}, {self.parts}, {copy}>"


@dataclass(frozen=True)
class ExpertUp:
    """w1 and w3 of the chosen experts, `pairs` pairs of tiles each. Its results are rows of items: (row, place) pairs."""

    name: str
    pairs: int
    leaves: int
    groups: int
    parts: int = 1

    @property
    def inputs(self) -> int:
        return self.leaves * self.groups * MXFP4_GROUP

    @property
    def outputs(self) -> int:
        return self.pairs * TILE_ROWS

    @property
    def expert_leaves(self) -> int:
        """Packed leaves of an expert (repack.leaf_bytes each)."""
        return self.pairs * 2 * self.leaves

    def units(self, grid: Grid) -> tuple[int, ...]:
        return (0,) * grid.sms      # every block takes its share of whatever was chosen

    def kind(self, copy: int) -> str:
        if TREE_LEAVES % (self.leaves // self.parts):
            raise PlanError(f"{self.name} has {self.leaves} leaves in {self.parts} parts; wanted at most {TREE_LEAVES} a block, a power of two")
        return f"LaunchExpertUp<{self.leaves}, {self.groups}, {self.pairs}, {self.parts}, {copy}>"


@dataclass(frozen=True)
class ExpertDown:
    """w2 of the chosen experts, one leaf of K: items in, rows out."""

    name: str
    tiles: int
    groups: int
    parts: int = 1

    @property
    def inputs(self) -> int:
        return self.groups * MXFP4_GROUP

    @property
    def outputs(self) -> int:
        return self.tiles * TILE_ROWS

    @property
    def expert_leaves(self) -> int:
        return self.tiles

    def units(self, grid: Grid) -> tuple[int, ...]:
        pairs = -(-self.tiles // 2)
        if pairs > grid.sms:
            raise PlanError(f"{self.name} has {pairs} pairs of tiles for {grid.sms} blocks; wanted one a block at most")
        return (0,) * pairs

    def kind(self, copy: int) -> str:
        return f"LaunchExpertDown<{self.groups}, {self.tiles}, {copy}>"


Kind = Product | ExpertUp | ExpertDown


@dataclass(frozen=True)
class Link:
    """How a phase's results lie in the exchange, in vectors of a row: LaunchLink."""

    in_row: int
    width: int
    copies: int
    row: int


@dataclass(frozen=True)
class BlockProgram:
    """`words` [blocks, n]. `weights`: for each phase which (kind, layer) it multiplies by. `slot_vectors`: of a slot of the exchange."""

    kinds: tuple[Kind, ...]
    links: tuple[Link, ...]
    grid: Grid
    rows: int
    top_k: int
    words: np.ndarray
    weights: tuple[tuple[int, int], ...]
    clearings: int
    slot_vectors: int

    @property
    def phases(self) -> int:
        return len(self.weights)

    @property
    def tokens(self) -> int:
        """Rows that the kernel has room for."""
        return 1 << (self.rows - 1).bit_length()

    @property
    def record_vectors(self) -> int:
        return max(self.rows_out(kind) * link.width for kind, link in enumerate(self.links))

    def rows_out(self, kind: int) -> int:
        """Rows of a phase's results."""
        return self.rows * (self.top_k if isinstance(self.kinds[kind], ExpertUp) else 1)


def dense_products(cfg: K3Config, tp: int, cluster: int = 1) -> tuple[Product, ...]:
    """The BF16 products of a rank's KDA and MoE layer that all rows go through one after the other."""
    dims = cfg.dims()
    own = lambda name: dims[BY_NAME[name].shape[0]] // (tp if BY_NAME[name].cut and BY_NAME[name].cut.axis == 0 else 1)
    tiles = lambda names: sum(-(-own(n) // TILE_ROWS) for n in names.split())

    def make(name, names):
        leaves, steps = leaves_and_steps(names.split()[-1], cfg, tp)
        return Product(name, tiles(names), leaves, steps, cluster if leaves % cluster == 0 else 1)

    return (make("kda_in", "kda_f_a_proj kda_b_proj kda_q_proj kda_k_proj kda_v_proj kda_g_proj"), make("o_proj", "o_proj"),
            make("moe_in", "shared_gate_proj shared_up_proj router latent_down"), make("latent_up", "latent_up"))


def with_experts(cfg: K3Config, tp: int, cluster: int, expert_parts: int | None = None) -> tuple[Kind, ...]:
    """The same, and the routed experts where they belong. `expert_parts`: blocks that share a unit of w1 and w3, 1 or the cluster; None: the cluster."""
    dims, (kda_in, o_proj, moe_in, latent_up) = cfg.dims(), dense_products(cfg, tp, cluster)
    width, latent = dims["moe_intermediate_size"] // tp, dims["routed_expert_hidden_size"]
    leaves, groups = leaves_and_steps("expert_w2", cfg, tp)
    if leaves != 1:
        raise PlanError(f"a rank of {tp} holds {leaves} leaves of w2; wanted one")
    return (kda_in, o_proj, moe_in, ExpertUp("expert_up", -(-width // TILE_ROWS), *leaves_and_steps("expert_w1", cfg, tp), expert_parts or cluster),
            ExpertDown("moe_down", -(-latent // TILE_ROWS), groups), latent_up)


def chain(kinds: tuple[Kind, ...], layers: int, rows: int, grid: Grid, top_k: int = 0) -> BlockProgram:
    """All kinds in a row, `layers` times. Results that are fewer than the next inputs are repeated; of more the first are used.

    Raises PlanError for what the kernel cannot do.
    """
    if not 1 <= rows <= MAX_TOKENS or grid.sms % grid.cluster:
        raise PlanError(f"{rows} rows on {grid.sms} blocks in clusters of {grid.cluster}; wanted 1 to {MAX_TOKENS} rows and whole clusters")
    for k in kinds:
        k.kind(1 << 20)
    phases = tuple(Phase(k.name, layer, k.units(grid), (), k.parts) for layer in range(layers) for k in kinds)
    phases = tuple(replace(p, waits=(Wait(i - 1, kinds[i % len(kinds)].inputs * 2 * rows // p.parts),)) if i else p for i, p in enumerate(phases))
    schedule = Schedule(grid, rows, phases, deal(phases, grid))
    check(schedule)
    row = [max(kinds[(i + 1) % len(kinds)].inputs, k.outputs) // VECTOR for i, k in enumerate(kinds)]
    links = tuple(Link(row[i - 1], k.outputs // VECTOR, ceil(row[i] * VECTOR / k.outputs), row[i]) for i, k in enumerate(kinds))
    words, clearings = _words(schedule, len(kinds))
    slot = max(n * rows * (top_k if isinstance(k, ExpertUp) else 1) for n, k in zip(row, kinds))
    return BlockProgram(kinds, links, grid, rows, top_k, words, tuple((i % len(kinds), i // len(kinds)) for i in range(len(phases))), clearings, slot)


def _words(schedule: Schedule, kinds: int) -> tuple[np.ndarray, int]:
    """[blocks, words] and how many phases have a slot to clear."""
    phases, free = schedule.phases, [(slot, 0) for slot in range(SLOTS)]   # (slot, phases that must have been cleaned up before it is used)
    taken, needs, heads, clearings = {}, {}, [], 0
    readers = {}
    for at, phase in enumerate(phases):
        for w in phase.waits:
            readers[w.phase] = at
    for at, phase in enumerate(phases):
        source = phase.waits[-1].phase if phase.waits else None
        clear = NO_SLOT
        if at in readers:
            if not free:
                raise PlanError(f"no slot of the exchange is free for {phase}: {SLOTS} are not enough")
            taken[at], needs[at] = free.pop(0)
        if source is not None and readers[source] == at:
            clear = taken[source]
            free.append((clear, at + 1))
            clearings += 1
        need = max(needs.get(at, 0), needs.get(source, 0))
        heads.append((at % kinds | (NO_SLOT if source is None else taken[source]) << 4 | taken.get(at, NO_SLOT) << 8 | clear << 12, need))
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
    rows = [[word for (head, need), tiles in zip(heads, units) for word in (head | len(tiles) << 16, need, *tiles)] for units in rows]
    out = np.zeros((len(rows), -(-max(map(len, rows)) // 4) * 4), np.uint32)
    for block, row in enumerate(rows):
        out[block, :len(row)] = row
    return out, clearings
