"""Every stage of a decode step, once: where it runs, what it reads, which weights, what it writes and updates.

Their order here is the order inside a layer. Barriers, kernels, the reference's loop and docs/dataflow.md follow from this
table, so a declaration that is not true must fail a test (tests/test_stages.py).

A kernel may read `row_slot` undeclared to skip padding rows: the host writes inputs before a step, so nothing waits for them.
"""
from dataclasses import dataclass

from .config import K3Config

# Movements of a collective. None of them adds: sums are ours, in one tree (docs/numerics.md).
GATHER = "gather"    # every rank's slice, side by side along the cut axis
STACK = "stack"      # every rank's whole partial, one behind the other
SCATTER = "scatter"  # of every rank's whole partial the slice this rank is to sum


@dataclass(frozen=True)
class Move:
    source: str
    target: str
    how: str
    in_group: bool = False   # between the ranks that hold one MLA cache together (context_split.py), not between all


@dataclass(frozen=True)
class Stage:
    name: str
    header: str                      # file under kernels_cu/stages and module under reference; "" for a collective
    where: str                       # start, layer, kda, mla, mla_whole or mla_split (by the cache), dense, moe, tap, end, commit
    reads: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()     # every live row is defined afterwards, whatever was there
    updates: tuple[str, ...] = ()    # read and written in place, or written only in part
    moves: tuple[Move, ...] = ()     # a collective: one hop between ranks

    @property
    def inputs(self) -> tuple[str, ...]:
        return self.reads + self.updates

    @property
    def outputs(self) -> tuple[str, ...]:
        return self.writes + self.updates


def _s(name, header, where, reads="", weights="", writes="", updates=""):
    return Stage(name, header, where, *(tuple(text.split()) for text in (reads, weights, writes, updates)))


def _collective(name, where, *moves):
    moves = tuple(Move(*m) for m in moves)
    return Stage(name, "", where, reads=tuple(m.source for m in moves), writes=tuple(m.target for m in moves), moves=moves)


STAGES: tuple[Stage, ...] = (
    _s("embed", "embed", "start", reads="token_ids", weights="embed_tokens", writes="embed_partial"),
    _collective("embed_exchange", "start", ("embed_partial", "embed_parts", STACK)),
    _s("embed_sum", "embed", "start", reads="embed_parts", writes="hidden ffn_out"),

    # ---- attention half ----
    # Adds what the layer before left, mixes, and only then takes the snapshot: the mix of a snapshot layer still sees the open sum.
    _s("attn_mix", "attn_res", "layer", reads="ffn_out",
       weights="self_attention_res_norm self_attention_res_proj input_layernorm", writes="attn_in", updates="hidden res_blocks"),

    _s("kda_in", "kda", "kda", reads="attn_in",
       weights="kda_f_a_proj kda_b_proj kda_q_proj kda_k_proj kda_v_proj kda_g_proj",
       writes="kda_f_a_part kda_beta kda_qkv kda_out_gate"),
    _collective("kda_f_a_exchange", "kda", ("kda_f_a_part", "kda_f_a", GATHER)),
    _s("kda_mix", "kda", "kda", reads="row_slot kda_f_a kda_qkv kda_beta kda_out_gate conv_state kda_state",
       weights="kda_f_b_proj kda_a_log kda_dt_bias kda_q_conv kda_k_conv kda_v_conv kda_o_norm",
       writes="kda_decay kda_k kda_v mixer_out"),

    _s("mla_in", "mla", "mla", reads="attn_in", weights="mla_q_a_proj mla_kv_a_proj mla_g_proj",
       writes="mla_q_a_part mla_kv_a_part mla_out_gate"),
    _collective("mla_exchange", "mla", ("mla_q_a_part", "mla_q_a", GATHER), ("mla_kv_a_part", "mla_kv_a", GATHER)),
    _s("mla_norm", "mla", "mla", reads="row_slot row_position page_table mla_q_a mla_kv_a",
       weights="mla_q_a_layernorm mla_kv_a_layernorm", writes="mla_q_latent", updates="mla_cache"),
    _s("mla_q", "mla", "mla", reads="mla_q_latent", weights="mla_q_b_proj", writes="mla_q"),
    _s("mla_absorb", "mla", "mla", reads="mla_q", weights="mla_kv_b_proj", writes="mla_q_absorbed"),
    _s("mla_attend", "mla", "mla_whole", reads="row_slot row_position page_table mla_q_absorbed mla_cache", writes="mla_o_latent"),
    # A cache that is split over a group: every rank takes the queries of all of the group's heads to its own positions.
    _collective("mla_q_exchange", "mla_split", ("mla_q_absorbed", "mla_q_group", GATHER, True)),
    _s("mla_attend_own", "mla_split", "mla_split", reads="row_slot row_position page_table mla_q_group mla_cache", writes="mla_own"),
    _collective("mla_own_exchange", "mla_split", ("mla_own", "mla_owns", SCATTER, True)),
    _s("mla_merge", "mla_split", "mla_split", reads="mla_owns", writes="mla_o_latent"),
    _s("mla_out", "mla", "mla", reads="mla_o_latent mla_out_gate", weights="mla_kv_b_proj", writes="mixer_out"),

    _s("o_proj", "o_proj", "layer", reads="mixer_out", weights="o_proj", writes="attn_partial"),
    _collective("attn_exchange", "layer", ("attn_partial", "attn_parts", STACK)),

    # ---- feed-forward half ----
    _s("ffn_mix", "attn_res", "layer", reads="attn_parts res_blocks", weights="mlp_res_norm mlp_res_proj post_attention_layernorm",
       writes="ffn_in", updates="hidden"),

    _s("dense_up", "dense", "dense", reads="ffn_in", weights="dense_gate_proj dense_up_proj", writes="dense_act"),
    _s("dense_down", "dense", "dense", reads="dense_act", weights="dense_down_proj", writes="dense_partial"),
    _collective("dense_exchange", "dense", ("dense_partial", "dense_parts", STACK)),
    _s("dense_sum", "dense", "dense", reads="dense_parts", writes="ffn_out"),

    _s("moe_in", "moe", "moe", reads="ffn_in", weights="router latent_down shared_gate_proj shared_up_proj",
       writes="router_logits_part moe_latent_part shared_act"),
    _collective("moe_in_exchange", "moe", ("router_logits_part", "router_logits", GATHER), ("moe_latent_part", "moe_latent", GATHER)),
    # The choice of experts and the shared expert's way down wait for the same stage and share nothing: either fills what the other leaves idle.
    _s("route", "moe", "moe", reads="router_logits shared_act", weights="e_score_correction_bias shared_down_proj",
       writes="expert_ids expert_weights shared_partial"),
    _s("expert_up", "moe", "moe", reads="row_slot moe_latent expert_ids", weights="expert_w1 expert_w1_scale expert_w3 expert_w3_scale",
       writes="expert_act"),
    _s("moe_down", "moe", "moe", reads="row_slot expert_act expert_ids expert_weights", weights="expert_w2 expert_w2_scale", writes="routed_partial"),
    _collective("moe_sum_exchange", "moe", ("routed_partial", "routed_parts", STACK), ("shared_partial", "shared_parts", SCATTER)),
    _s("routed_norm", "moe", "moe", reads="routed_parts", weights="routed_expert_norm", writes="routed_normed"),
    _s("latent_up", "moe", "moe", reads="routed_normed shared_parts", weights="latent_up", writes="moe_out_part"),
    _collective("moe_out_exchange", "moe", ("moe_out_part", "ffn_out", GATHER)),

    # ---- for a draft model, behind the layers it reads (docs/dspark.md): none of these without one ----
    _s("tap_prefix", "taps", "tap", reads="ffn_out hidden", updates="taps"),
    _s("tap_mix", "taps", "tap", reads="ffn_out hidden res_blocks", weights="self_attention_res_norm self_attention_res_proj", updates="taps"),
    _s("tap_output_mix", "taps", "tap", reads="ffn_out hidden res_blocks", weights="output_attn_res_norm output_attn_res_proj", updates="taps"),

    # ---- output ----
    _s("output_mix", "attn_res", "end", reads="logit_rows ffn_out hidden res_blocks",
       weights="output_attn_res_norm output_attn_res_proj final_norm", writes="head_in"),
    _s("lm_head", "lm_head", "end", reads="head_in", weights="lm_head", writes="logits_part"),
    _collective("logits_exchange", "end", ("logits_part", "logits", GATHER)),

    # ---- after acceptance: a launch of its own; where all rows stand `kda_mix` does it in passing (`advances` in emit.py's OpArgs) ----
    _s("kda_commit", "kda", "commit", reads="row_slot row_accepted kda_qkv kda_k kda_v kda_decay kda_beta",
       updates="kda_state conv_state"),
)
BY_NAME = {s.name: s for s in STAGES}


def runs_in(stage: Stage, cfg: K3Config, layer: int, is_split: bool) -> bool:
    """Whether a stage of the layers runs in `layer`. `is_split`: the MLA cache is split over ranks."""
    kda, dense = cfg.is_kda(layer), cfg.is_dense(layer)
    return {"layer": True, "kda": kda, "mla": not kda, "mla_whole": not kda and not is_split, "mla_split": not kda and is_split,
            "dense": dense, "moe": not dense, "commit": kda}.get(stage.where, False)
