"""A KDA and MoE layer of one rank as phases of a single launch: mixes, products, the middle of KDA, the choice, experts and their norm."""
from dataclasses import replace

from .block_program import Step
from .config import K3Config
from .launch_kinds import Field, ForcedChoice, Kda, Kind, Product, Route
from .launch_mixes import CLOSED, Mix, mix_rounds, normed_reads
from .launch_rank import experts, own_tiles, product
from .phases import TILE_ROWS
from .plan import Plan
from .weights import TREE_LEAVES, padded_dims

INPUT = "ffn_out"   # of the launch, F32: what the layer before left
MERGED_ROWS = 1     # up to so many rows products norm for themselves
LAYER_SLOTS = 12    # of the exchange: a layer's results that still have readers


def layer_kinds(cfg: K3Config, tp: int, cluster: int, *, rank_parts: int, forced: bool, merged: bool = False) -> tuple[Kind, ...]:
    """The kinds of a layer in their order, but that attn_mix_closed runs in the layer before.

    Args:
        rank_parts: ranks whose parts a sum over ranks has; looped back they are all this rank's.
        forced: the choice of experts lies in memory.
        merged: products norm for themselves what they read, instead of a round that does: a hand-over less, but all blocks read F32 values (MERGED_ROWS).
            So few rows have blocks enough for slices of one chunk, and their experts are so few that all blocks have time for shared_down before them.
    """
    dims = padded_dims(cfg.dims(), tp)
    hidden, latent, blocks = dims["hidden_size"], dims["routed_expert_hidden_size"], dims["num_res_blocks"]
    shared_tiles, router_tiles = 2 * own_tiles(cfg, tp, "shared_gate_proj")[0], own_tiles(cfg, tp, "router")[0]
    heads, dim = dims["kda_num_heads"] // tp, dims["kda_head_dim"]
    low_rank_tiles, beta_tiles, head_tiles = (own_tiles(cfg, tp, name)[0] for name in ("kda_f_a_proj", "kda_b_proj", "kda_q_proj"))
    qkv_at = low_rank_tiles + beta_tiles
    betas = -(-heads // 4) * 4   # whole vectors, of a tile
    stacked = lambda name, n: Field(name, "f32", n, n * rank_parts)
    gathered = lambda name, dtype, n: Field(name, dtype, n // tp, n)
    own = lambda name, dtype, n: Field(name, dtype, n, n)
    rounds = lambda name, n, parts, blocks, reads, out: mix_rounds(name, n, parts, blocks, reads, *((None, TREE_LEAVES) if merged else (own(out, "bf16", n),)))
    attn_mix = rounds("attn_mix", hidden, 1, blocks, INPUT, "attn_in")
    ffn_closed, *ffn_mix = rounds("ffn_mix", hidden, rank_parts, blocks, "attn_parts", "ffn_in")
    routed_norm = rounds("routed_norm", latent, rank_parts, 0, "routed_parts", "routed_normed")
    of = lambda mix, *more: {"reads": (*normed_reads(mix[-1]), *more), "norm": mix[-1]} if merged else {"reads": (mix[-1].fields[0].name, *more)}
    up, down = experts(cfg, tp, cluster)
    at = lambda k, reads, *fields, **more: replace(k, reads=tuple(reads.split()), fields=fields, **more)
    up = at(up, "moe_latent", own("expert_act", "bf16", up.outputs))
    shared_down = product(cfg, tp, 1, "shared_down", reads=("shared_gate_up",), situ=True, beside=not merged,
                          fields=(Field("shared_partial", "f32", hidden, hidden, scattered=True),))
    choice = ForcedChoice("route", dims["num_experts"]) if forced else Route("route", dims["num_experts"], cfg.num_experts_per_token)
    return (
        *attn_mix,
        product(cfg, tp, cluster, "kda_in", **of(attn_mix), firsts=(0, low_rank_tiles, qkv_at, qkv_at + 3 * head_tiles),
                fields=(gathered("kda_f_a", "bf16", dim), own("kda_beta", "f32", betas), own("kda_qkv", "bf16", 3 * heads * dim), own("kda_out_gate", "f32", heads * dim))),
        ffn_closed,   # while kda_in's results are on their way
        Kda("kda_mix", heads, dim, dims["conv_width"], reads=("kda_f_a", "kda_beta", "kda_qkv", "kda_out_gate"),
            fields=(own("mixer_out", "bf16", heads * dim),)),
        product(cfg, tp, cluster, "o_proj", reads=("mixer_out",), fields=(stacked("attn_parts", hidden),)),
        *ffn_mix,
        product(cfg, tp, cluster, "moe_in", **of(ffn_mix), firsts=(0, shared_tiles, shared_tiles + router_tiles),
                fields=(own("shared_gate_up", "f32", shared_tiles * TILE_ROWS), gathered("router_logits", "f32", dims["num_experts"]),
                        gathered("moe_latent", "bf16", latent))),
        replace(choice, reads=("router_logits",)),
        *[shared_down] * merged,   # while experts, which are few, are on their way; else in the blocks that moe_down leaves idle
        up,
        at(down, "expert_act", stacked("routed_parts", latent)),
        *[shared_down] * (not merged),
        *routed_norm,
        product(cfg, tp, cluster, "latent_up", **of(routed_norm, "shared_partial"), adds=tp, fields=(gathered(INPUT, "f32", hidden),)),
    )


def layer_steps(plan: Plan, kinds: tuple[Kind, ...], layers: range, has=lambda k, layer: True, first: tuple[Kind, ...] = (), behind: tuple[Kind, ...] = ()) -> tuple[Step, ...]:
    """The phases of these layers, of the kinds that each of them `has`. Rounds over closed blocks are left out where there are none, and run ahead of what
    waits for them.

    first, behind: kinds before the layers and behind them, as of one more layer whose first mix is the output's.
    """
    counts = {(op.stage.name, op.layer): op.num_blocks for op in plan.ops}
    if behind:
        counts.setdefault(("attn_mix", layers.stop), counts["output_mix", None])
    steps, sums = [], {}   # sums: of each mix, which phase made its last ones

    def add(k: Kind, layer: int) -> None:
        if not isinstance(k, Mix):
            norm = k.norm if isinstance(k, Product) else None
            steps.append(Step(k.name, layer, len(steps) - sums[norm.name] | (norm.blocks and counts[norm.stage, layer] > 0) << 4 if norm else 0))
            return
        closed = counts[k.stage, layer] if k.blocks else 0
        opens = k.stage == "attn_mix" and layer in layers and plan.cfg.opens_res_block(layer)
        if closed or k.round != CLOSED:
            sums[k.name] = len(steps)
            steps.append(Step(k.name, layer, closed | opens << 4))

    ahead, rest = kinds[0], kinds[1:]
    for k in (*first, ahead):
        add(k, layers[0])
    for layer in layers:
        *own, last = (k for k in rest if has(k, layer))
        for k in own:
            add(k, layer)
        if layer + 1 in layers or behind:
            add(ahead, layer + 1)
        add(last, layer)
    for k in behind:
        add(k, layers.stop)
    return tuple(steps)
