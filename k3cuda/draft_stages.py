"""Every stage of a draft step, once, as stages.py has those of the target's step; a stage that does the same is the target's own.

`where` is a part, then the traits a draft must have for it (`DraftConfig.traits`). Parts: `context` and `context_layer` run once over the
rows a target step committed; `start`, `layer` and `end` over the block; `draft` once for each draft, in order.
"""
from dataclasses import replace

from .stages import BY_NAME as TARGET
from .stages import GATHER, Stage
from .stages import _collective as collective
from .stages import _s as stage


def _same(name, where):
    return replace(TARGET[name], where=where)


DRAFT_STAGES: tuple[Stage, ...] = (
    # ---- context rows: one fused vector a committed position, and every layer's keys and values of it ----
    stage("fuse", "draft_context", "context raw_taps", reads="taps", weights="context_proj", writes="context_part"),
    stage("fuse_normed", "draft_context", "context fc_norm", reads="taps", weights="fc_norm context_proj", writes="context_part"),
    collective("context_exchange", "context", ("context_part", "context_raw", GATHER)),
    stage("context_mean", "draft_context", "context", reads="context_raw", weights="context_norm", writes="context"),
    stage("context_latents", "draft_mla", "context mla", reads="context", weights="context_kv_proj", writes="context_latent_part"),
    collective("context_latent_exchange", "context mla", ("context_latent_part", "context_latent", GATHER)),
    stage("context_keys", "draft_gqa", "context gqa", reads="context", weights="context_k_proj context_v_proj", writes="context_heads"),
    stage("store_latents", "draft_mla", "context_layer mla", reads="row_slot row_position page_table row_accepted context_latent",
       weights="mla_kv_a_layernorm", updates="mla_cache"),
    stage("store_keys", "draft_gqa", "context_layer gqa", reads="row_slot row_position page_table row_accepted context_heads",
       weights="gqa_k_norm", updates="gqa_cache"),

    # ---- the block ----
    _same("embed", "start"), _same("embed_exchange", "start"), _same("embed_sum", "start"),

    stage("draft_attn_in", "draft_block", "layer", reads="ffn_out", weights="input_layernorm", writes="attn_in", updates="hidden"),

    stage("draft_mla_in", "draft_mla", "layer mla ungated", reads="attn_in", weights="mla_q_a_proj mla_kv_a_proj", writes="mla_q_a_part mla_kv_a_part"),
    _same("mla_in", "layer mla gated"),
    _same("mla_exchange", "layer mla"),
    stage("draft_mla_norm", "draft_mla", "layer mla", reads="row_slot row_position page_table mla_q_a mla_kv_a",
       weights="mla_q_a_layernorm mla_kv_a_layernorm", writes="mla_q_latent", updates="mla_cache"),
    _same("mla_q", "layer mla"),
    stage("draft_mla_absorb", "draft_mla", "layer mla rope", reads="row_position mla_q", weights="mla_kv_b_proj", writes="mla_q_absorbed"),
    _same("mla_absorb", "layer mla nope"),
    stage("draft_mla_attend", "draft_mla", "layer mla", reads="row_slot row_position row_last page_table mla_q_absorbed mla_cache", writes="mla_o_latent"),
    stage("draft_mla_out", "draft_mla", "layer mla ungated", reads="mla_o_latent", weights="mla_kv_b_proj", writes="mixer_out"),
    _same("mla_out", "layer mla gated"),

    stage("gqa_in", "draft_gqa", "layer gqa", reads="attn_in", weights="gqa_q_proj gqa_k_proj gqa_v_proj", writes="gqa_q gqa_kv"),
    stage("gqa_norm", "draft_gqa", "layer gqa", reads="row_slot row_position page_table gqa_q gqa_kv", weights="gqa_q_norm gqa_k_norm",
       writes="gqa_query", updates="gqa_cache"),
    stage("gqa_attend", "draft_gqa", "layer gqa", reads="row_slot row_position row_last page_table gqa_query gqa_cache", writes="mixer_out"),

    _same("o_proj", "layer"), _same("attn_exchange", "layer"),
    stage("draft_ffn_in", "draft_block", "layer", reads="attn_parts", weights="post_attention_layernorm", writes="ffn_in", updates="hidden"),
    stage("silu_up", "draft_block", "layer silu", reads="ffn_in", weights="dense_gate_proj dense_up_proj", writes="dense_act"),
    _same("dense_up", "layer situ"),
    _same("dense_down", "layer"), _same("dense_exchange", "layer"), _same("dense_sum", "layer"),

    stage("draft_out", "draft_block", "end", reads="row_slot token_ids logit_rows hidden ffn_out", weights="final_norm markov_w1", writes="head_in markov_in"),
    _same("lm_head", "end"),

    # ---- one draft after the other: only a bias of low rank depends on the token before ----
    stage("markov", "draft_head", "draft", reads="logits_part markov_in", weights="markov_w2", writes="draft_logits_part"),
    stage("confidence", "draft_head", "draft confidence_markov", reads="head_in markov_in", weights="confidence_proj confidence_bias",
       writes="draft_confidence"),
    stage("confidence_plain", "draft_head", "draft confidence_plain", reads="head_in", weights="confidence_proj confidence_bias",
       writes="draft_confidence"),
    collective("draft_logits_exchange", "draft", ("draft_logits_part", "draft_logits", GATHER)),
    stage("draft_pick", "draft_head", "draft", reads="row_slot row_position seq_seed seq_temperature draft_logits", weights="markov_w1", writes="draft_ids markov_in"),
)
BY_NAME = {s.name: s for s in DRAFT_STAGES}
