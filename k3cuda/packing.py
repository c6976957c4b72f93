"""What a kernel reads in place of a stage's checkpoint weights: arrays in kernel order, each once. runtime/repack.py makes them."""
from dataclasses import dataclass

from .config import MXFP4_GROUP, MXFP4_PER_BYTE, K3Config
from .draft_config import DraftConfig
from .weights import BY_NAME as WEIGHT
from .weights import MMA_K, Weight, num_pieces, tree_leaves

# How the sources become one array; kernels_cu/row_core.cuh and repack.py draw the layouts.
TILES = "tiles"            # BF16 fragments, sources behind each other, each padded to whole tiles of 16 rows
PAIRS = "pairs"            # BF16 fragments of the last two sources, their tiles in turn (gate and up of a GLU), then of the others
HEADS = "heads"            # BF16 fragments of every head's rows in turn: the value half of kv_b_proj
HEADS_TURNED = "heads_turned"  # the same of every head's key half, transposed
EXPERTS = "experts"        # MXFP4 fragments of one matrix an expert
EXPERT_PAIRS = "expert_pairs"  # of two, their tiles in turn
PLAIN = "plain"            # as stored
FOLDED = "folded"          # F32 product of a norm weight and a score vector: the norm only ever scores


@dataclass(frozen=True)
class Packed:
    """`name` is the accessor of the kernels; `sources` are checkpoint weights (an MXFP4 one stands for its scales too)."""

    name: str
    how: str
    sources: tuple[str, ...]


def _p(how, name, sources=None):
    return Packed(name, how, tuple((sources or name).split()))


PACKED: dict[str, tuple[Packed, ...]] = {
    "embed": (_p(PLAIN, "embed_tokens"),),
    "attn_mix": (_p(FOLDED, "attn_score", "self_attention_res_norm self_attention_res_proj"), _p(PLAIN, "input_layernorm")),
    "kda_in": (_p(TILES, "kda_in", "kda_f_a_proj kda_b_proj kda_q_proj kda_k_proj kda_v_proj kda_g_proj"),),
    "kda_mix": tuple(_p(PLAIN, n) for n in ("kda_f_b_proj", "kda_a_log", "kda_dt_bias", "kda_q_conv", "kda_k_conv", "kda_v_conv", "kda_o_norm")),
    "mla_in": (_p(TILES, "mla_in", "mla_q_a_proj mla_kv_a_proj mla_g_proj"),),
    "mla_norm": (_p(PLAIN, "mla_q_a_layernorm"), _p(PLAIN, "mla_kv_a_layernorm")),
    "mla_q": (_p(TILES, "mla_q_b_proj"),),
    "mla_absorb": (_p(HEADS_TURNED, "mla_keys", "mla_kv_b_proj"),),
    "mla_out": (_p(HEADS, "mla_values", "mla_kv_b_proj"),),
    "o_proj": (_p(TILES, "o_proj"),),
    "ffn_mix": (_p(FOLDED, "ffn_score", "mlp_res_norm mlp_res_proj"), _p(PLAIN, "post_attention_layernorm")),
    "dense_up": (_p(PAIRS, "dense_gate_up", "dense_gate_proj dense_up_proj"),),
    "dense_down": (_p(TILES, "dense_down_proj"),),
    "moe_in": (_p(PAIRS, "moe_in", "router latent_down shared_gate_proj shared_up_proj"),),
    "route": (_p(PLAIN, "e_score_correction_bias"), _p(TILES, "shared_down_proj")),
    "expert_up": (_p(EXPERT_PAIRS, "expert_w13", "expert_w1 expert_w3"),),
    "moe_down": (_p(EXPERTS, "expert_w2"),),
    "routed_norm": (_p(PLAIN, "routed_expert_norm"),),
    "latent_up": (_p(TILES, "latent_up"),),
    "tap_mix": (_p(FOLDED, "tap_score", "self_attention_res_norm self_attention_res_proj"),),
    "tap_output_mix": (_p(FOLDED, "tap_output_score", "output_attn_res_norm output_attn_res_proj"),),
    "output_mix": (_p(FOLDED, "output_score", "output_attn_res_norm output_attn_res_proj"), _p(PLAIN, "final_norm")),
    "lm_head": (_p(TILES, "lm_head"),),
}
_FUSED = _p(TILES, "context_proj")
_MARKOV_ROWS = _p(PLAIN, "markov_w1")
# Of a draft's stages; those that are the target's own read the same arrays.
DRAFT_PACKED: dict[str, tuple[Packed, ...]] = {
    "fuse": (_FUSED,),
    "fuse_normed": (_FUSED, _p(PLAIN, "fc_norm")),
    "context_mean": (_p(PLAIN, "context_norm"),),
    "context_latents": (_p(TILES, "context_kv_proj"),),
    "context_keys": (_p(TILES, "context_kv", "context_k_proj context_v_proj"),),
    "store_latents": (_p(PLAIN, "context_kv_norm", "mla_kv_a_layernorm"),),
    "store_keys": (_p(PLAIN, "context_k_norm", "gqa_k_norm"),),
    **{name: PACKED[name] for name in ("embed", "mla_in", "mla_q", "mla_absorb", "mla_out", "o_proj", "dense_up", "dense_down", "lm_head")},
    "draft_attn_in": (_p(PLAIN, "input_layernorm"),),
    "draft_mla_in": (_p(TILES, "draft_mla_in", "mla_q_a_proj mla_kv_a_proj"),),
    "draft_mla_norm": PACKED["mla_norm"],
    "draft_mla_absorb": PACKED["mla_absorb"],
    "draft_mla_out": PACKED["mla_out"],
    "gqa_in": (_p(TILES, "gqa_in", "gqa_q_proj gqa_k_proj gqa_v_proj"),),
    "gqa_norm": (_p(PLAIN, "gqa_q_norm"), _p(PLAIN, "gqa_k_norm")),
    "draft_ffn_in": (_p(PLAIN, "post_attention_layernorm"),),
    "silu_up": PACKED["dense_up"],
    "draft_out": (_MARKOV_ROWS, _p(PLAIN, "final_norm")),
    "markov": (_p(TILES, "markov_w2"),),
    "confidence": (_p(PLAIN, "confidence_proj"), _p(PLAIN, "confidence_bias")),
    "confidence_plain": (_p(PLAIN, "confidence_proj"), _p(PLAIN, "confidence_bias")),
    "draft_pick": (_MARKOV_ROWS,),
}
# Stages of more than one kernel, in order: what passes between them is theirs alone.
KERNELS = {"mla_attend": ("mla_attend", "mla_combine"), "mla_attend_own": ("mla_attend_own", "mla_combine_own"), "draft_mla_attend": ("draft_mla_attend", "draft_mla_combine"), "fuse_normed": ("fuse_norm", "fuse_normed"), "gqa_attend": ("gqa_attend", "gqa_combine")}
# The same in a step of more than DECODE_ROWS rows, where other kernels run it.
WIDE_KERNELS = {"kda_mix": ("kda_gates", "kda_scan", "kda_norm"), "route": ("choose", "route_list", "shared_down"),
                "moe_down": ("expert_items", "expert_sum")}
# Kernels that multiply rows by one matrix: in a step of 16 rows and more (emit_sizes.LEAF_SUM_ROWS) each may have a second one, which adds leaf sums.
PRODUCTS = frozenset(("kda_in", "mla_in", "mla_q", "o_proj", "dense_up", "dense_down", "moe_in", "shared_down", "latent_up", "lm_head"))
SLICED = frozenset(("mla_attend", "mla_combine", "mla_attend_own", "mla_combine_own"))  # take DECODE_ROWS rows at most: launched for one slice after the other
MAX_PACKED = max(map(len, PACKED.values()))


def leaves_and_steps(name: str, cfg: K3Config | DraftConfig, tp: int, weights: dict[str, Weight] = WEIGHT) -> tuple[int, int]:
    """Of a matrix's inputs on one rank: leaves of the tree over K, and k-steps (MXFP4: groups) in each leaf. `weights`: the table that has it."""
    w, dims = weights[name], cfg.dims()
    if name == "mla_kv_b_proj":
        raise ValueError("kv_b_proj is two matrices: see inputs_leaves_and_steps")
    unit = MXFP4_GROUP if w.mxfp4 else MMA_K
    k = dims[w.shape[1]] * (MXFP4_PER_BYTE if w.mxfp4 else 1)
    leaves = tree_leaves(k, unit)
    own = num_pieces(w, dims, tp) if w.cut and w.cut.axis == 1 else 1
    return leaves // own, k // leaves // unit


def inputs_leaves_and_steps(k: int) -> tuple[int, int]:
    """The same of a product over `k` inputs that no rank cuts, such as one head's half of kv_b_proj."""
    leaves = tree_leaves(k)
    return leaves, k // leaves // MMA_K

