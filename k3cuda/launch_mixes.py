"""Mixes and norms of rows as kinds of phases of a single launch: their rounds. kernels_cu/launch_mix.cuh runs them."""
from dataclasses import dataclass, field, replace

from .draft_config import PREFIX
from .errors import PlanError
from .launch_kinds import VECTOR, Field, Kind
from .phases import MIX_SLICES, Grid
from .plan import Taps
from .weights import tree_leaves

CLOSED, SUMS, OUT = "LaunchMixClosed", "LaunchMixSums", "LaunchMixOut"


@dataclass(frozen=True)
class Mix(Kind):
    """A round of a mix or a norm over rows of `n` values: `rank_parts` of them join, `blocks` closed ones at most are mixed in. `stage`: whose rounds they are.
    `is_last`: of sums behind which there is no third round, since their readers norm for themselves. `most_slices`: of a row. `taps`: of a row, where a draft
    model reads what the round makes (`tapped`).

    A phase's own number: how many blocks are closed, and from bit 4 on whether the sum before it becomes one.
    """

    round: str
    n: int
    rank_parts: int
    blocks: int
    stage: str = field(kw_only=True)
    is_last: bool = field(default=False, kw_only=True)
    most_slices: int = field(default=MIX_SLICES, kw_only=True)
    taps: int = field(default=0, kw_only=True)
    home = 0

    @property
    def leaves(self) -> int:
        return tree_leaves(self.n)

    @property
    def slices(self) -> int:
        """Of a row: whole chunks of its tree."""
        return min(self.leaves, self.most_slices)

    def units(self, grid: Grid, rows: int) -> tuple[int, ...]:
        return (0,) * (rows * self.slices)

    def read_bytes(self, source: Field, rows: int) -> int:
        return source.nbytes // (self.slices if self.round == SUMS and self.reads.index(source.name) == 0 else 1)   # of the slice, or of all sums

    def needs(self, name: str, extra: int) -> bool:
        return self.round != SUMS or self.reads.index(name) == 0 or extra & 15 > 0   # scores of closed blocks: where there are some

    def kind(self, copy: int, most: int) -> str:
        if self.n // self.slices % VECTOR:
            raise PlanError(f"{self.name} has slices of {self.n // self.slices} values; wanted multiples of {VECTOR}")
        return f"LaunchMixRound<{self.round}<{self.shape(most)}{', true' if self.is_last else ''}>, {self.rank_parts}, {self.taps}>"

    def shape(self, most: int) -> str:
        """Its C++ shape, of blocks that have at most `most` slices."""
        return f"LaunchMixShape<{self.n}, {self.leaves}, {self.blocks}, {self.slices}, {most}>"


def mix_rounds(name: str, n: int, rank_parts: int, blocks: int, reads: str, out: Field | None, most_slices: int = MIX_SLICES) -> tuple[Mix, ...]:
    """The rounds `name`_closed (where there are closed blocks), `name`_sums and `name`, which leaves `out`.

    out: None where its reader norms for itself: the sums are the last round then, and leave what that reads (`Product.norm`).
    """
    make = lambda suffix, which, *, reads, fields, **more: Mix(name + suffix, which, n, rank_parts, blocks, stage=name, reads=reads, fields=fields, most_slices=most_slices, **more)
    leaves, of_row = tree_leaves(n), lambda what, width: Field(f"{name}_{what}", "f32", width, width)
    closed = of_row("closed", leaves * 16)
    first, read = ((make("_closed", CLOSED, reads=(), fields=(closed,)),), (reads, closed.name)) if blocks else ((), (reads,))
    if out is None:   # sums, and a mixture's two scalars behind them
        fields = (of_row("sums", leaves * 4 + 4), of_row("joined", n), *((of_row("mixture", n),) if blocks else ()))
        return (*first, make("_sums", SUMS, reads=read, fields=fields, is_last=True))
    sums = of_row("sums", leaves * 4)
    return (*first, make("_sums", SUMS, reads=read, fields=(sums,)), make("", OUT, reads=(sums.name,), fields=(out,)))


def tapped(kinds: tuple[Kind, ...], taps: Taps | None) -> tuple[Kind, ...]:
    """The same kinds, of which the round of attn_mix that makes what a draft model reads leaves it. Raises PlanError where there is no such round."""
    if taps is None:
        return kinds
    leaves = lambda k: isinstance(k, Mix) and (k.stage, k.round) == ("attn_mix", SUMS if taps.stream == PREFIX else OUT)
    if not any(map(leaves, kinds)):
        raise PlanError(f"no phase makes the {taps.stream} stream of taps")
    return tuple(replace(k, taps=len(taps.layers)) if leaves(k) else k for k in kinds)


def normed_reads(sums: Mix) -> tuple[str, ...]:
    """Fields of the last round of a mix in the order of a product that norms for itself."""
    made, joined, *mixture = (f.name for f in sums.fields)
    return (joined, made, *mixture)
