"""Kinds of phases of a single launch: what a unit of each is, what it reads, and what it leaves in the exchange.

kernels_cu/launch_product.cuh, launch_normed.cuh, launch_choice.cuh, launch_experts.cuh and launch_kda.cuh run them.
"""
from dataclasses import dataclass, field, replace

from .config import MXFP4_GROUP
from .errors import PlanError
from .phases import MIX_SLICES, TILE_ROWS, Grid
from .weights import MMA_K, TREE_LEAVES

VECTOR_BYTES = 16     # a vector that is its own flag
MAX_TOKENS = 8        # rows of a launch at most
BYTES = {"bf16": 2, "f32": 4}
VECTOR = VECTOR_BYTES // BYTES["bf16"]   # BF16 values of it


@dataclass(frozen=True)
class Field:
    """Part of a phase's results: of every row `width` values are made, and written again until they are `row`, as what a rank gathers or stacks would
    look like if it were all ranks. Where there are several, each writes its own once into the rows of all. `scattered`: each gives every other an equal part of
    them, and the row is made of such parts."""

    name: str
    dtype: str
    width: int
    row: int
    scattered: bool = False

    def __post_init__(self):
        if self.width % self.per or self.row % self.per:
            raise PlanError(f"{self.name} has rows of {self.width} values, {self.row} when read; wanted multiples of {self.per}, a vector of {self.dtype}")

    @property
    def per(self) -> int:
        """Values of a vector."""
        return VECTOR_BYTES // BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Of a row as it is read."""
        return self.row * BYTES[self.dtype]


@dataclass(frozen=True)
class Kind:
    """`reads`: names of fields, of which other phases or the launch's input are the latest makers. `fields`: what it makes itself.

    A subclass has `kind(copy, most)`, its C++ type for bulk copies of so many bytes and blocks of at most `most` units.
    """

    name: str
    reads: tuple[str, ...] = field(default=(), kw_only=True)
    fields: tuple[Field, ...] = field(default=(), kw_only=True)
    parts = 1          # blocks of a cluster that share a unit
    home = None        # of its first unit, a block: the others follow (phases.Phase)
    is_chosen = False  # which weights it reads is known when experts are chosen
    beside = False     # its units are of the blocks that the phase before it leaves idle (phases.Phase)
    of_items = False   # its results are rows of (row, place) pairs

    def units(self, grid: Grid, rows: int) -> tuple[int, ...]:
        """Bytes of weights of each unit (phases.Phase). Here: every block has one, without weights or with a share that only the choice of experts tells."""
        return (0,) * grid.sms

    def read_bytes(self, source: Field, rows: int) -> int:
        """What a block that works reads of one of its fields."""
        return source.nbytes * rows

    def needs(self, name: str, extra: int) -> bool:
        """Whether a phase with this number of the kind's own (block_program.Step) reads the field `name`."""
        return True


@dataclass(frozen=True)
class Product(Kind):
    """A matrix of packed tiles: `parts` blocks of a cluster share each tile's leaves.

    firsts: the first tile of every field. situ: what it reads are gates and ups, tiles of 16 in turn, F32. norm: the round of sums (launch_mixes.Mix) whose fields it
    reads and norms for itself; its own number is then how many phases before it that was, and from bit 4 on whether closed blocks are mixed in.
    adds: parts of the last field that it reads, which are added to its rows; 0: none. beside: as of a Kind.
    """

    tiles: int
    leaves: int
    steps: int
    parts: int = 1
    firsts: tuple[int, ...] = field(default=(0,), kw_only=True)
    situ: bool = field(default=False, kw_only=True)
    norm: Kind | None = field(default=None, kw_only=True)
    adds: int = field(default=0, kw_only=True)
    beside: bool = field(default=False, kw_only=True)

    @property
    def inputs(self) -> int:
        return self.leaves * self.steps * MMA_K

    @property
    def outputs(self) -> int:
        return self.tiles * TILE_ROWS

    @property
    def nbytes(self) -> int:
        return self.outputs * self.inputs * 2

    def units(self, grid: Grid, rows: int) -> tuple[int, ...]:
        return (self.nbytes // self.tiles // self.parts,) * (self.tiles * self.parts)

    def read_bytes(self, source: Field, rows: int) -> int:
        if self.adds and source.name == self.reads[-1]:
            return self.adds * TILE_ROWS * BYTES["f32"] * rows
        if self.norm and source.width < self.inputs:
            return source.nbytes * rows   # sums
        return (self.inputs // self.parts * BYTES[source.dtype] if self.parts > 1 else source.nbytes) * rows

    def kind(self, copy: int, most: int) -> str:
        odd = copy // (TILE_ROWS * MMA_K * BYTES["bf16"])   # steps of a copy, which an odd number must be
        if self.steps % 2 and self.steps > odd or TREE_LEAVES % (self.leaves // self.parts) or self.leaves < TREE_LEAVES and self.parts > 1:
            raise PlanError(f"{self.name} has {self.leaves} leaves of {self.steps} k-steps in {self.parts} parts; wanted an even number of steps or at most {odd}, "
                            f"and {TREE_LEAVES} leaves or less in one part, a power of two")
        types = self.output_type(), self.input_type(most), self.add_type(most)
        return f"LaunchProduct<{self.leaves}, {self.steps}, {self.parts}, {copy}, {', '.join(types)}>"

    def output_type(self) -> str:
        return _out(self.firsts, self.fields)

    def input_type(self, most: int) -> str:
        return f"LaunchNormed<{self.norm.shape(1)}>" if self.norm else "LaunchSitu" if self.situ else "LaunchPlain"

    def add_type(self, most: int) -> str:
        return f"LaunchAdd<{self.adds}, {self.tiles}, {most}, {len(self.reads) - 1}>" if self.adds else "LaunchNothing"


@dataclass(frozen=True)
class ForcedChoice(Kind):
    """A choice of experts that lies in memory, made beforehand."""

    values: int   # of the field that it waits for, F32
    home = 0

    def kind(self, copy: int, most: int) -> str:
        return f"LaunchForced<{self.values * BYTES['f32'] // VECTOR_BYTES}>"


@dataclass(frozen=True)
class Route(Kind):
    """The choice of experts by the router's logits, in every block."""

    experts: int
    top_k: int
    home = 0

    def kind(self, copy: int, most: int) -> str:
        if self.experts % 4 or self.top_k % 2:
            raise PlanError(f"{self.name} chooses {self.top_k} of {self.experts} experts; wanted an even number of a multiple of 4")
        return f"LaunchRoute<{self.experts}, {self.top_k}>"


@dataclass(frozen=True)
class ExpertUp(Kind):
    """w1 and w3 of the chosen experts, `pairs` pairs of tiles each. Its results are rows of items: (row, place) pairs."""

    pairs: int
    leaves: int
    groups: int
    parts: int = 1
    is_chosen, of_items = True, True

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

    def read_bytes(self, source: Field, rows: int) -> int:
        return self.inputs // self.parts * 2 * rows

    def kind(self, copy: int, most: int) -> str:
        if TREE_LEAVES % (self.leaves // self.parts):
            raise PlanError(f"{self.name} has {self.leaves} leaves in {self.parts} parts; wanted at most {TREE_LEAVES} a block, a power of two")
        return f"LaunchExpertUp<{self.leaves}, {self.groups}, {self.pairs}, {self.parts}, {copy}>"


@dataclass(frozen=True)
class ExpertDown(Kind):
    """w2 of the chosen experts: items in, rows out."""

    tiles: int
    leaves: int
    groups: int
    is_chosen = True

    @property
    def inputs(self) -> int:
        return self.leaves * self.groups * MXFP4_GROUP

    @property
    def outputs(self) -> int:
        return self.tiles * TILE_ROWS

    @property
    def expert_leaves(self) -> int:
        return self.tiles * self.leaves

    def units(self, grid: Grid, rows: int) -> tuple[int, ...]:
        pairs = -(-self.tiles // 2)
        if pairs > grid.sms:
            raise PlanError(f"{self.name} has {pairs} pairs of tiles for {grid.sms} blocks; wanted one a block at most")
        return (0,) * pairs

    def kind(self, copy: int, most: int) -> str:
        return f"LaunchExpertDown<{self.leaves}, {self.groups}, {self.tiles}, {copy}, {_out((0,), self.fields)}>"


@dataclass(frozen=True)
class Kda(Kind):
    """The middle of KDA over `heads` heads of this rank: a head of a sequence, which a row opens, is a unit. State and records lie in memory."""

    heads: int
    dim: int
    width: int   # of the conv
    home = MAX_TOKENS * MIX_SLICES   # blocks that have no slices of mixes, where there are enough

    def units(self, grid: Grid, rows: int) -> tuple[int, ...]:
        return (0,) * (rows * self.heads)

    def read_bytes(self, source: Field, rows: int) -> int:
        return source.nbytes * rows // (1 if self.reads.index(source.name) == 0 else self.heads)   # the low-rank decay is every head's

    def kind(self, copy: int, most: int) -> str:
        return f"LaunchKda<{self.dim}, {self.width}, {self.heads}>"


def _out(firsts: tuple[int, ...], fields: tuple[Field, ...]) -> str:
    """Where a product's tiles go."""
    segments = (f"LaunchSegment<{first}, {str(made.dtype == 'f32').lower()}>" for first, made in zip(firsts, fields, strict=True))
    return f"LaunchOut<{', '.join(segments)}>"


def linked(kinds: tuple[Kind, ...]) -> tuple[Kind, ...]:
    """Kinds that feed one another in a ring, with fields of BF16: results that are fewer than the next inputs are repeated; of more the first are used.
    A choice makes nothing, and reads what the next kind reads."""
    real = [k for k in kinds if not isinstance(k, ForcedChoice)]
    row = {k.name: max(real[(i + 1) % len(real)].inputs, k.outputs) for i, k in enumerate(real)}
    made = {k.name: replace(k, reads=(real[i - 1].name,), fields=(Field(k.name, "bf16", k.outputs, row[k.name]),)) for i, k in enumerate(real)}
    before = {k.name: real[real.index(kinds[(i + 1) % len(kinds)]) - 1].name for i, k in enumerate(kinds) if isinstance(k, ForcedChoice)}
    return tuple(made[k.name] if k.name in made else replace(k, reads=(before[k.name],)) for k in kinds)
