"""Phases of the single-launch step: rounds of work of all blocks between two exchanges of activations, read off the tables. docs/megakernel.md.

A unit is what one block does of a phase without asking anyone: some row tiles over some leaves of K, a head, an expert's tiles, a slice of a row.
"""
from dataclasses import dataclass, replace
from math import prod

from . import packing
from .buffers import BY_NAME as BUFFER
from .buffers import DTYPE_BYTES, ROW_AXES
from .config import MXFP4_GROUP, PAGE_SIZE
from .plan import Op, Plan
from .weights import BY_NAME as WEIGHT
from .weights import MMA_K, padded_dims, rank_bytes, rank_shape

TILE_ROWS = 16
PARTS = (4, 2, 1)        # runs of leaves that a product's tiles may be split into, the finest first: a part is what a block reads of x
MIX_SLICES = 8           # blocks that share a row of the hidden size


@dataclass(frozen=True)
class Grid:
    """The machine that a schedule is cut for: `sms` persistent blocks, each with a ring of `ring` bytes, `window` of them in flight at most.

    `cluster`: neighbouring blocks that share the tiles of a phase of as many parts, each with its leaves of all their tiles.
    """

    sms: int = 132
    cluster: int = 1
    ring: int = 160 * 1024
    window: int = 48 * 1024
    copy: int = 8192     # bytes of one bulk copy at most


@dataclass(frozen=True)
class Arrangement:
    """How stages become phases; nothing here changes what is computed.

    carried: mixes and norms whose factor is carried as sums of squares beside the values, so that readers scale for themselves: attn_mix then
        rides on the stores of whoever writes ffn_out, ffn_mix and routed_norm only add up the ranks' parts, spread over all blocks.
    choose_everywhere: every block chooses the experts for itself, and the shared expert's way down leaves the chain.
    """

    carried: frozenset[str] = frozenset()
    choose_everywhere: bool = False


CARRIED = ("attn_mix", "ffn_mix", "routed_norm", "mla_norm")
BY_STAGE = Arrangement()
MERGED = Arrangement(frozenset(CARRIED), True)
# Values that are scaled where they are read are F32 and whole, so carrying costs volume: worth it for one row, less so for eight.
ARRANGEMENTS = {"a phase a stage": BY_STAGE, "all carried": MERGED, "attn_mix a phase": Arrangement(MERGED.carried - {"attn_mix"}, True),
                "both mixes phases": Arrangement(MERGED.carried - {"attn_mix", "ffn_mix"}, True)}
SCALARS = 3 * 4     # bytes that ride beside the values of a tile or slice: p p, p score, p c


@dataclass(frozen=True)
class Wait:
    """What a phase reads of another one's results before it can begin.

    `phase`: position in `Schedule.phases`. `block_bytes`: what each block that works reads of it, for all rows. `crosses`: it comes from all ranks.
    """

    phase: int
    block_bytes: int
    crosses: bool = False


@dataclass(frozen=True)
class Phase:
    """`units`: bytes from memory of each unit. `parts`: unit i is of part i % parts.

    `chosen`: which weights it reads is chosen in this step, by what the first chosen phase of the layer waits for.
    `home`: unit i is of block home + i, modulo the blocks, whatever that block reads: it finds what it left there in an earlier phase.
    `late`: blocks that get a unit only when all others have as many, since they are at home in what comes next.
    `beside`: its units are of the blocks that have none of the phase before it, where there are any.
    """

    name: str
    layer: int | None
    units: tuple[int, ...]
    waits: tuple[Wait, ...]
    parts: int = 1
    steps: int = 0          # k-steps of the longest chain of tensor products in a unit
    chosen: bool = False
    home: int | None = None
    late: frozenset[int] = frozenset()
    beside: bool = False
    does: tuple[str, ...] = ()   # stages, and parts of them, whose own work is on its way

    def __str__(self):
        return self.name if self.layer is None else f"{self.name} (layer {self.layer})"


@dataclass(frozen=True)
class _Source:
    """Who wrote a buffer, whether it crosses ranks, and what one row of it is when read: `row` bytes of values, of which a part may be
    enough, and `beside` bytes of sums, which everyone needs."""

    phase: int
    row: int
    beside: int = 0
    crosses: bool = False


@dataclass(frozen=True)
class PhaseMaker:
    plan: Plan
    rows: int
    grid: Grid
    how: Arrangement
    experts: float
    context: int
    phases: list[Phase]
    written: dict[str, _Source]

    def add(self, op: Op) -> None:
        """Appends the operation's phase, or notes that its readers do it."""
        name, stage = op.stage.name, op.stage
        if stage.moves:                             # rides on the stores of whoever wrote it
            for m in stage.moves:
                source = self.written[m.source]
                self.written[m.target] = replace(source, row=self.row_bytes(m.target), crosses=True)
            return
        if name in self.how.carried and name in ("attn_mix", "mla_norm"):
            value = "ffn_out" if name == "attn_mix" else "mla_q_a"
            source = self.written[self.plan.aliases.get(value, value)]
            tiles = self.row_bytes(value) // 4 // TILE_ROWS
            carried = replace(source, beside=tiles * SCALARS)
            self.written.update({n: carried for n in ("attn_in", "mla_q_latent") if n in stage.outputs})
            return
        if name == "route" and self.how.choose_everywhere:
            logits = self.written[self.plan.aliases.get("router_logits", "router_logits")]
            self.written.update(expert_ids=logits, expert_weights=logits)
        phase = self.phase(op)
        self.phases.append(phase)
        for n in stage.outputs:
            if BUFFER[n].life == "session" or name == "route" and self.how.choose_everywhere and n != "shared_partial":
                continue
            row, beside = self.row_bytes(n), 0
            if name in self.how.carried:            # values as they are, and every block's sums
                row, beside = 2 * row, self.grid.sms * SCALARS
            self.written[self.plan.aliases.get(n, n)] = _Source(len(self.phases) - 1, row, beside)

    def phase(self, op: Op) -> Phase:
        name, rows, dims = op.stage.name, self.rows, padded_dims(self.plan.cfg.dims(), self.plan.tp)
        steps, chosen, parts, does = 0, False, 1, (name,)
        divide = lambda n: 1                        # how many blocks' worth of a buffer one block reads
        if _product(op):
            tiles, leaves, steps = self.tiles(op)
            parts = _parts(tiles, leaves, self.grid.sms)
            units = [leaves // parts * steps * TILE_ROWS * MMA_K * 2] * (tiles * parts)
            divide = lambda n: parts if n == _input(op) else tiles if name == "latent_up" else 1    # shared_parts: its own outputs
        elif name in ("expert_up", "moe_down"):
            each = sum(rank_bytes(WEIGHT[n], dims, self.plan.tp, experts=1) for n in op.stage.weights)
            divide = lambda n: max(1, rows // EXPERT_ROWS) if n in ("moe_latent", "expert_act") else 1   # of its experts' rows only
            pieces = max(1, -(-each // self.grid.copy // 2))             # units of about two copies
            units, chosen = [each // pieces] * round(self.experts * pieces), True
            steps = dims["routed_expert_hidden_size" if name == "expert_up" else "moe_intermediate_size"] // MXFP4_GROUP // 8
            does = ("choose", name) if name == "expert_up" and self.how.choose_everywhere else does
        elif name == "kda_mix":
            heads, slices = dims["kda_num_heads"] // self.plan.tp, max(1, dims["kda_head_dim"] // 8)
            units = [dims["kda_head_dim"] ** 2 * 4 // slices] * (heads * slices)
            divide = lambda n: heads
        elif name == "mla_attend":
            pages, page = -(-self.context // PAGE_SIZE), PAGE_SIZE * dims["mla_cache_dim"]   # of a cache of bytes
            run = max(1, -(-pages // self.grid.sms))   # pages of a block: a whole number, at fixed places
            units = [page * min(run, pages - first) for first in range(0, pages, run)]
        elif name in SPREAD:
            units = [0] * (self.grid.sms if name in self.how.carried else rows * MIX_SLICES)
            does = ("add_parts",) if name in self.how.carried else does
            divide = lambda n: len(units)
        else:
            units = [0] * rows
        if name == "route":
            does = ("shared_down",) if self.how.choose_everywhere else does
        waits: dict[int, Wait] = {}
        for n in self.reads(op):
            source = self.written[self.plan.aliases.get(n, n)]
            before = waits.get(source.phase, Wait(source.phase, 0))
            waits[source.phase] = Wait(source.phase, before.block_bytes + rows * (source.row // divide(n) + source.beside), before.crosses or source.crosses)
        return Phase(name, op.layer, tuple(units), tuple(waits.values()), parts, steps, chosen, does=does)

    def reads(self, op: Op) -> list[str]:
        """What its blocks read of other phases. Closed blocks and the prefix sum stay with whoever mixes; a choice made everywhere is its reader's."""
        own = {"res_blocks", "hidden"}
        names = [n for n in op.stage.inputs if BUFFER[n].life in ("step", "record") and n not in own and self.plan.aliases.get(n, n) in self.written]
        if self.how.choose_everywhere:
            if op.stage.name == "route":
                names.remove("router_logits")
            if op.stage.name == "moe_down":
                names = [n for n in names if n not in ("expert_ids", "expert_weights")]
        return names

    def tiles(self, op: Op) -> tuple[int, int, int]:
        """(tiles of 16 rows, leaves of K, k-steps of a leaf) of a stage's product on this rank."""
        packed, tp = _product(op), self.plan.tp
        dims = padded_dims(self.plan.cfg.dims(), tp)
        if packed.how in (packing.HEADS, packing.HEADS_TURNED):     # half of every head's rows, against inputs that no rank cuts
            outputs, inputs = ("v_head_dim", "kv_lora_rank") if packed.how == packing.HEADS else ("kv_lora_rank", "qk_nope_head_dim")
            return dims["num_attention_heads"] // tp * (dims[outputs] // TILE_ROWS), *packing.inputs_leaves_and_steps(dims[inputs])
        rows = [rank_shape(WEIGHT[name], dims, tp)[0] for name in packed.sources]
        return sum(-(-n // TILE_ROWS) for n in rows), *packing.leaves_and_steps(packed.sources[-1], self.plan.cfg, tp)

    def row_bytes(self, name: str) -> int:
        """One row of a buffer on this rank, all ranks' parts of a stacked one, in bytes."""
        dims, buffer = padded_dims(self.plan.cfg.dims(), self.plan.tp) | {"ranks": self.plan.tp, "three": 3}, BUFFER[name]
        n = prod(dims[axis] for axis in buffer.shape if axis not in _NOT_OF_A_ROW)
        return n * DTYPE_BYTES[buffer.dtype] // (self.plan.tp if buffer.cut is not None else 1)


_NOT_OF_A_ROW = (*ROW_AXES, "num_kda_layers", "num_mla_layers", "num_hidden_layers", "num_res_blocks")
EXPERT_ROWS = 3    # rows whose experts a block has, about: at 8 rows it has one or two experts, most of them of one row
# Stages that add or scale rows of the hidden size or the latent: each row is spread over MIX_SLICES blocks.
SPREAD = ("attn_mix", "ffn_mix", "output_mix", "routed_norm", "mla_norm", "embed_sum", "dense_sum")


def _product(op: Op) -> packing.Packed | None:
    """The BF16 matrix that a stage multiplies all rows by; None if it has none."""
    found = [p for p in packing.PACKED.get(op.stage.name, ()) if p.how in (packing.TILES, packing.PAIRS, packing.HEADS, packing.HEADS_TURNED)]
    return found[0] if found else None


def _input(op: Op) -> str:
    """The buffer that a product multiplies: the first BF16 one it reads."""
    return next(n for n in op.stage.reads if BUFFER[n].dtype == "bf16")


def _parts(tiles: int, leaves: int, sms: int) -> int:
    """In how many runs of leaves the blocks share a product: the fewest among those that give the busiest block the least."""
    fit = [p for p in PARTS if leaves % p == 0 and (p == 1 or leaves // p >= 4)]
    load = {p: -(-tiles // (sms // p)) / p for p in fit}
    return min(fit, key=lambda p: (round(load[p], 3), p))
