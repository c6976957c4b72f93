"""Every input, activation and state of a step, once: shape, dtype, how long it lives, unit, and how it is cut over ranks.

Shapes are names from `K3Config.dims()` and from `step_dims()`. `dtype` is how a GPU stores it; the reference holds every
floating-point buffer as F32 and rounds where docs/numerics.md says so.
"""
from dataclasses import dataclass
from math import prod

from .config import DECODE_ROWS, MAX_ROWS, PAGE_SIZE, K3Config
from .weights import padded_dims

# How many bytes one value of the MLA cache takes on a GPU, by kv_cache_dtype.
KV_BYTES = {"bf16": 2, "fp8_e4m3": 1}
DTYPE_BYTES = {"f32": 4, "bf16": 2, "i32": 4, "u8": 1, "kv": KV_BYTES["bf16"]}
# Sizes that count parts of which an operation sees one; the last two are a draft model's layers and its drafts.
_LAYERED = ("num_kda_layers", "num_mla_layers", "num_hidden_layers", "num_drafts")
ROW_AXES = ("rows", "decode_rows", "head_rows")  # of a step


@dataclass(frozen=True)
class Buffer:
    """One row of the table.

    `life`: "input": written by the host before a launch; "step": undefined before the step that writes it; "record": written by a
    step, read by its commit; "session": lives in slots and pages until the engine frees them, zero in a fresh slot.
    """

    name: str
    shape: tuple[str, ...]
    dtype: str               # f32, bf16, i32, u8, or kv: the dtype of the MLA cache
    life: str
    unit: str
    cut: int | None = None   # axis that is cut evenly over ranks; None: every rank holds all of it

    @property
    def is_layered(self) -> bool:
        """Whether its first axis has a part for each layer of one attention kind, or for each draft."""
        return self.shape[0] in _LAYERED


def _b(name, shape, dtype, life, unit, cut=None):
    return Buffer(name, tuple(shape.split()), dtype, life, unit, cut)


BUFFERS: tuple[Buffer, ...] = (
    _b("token_ids", "rows", "i32", "input", "token of each row"),
    _b("row_slot", "rows", "i32", "input", "slot whose sequence the row belongs to; rows of a slot are neighbours, oldest first; -1 pads"),
    _b("row_position", "rows", "i32", "input", "absolute position of the row's token, 0-based"),
    _b("page_table", "slots slot_pages", "i32", "input", "page of the MLA cache that holds the rank's own positions 64 j to 64 j + 63 of the slot: of a whole cache all there are"),
    _b("logit_rows", "head_rows", "i32", "input", "rows whose logits are wanted, ascending; -1 pads"),
    _b("row_accepted", "rows", "u8", "input", "1 where commit shall advance the slot's state over the row"),

    _b("kda_state", "num_kda_layers slots kda_num_heads kda_head_dim kda_head_dim", "f32", "session", "[key, value] per head", 2),
    _b("conv_state", "num_kda_layers slots three conv_history kda_dim", "bf16", "session", "q, k, v before the conv, oldest position first", 4),
    _b("mla_cache", "num_mla_layers pages page_size mla_cache_dim", "kv", "session", "normed latent, then the shared key that is never rotated"),

    _b("kda_qkv", "num_kda_layers rows three kda_dim", "bf16", "record", "q, k, v before the conv", 3),
    _b("kda_k", "num_kda_layers rows kda_num_heads kda_head_dim", "f32", "record", "L2 norm 1", 2),
    _b("kda_v", "num_kda_layers rows kda_num_heads kda_head_dim", "f32", "record", "after conv and SiLU", 2),
    _b("kda_decay", "num_kda_layers rows kda_num_heads kda_head_dim", "f32", "record", "log, in (gate_lower_bound, 0), per key channel", 2),
    _b("kda_beta", "num_kda_layers rows kda_num_heads", "f32", "record", "in (0, 1)", 2),
    _b("taps", "rows num_taps hidden_size", "bf16", "record", "what a draft model reads of the layers it taps, before any norm; empty without one"),

    _b("embed_partial", "rows hidden_size", "f32", "step", "embedding row on the rank that owns it, zero elsewhere"),
    _b("embed_parts", "ranks decode_rows hidden_size", "f32", "step", "embed_partial of every rank; a step of more rows adds embed_partial up in place"),
    _b("hidden", "rows hidden_size", "f32", "step", "prefix sum since the last AttnRes snapshot, without ffn_out"),
    _b("ffn_out", "rows hidden_size", "f32", "step", "what the next attn_mix adds to hidden: embedding, dense MLP or LatentMoE"),
    _b("res_blocks", "num_res_blocks rows hidden_size", "f32", "step", "AttnRes snapshots of the prefix sum, in order of creation"),

    _b("attn_in", "rows hidden_size", "bf16", "step", "normed input of the attention"),
    _b("kda_f_a_part", "rows kda_head_dim", "bf16", "step", "low-rank decay, this rank's outputs", 1),
    _b("kda_f_a", "rows kda_head_dim", "bf16", "step", "low-rank decay, whole"),
    _b("kda_out_gate", "rows kda_dim", "f32", "step", "before the sigmoid", 1),
    _b("mla_q_a_part", "rows q_lora_rank", "f32", "step", "low-rank query, this rank's outputs", 1),
    _b("mla_kv_a_part", "rows mla_cache_dim", "f32", "step", "latent and shared key, this rank's outputs", 1),
    _b("mla_q_a", "rows q_lora_rank", "f32", "step", "low-rank query, whole, before its norm"),
    _b("mla_kv_a", "rows mla_cache_dim", "f32", "step", "latent and shared key, whole, before the norm"),
    _b("mla_out_gate", "rows mla_v_dim", "f32", "step", "before the sigmoid", 1),
    _b("mla_q_latent", "rows q_lora_rank", "bf16", "step", "normed low-rank query"),
    _b("mla_q", "rows num_attention_heads mla_qk_head_dim", "bf16", "step", "query, nope part first", 1),
    _b("mla_q_absorbed", "rows num_attention_heads mla_cache_dim", "bf16", "step", "query against a cache row", 1),
    _b("mla_q_group", "rows group_heads mla_cache_dim", "bf16", "step", "mla_q_absorbed of the group's ranks; empty where the cache is whole"),
    _b("mla_own", "rows group_heads mla_own_dim", "f32", "step", "over the rank's own positions: weighted sum of latents, largest score, sum of weights; empty where the cache is whole"),
    _b("mla_owns", "group rows num_attention_heads mla_own_dim", "f32", "step", "mla_own of the group's ranks, this rank's heads", 2),
    _b("mla_o_latent", "rows num_attention_heads kv_lora_rank", "bf16", "step", "attention's mean of cached latents", 1),
    _b("mixer_out", "rows kda_dim", "bf16", "step", "gated attention output, heads side by side", 1),
    _b("attn_partial", "rows hidden_size", "f32", "step", "o_proj over this rank's heads"),
    _b("attn_parts", "ranks decode_rows hidden_size", "f32", "step", "attn_partial of every rank; a step of more rows adds attn_partial up in place"),

    _b("ffn_in", "rows hidden_size", "bf16", "step", "normed input of the feed-forward half"),
    _b("dense_act", "rows intermediate_size", "bf16", "step", "SiTU of gate and up", 1),
    _b("dense_partial", "rows hidden_size", "f32", "step", "down projection of this rank's inputs"),
    _b("dense_parts", "ranks decode_rows hidden_size", "f32", "step", "dense_partial of every rank; a step of more rows adds dense_partial up in place"),
    _b("router_logits_part", "rows num_experts", "f32", "step", "this rank's experts", 1),
    _b("router_logits", "rows num_experts", "f32", "step", "before the sigmoid"),
    _b("moe_latent_part", "rows routed_expert_hidden_size", "bf16", "step", "input of the routed experts, this rank's outputs", 1),
    _b("moe_latent", "rows routed_expert_hidden_size", "bf16", "step", "input of the routed experts, whole"),
    _b("expert_ids", "rows num_experts_per_token", "i32", "step", "by falling biased score, lower id first on ties"),
    _b("expert_weights", "rows num_experts_per_token", "f32", "step", "of expert_ids; sum to routed_scaling_factor"),
    _b("shared_act", "rows shared_intermediate_size", "bf16", "step", "SiTU of gate and up", 1),
    _b("shared_partial", "rows hidden_size", "f32", "step", "down projection of this rank's inputs"),
    _b("shared_parts", "ranks rows hidden_size", "f32", "step", "shared_partial of every rank, this rank's outputs", 2),
    _b("expert_act", "rows num_experts_per_token moe_intermediate_size", "bf16", "step", "SiTU of w1 and w3, in the order of expert_ids", 2),
    _b("routed_partial", "rows routed_expert_hidden_size", "f32", "step", "weighted sum over experts of this rank's inputs"),
    _b("routed_parts", "ranks decode_rows routed_expert_hidden_size", "f32", "step", "routed_partial of every rank; a step of more rows adds routed_partial up in place"),
    _b("routed_normed", "rows routed_expert_hidden_size", "bf16", "step", "RMSNorm of the complete sum"),
    _b("moe_out_part", "rows hidden_size", "f32", "step", "routed and shared experts, this rank's outputs", 1),

    _b("head_in", "head_rows hidden_size", "bf16", "step", "normed output mixture of the rows in logit_rows"),
    _b("logits_part", "head_rows vocab_size", "f32", "step", "this rank's tokens", 1),
    _b("logits", "head_rows vocab_size", "f32", "step", "row i belongs to logit_rows[i]"),
)
BY_NAME = {b.name: b for b in BUFFERS}


def step_dims(cfg: K3Config, *, tp: int, dcp: int = 1, rows: int = MAX_ROWS, slots: int, pages: int, slot_pages: int, num_taps: int = 0) -> dict[str, int]:
    """Sizes of `K3Config.dims()`, padded (`weights.padded_dims`), and those that belong to the machine: ranks, rows a step, slots, cache pages, taps of a
    draft model.

    `dcp`: ranks of a group that holds the MLA cache together; with one there is none, and what passes in it is empty.
    """
    few, group, sizes = min(rows, DECODE_ROWS), dcp if dcp > 1 else 0, padded_dims(cfg.dims(), tp)
    return sizes | {"group": group, "group_heads": sizes["num_attention_heads"] // tp * group} | {"ranks": tp, "rows": rows, "decode_rows": few, "head_rows": few, "slots": slots, "pages": pages, "slot_pages": slot_pages,
                         "page_size": PAGE_SIZE, "three": 3, "num_taps": num_taps}


def buffer_shape(buffer: Buffer, dims: dict[str, int]) -> tuple[int, ...]:
    """Shape of one rank's part."""
    shape = [dims[n] for n in buffer.shape]
    if buffer.cut is not None:
        shape[buffer.cut] //= dims["ranks"]
    return tuple(shape)


def buffer_bytes(buffer: Buffer, dims: dict[str, int], kv_cache_dtype: str = "bf16") -> int:
    """Bytes of one rank's part on a GPU."""
    return prod(buffer_shape(buffer, dims)) * (KV_BYTES[kv_cache_dtype] if buffer.dtype == "kv" else DTYPE_BYTES[buffer.dtype])
