"""A whole step of one rank as the program of a single launch: from token ids to logits. kernels_cu/launch_step.cuh has the phases before and behind the layers.

What the launch of a `step_program` is given (launch_source.arguments), all of it device memory that a replay may find changed:

- row_slot, logit_rows: the input buffers of these names, int32, of at least `program.rows` entries. Rows of padding (-1 in row_slot) are behind all
  others. They go through all phases like the others, but choose no experts, have no state, and write no cache row; no other row depends on them.
- result: the buffer `logits`, F32 [head_rows, vocab_size]. Row i is written where logit_rows[i] is not negative, from row logit_rows[i] of the step.
- input: null.
- block_rows: rows that a closed block in `res_blocks` has room for (MAX_ROWS in an arena).
- exchange: uint32 [slots, slot_vectors, 4], every word 0x80008000 before the first launch; counts: COUNT_BYTES of zeros before the first launch.
  Launches leave both as the next one needs them. One of them must not be used by two launches at the same time.
- programs: `program.words`, uint32, as it is.
- weights: uint64 [phases]; entry i is the address for `program.weights[i]`, a (kind, layer) pair. `launch_operands.operand(plan, program.kinds[kind], layer)`
  says of which operation's packed arrays, and whether the entry is the address of a packed array itself or of a structure in device memory:

  | structure | fields |
  |---|---|
  | LaunchTokens | token_ids: the input buffer. table: packed array 0 (embed_tokens, this rank's rows). hidden: the buffer, whose live rows begin with zeros |
  | LaunchMix | attn_mix, ffn_mix, output_mix: score and weight are packed arrays 0 and 1; hidden and blocks are the buffers hidden and res_blocks, taps the buffer of that name from the mix's own tap on, or null. routed_norm: score, hidden, blocks, taps are null, weight is packed array 0 |
  | KdaMix | row_slot: the buffer. rows: program.rows. heads: this rank's. qkv, beta, k, v, decay: the records of these names (kda_...) of this layer. state, conv_state: of this layer. f_b, a_log, dt_bias, q_conv, k_conv, v_conv, o_norm: packed arrays 0 to 6. f_a, out_gate, out: null. lower_bound, l2_eps, eps: gate_lower_bound, L2NORM_EPS, rms_norm_eps. advances: 0 |
  | LaunchMla | one for mla_norm, mla_attend and mla_combine of a layer. Both parts: row_slot, row_position, page_table: the buffers; slot_pages: theirs; rows: program.rows; cache_scale: of the layer. attend: map, first, score_scale, partial, top_sum as in stages/mla.cuh; query, next, out: null. write: query_norm, latent_norm: packed arrays 0 and 1; cache: of this layer; eps: MLA_NORM_EPS; query, latent, query_out: null |

  Of shared_down it is packed array 1 of stage route, of route array 0. dense_sum has none: its entry is null. Every other kind (products, experts) has packed array 0 of its stage.

`hidden` and `res_blocks` are left as the step has them at its end; that of output rows has joined what the last layer left. All other step buffers stay untouched.
"""
from dataclasses import dataclass

from .block_program import PAGE_WORDS, BlockProgram, program
from .draft_config import ATTN_RES
from .errors import PlanError
from .launch_kinds import BYTES, Field, Kind, Product
from .launch_layer import INPUT, LAYER_SLOTS, MERGED_ROWS, layer_kinds, layer_steps
from .launch_mixes import Mix, normed_reads, tapped
from .launch_mla import both_kinds, mla_kinds, of_its_sort
from .launch_rank import own_tiles, product
from .phases import TILE_ROWS, Grid
from .plan import Plan
from .stages import STAGES

MOST_X = 120 * 1024   # bytes of a block's share of what a product multiplies: more leaves the ring too few copies
COLLECTIVE = {name: s.name for s in STAGES for m in s.moves for name in (m.source, m.target)}   # of what is moved, as it is made and as it arrives
DENSE, MOE = ("dense_up", "dense_down", "dense_sum"), ("moe_in", "route", "expert_up", "moe_down", "shared_down", "routed_norm_sums", "routed_norm", "latent_up")


@dataclass(frozen=True)
class RowSlices(Kind):
    """Rows of `n` values in slices that are at home where those of mixes are; `rank_parts` of them are added up."""

    n: int
    slices: int
    rank_parts: int
    home = 0

    def units(self, grid: Grid, rows: int) -> tuple[int, ...]:
        return (0,) * (rows * self.slices)

    def read_bytes(self, source: Field, rows: int) -> int:
        return source.nbytes // self.slices


@dataclass(frozen=True)
class Embed(RowSlices):
    """Rows of the embedding, of `vocab` that this rank has; the prefix sum begins at zero."""

    vocab: int

    def kind(self, copy: int, most: int) -> str:
        return f"LaunchEmbed<{self.n}, {self.slices}, {self.rank_parts}, {self.vocab}>"


@dataclass(frozen=True)
class PartsSum(RowSlices):
    """The sum of the ranks' parts, neighbours first."""

    def kind(self, copy: int, most: int) -> str:
        return f"LaunchPartsSum<{self.n}, {self.slices}, {self.rank_parts}>"


@dataclass(frozen=True)
class Head(Product):
    """The product of the head, whose rows go where logit_rows says."""

    def output_type(self) -> str:
        return "LaunchLogits"


def step_program(plan: Plan, rows: int, grid: Grid, *, cache: int, rank_parts: int, ranks: int = 1, merged: bool | None = None, page: int = PAGE_WORDS,
                 layers: int | None = None) -> BlockProgram:
    """The program of a step of `rows` rows (a bucket: 1, 2, 4 or 8), all layers of the model.

    Args:
        grid: blocks and clusters of the device.
        cache: bytes of a value of the MLA cache, 1 (FP8) or 2 (BF16).
        rank_parts: ranks whose parts a sum over ranks has: plan.tp.
        ranks: as many, where they exchange them; 1: the launch runs one rank, which looped back stands for all.
        merged: products norm for themselves what they read; None: where that is faster, up to MERGED_ROWS rows, and no draft model reads mixtures: nobody makes
            them whole then.
        page: words of a page of a block's program.
        layers: the first ones that the step has, and then its output; None: all.
    Raises PlanError where the launch can't run such a step: a cache that is split over ranks, mixtures that are merged and read, sizes that its kinds of
    phases do not fit. A step then runs as the standard path has it.
    """
    cfg = plan.cfg
    if plan.dcp > 1:
        raise PlanError("a step of one launch has no cache that ranks hold together")
    if merged is None:
        merged = rows <= MERGED_ROWS and not (plan.taps and plan.taps.stream == ATTN_RES)
    kinds = tapped(step_kinds(plan, rows, grid, cache=cache, rank_parts=rank_parts, merged=merged), plan.taps)
    for k in kinds:
        if isinstance(k, Product) and (x := k.inputs // k.parts * BYTES["bf16"] * rows) > MOST_X:
            raise PlanError(f"{k.name} multiplies {rows} rows of {k.inputs // k.parts} values, {x >> 10} KB; wanted at most {MOST_X >> 10} KB")
    of_sort = of_its_sort(cfg, mla_kinds(cfg, plan.tp, grid.cluster, rows=rows, cache=cache, blocks=grid.sms))
    has = lambda k, layer: of_sort(k, layer) and k.name not in (MOE if cfg.is_dense(layer) else DENSE)
    first, behind = kinds[:1], tuple(k for k in kinds if isinstance(k, Head) or isinstance(k, Mix) and k.stage == "attn_mix" and k is not kinds[1])
    steps = layer_steps(plan, kinds[1:-1], range(layers or cfg.num_hidden_layers), has, first, behind)
    used = {step.name for step in steps}
    return program(tuple(k for k in kinds if k.name in used), steps, rows, grid, cfg.num_experts_per_token, slots=LAYER_SLOTS, page=page, ranks=ranks)


def step_kinds(plan: Plan, rows: int, grid: Grid, *, cache: int, rank_parts: int, merged: bool) -> tuple[Kind, ...]:
    """All kinds of a step in their order; arguments as of step_program."""
    cfg, tp, cluster, dims = plan.cfg, plan.tp, grid.cluster, plan.cfg.dims()
    hidden, vocab = dims["hidden_size"], dims["vocab_size"]
    layer = both_kinds(layer_kinds(cfg, tp, cluster, rank_parts=rank_parts, forced=False, merged=merged), mla_kinds(cfg, tp, cluster, rows=rows, cache=cache, blocks=grid.sms))
    at = {k.name: i for i, k in enumerate(layer)}
    last_of = lambda mix: layer[at[f"{mix}_sums" if merged else mix]]
    of = lambda mix: {"reads": normed_reads(mix), "norm": mix} if merged else {"reads": (mix.fields[0].name,)}
    slices, own = last_of("attn_mix").slices, lambda name, n: Field(name, "f32", n, n)
    head = product(cfg, tp, cluster, "lm_head")
    dense = (
        product(cfg, tp, cluster, "dense_up", **of(last_of("ffn_mix")), fields=(own("dense_gate_up", 2 * own_tiles(cfg, tp, "dense_gate_proj")[0] * TILE_ROWS),)),
        product(cfg, tp, 1, "dense_down", reads=("dense_gate_up",), situ=True, fields=(Field("dense_parts", "f32", hidden, hidden * rank_parts),)),
        PartsSum("dense_sum", hidden, slices, rank_parts, reads=("dense_parts",), fields=(own(INPUT, hidden),)),
    )
    return (
        Embed("embed", hidden, slices, rank_parts, vocab // tp, fields=(own(INPUT, hidden),)),
        *layer[:at["moe_in"]], *dense, *layer[at["moe_in"]:],
        Head("lm_head", head.tiles, head.leaves, head.steps, head.parts, fields=(Field("logits", "f32", vocab // tp, vocab),), **of(last_of("attn_mix"))),
    )


def hop_kinds(plan: Plan, p: BlockProgram) -> tuple[int, ...]:
    """Kinds of phases that are the first to read what a collective brings, looped back too: those whose stages do so on the standard path (emit.follows_collective)."""
    found, read = set(), set()
    for i, sources in enumerate(p.sources if plan.tp > 1 else ()):
        kind = p.weights[i][0]
        for name, source in zip(p.kinds[kind].reads, sources):
            if source is None:
                continue
            made = p.kinds[p.weights[source][0]]
            field = next(f for f in made.fields if f.name == name)
            if not (isinstance(made, Embed) or field.row > field.width or field.scattered):
                continue   # every rank makes all of it
            brought = COLLECTIVE.get(name, name), isinstance(made, Embed), p.steps[source].layer
            if brought not in read:
                found.add(kind)
            read.add(brought)
    return tuple(sorted(found))
