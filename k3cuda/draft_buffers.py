"""Every input, activation and state of a draft step, once, as buffers.py has those of the target's step.

A buffer that means the same in both steps is the target's own row of the table.
"""
from .buffers import BY_NAME as TARGET
from .buffers import Buffer, buffer_bytes
from .config import DECODE_ROWS, PAGE_SIZE
from .draft_config import DraftConfig
from .draft_weights import cut_weights
from .weights import padded_dims


def _b(name, shape, dtype, life, unit, cut=None):
    return Buffer(name, tuple(shape.split()), dtype, life, unit, cut)


_SAME_INPUTS = ("token_ids", "row_slot", "row_position", "page_table", "logit_rows", "row_accepted")
_SAME = ("embed_partial", "embed_parts", "hidden",
         "ffn_out", "attn_in", "mla_q_a_part", "mla_kv_a_part", "mla_q_a", "mla_kv_a", "mla_out_gate", "mla_q_latent", "mla_q",
         "mla_q_absorbed", "mla_o_latent", "attn_partial", "attn_parts", "ffn_in", "dense_act", "dense_partial", "dense_parts", "head_in",
         "logits_part")

DRAFT_BUFFERS: tuple[Buffer, ...] = (
    # What the host writes comes first, so that one copy brings it.
    *(TARGET[name] for name in _SAME_INPUTS),
    _b("row_last", "rows", "i32", "input", "position of the last row of the row's block: what is seen up to where a layer sees both ways"),
    _b("seq_seed", "seqs two", "i32", "input", "low and high word of the sequence's seed"),
    _b("seq_temperature", "seqs", "f32", "input", "of the draft's draw; 0: the likeliest token"),
    _b("taps", "rows num_taps target_hidden_size", "bf16", "input", "written by the target's step: the same memory"),
    *(TARGET[name] for name in _SAME),

    # A block's own rows lie behind the committed ones and are overwritten by the next context rows.
    _b("mla_cache", "num_hidden_layers pages page_size mla_cache_dim", "bf16", "session", "normed latent, then the shared key, turned"),
    _b("gqa_cache", "num_hidden_layers pages page_size two num_key_value_heads head_dim", "bf16", "session", "keys, normed and turned, then values", 4),

    _b("context_part", "rows hidden_size", "f32", "step", "fused taps, this rank's outputs", 1),
    _b("context_raw", "rows hidden_size", "f32", "step", "fused taps, before the norm"),
    _b("context", "rows hidden_size", "bf16", "step", "fused taps, normed: what every layer's key and value projections read"),
    _b("context_latent_part", "rows num_hidden_layers mla_cache_dim", "f32", "step", "latent and shared key of every layer, this rank's outputs", 2),
    _b("context_latent", "rows num_hidden_layers mla_cache_dim", "f32", "step", "latent and shared key of every layer, before norm and rotation"),
    _b("context_heads", "rows num_hidden_layers two num_key_value_heads head_dim", "f32", "step", "keys and values of every layer, before norm and rotation", 3),

    _b("gqa_q", "rows num_attention_heads head_dim", "f32", "step", "queries, before norm and rotation", 1),
    _b("gqa_kv", "rows two num_key_value_heads head_dim", "f32", "step", "keys and values of the block, before norm and rotation", 2),
    _b("gqa_query", "rows num_attention_heads head_dim", "bf16", "step", "queries, normed and turned", 1),
    _b("mixer_out", "rows mixer_dim", "bf16", "step", "attention output, heads side by side", 1),

    _b("markov_in", "seqs markov_rank", "bf16", "step", "Markov embedding of the token before the one that is drawn next: the anchor, then each draft"),
    _b("draft_logits_part", "num_drafts seqs vocab_size", "f32", "step", "head and Markov bias, this rank's tokens", 2),
    _b("draft_logits", "num_drafts seqs vocab_size", "f32", "step", "what each draft was drawn from"),
    _b("draft_ids", "num_drafts seqs", "i32", "step", "the drafts"),
    _b("draft_confidence", "num_drafts seqs", "f32", "step", "estimated probability that a draft is accepted if those before it are"),
)
BY_NAME = {b.name: b for b in DRAFT_BUFFERS}


def cache_bytes(cfg: DraftConfig, tp: int = 1) -> int:
    """Bytes a token of the draft's cache on one of `tp` ranks, as a GPU holds them."""
    b, dims = BY_NAME[f"{cfg.family}_cache"], padded_dims(cfg.dims(), tp, cut_weights(cfg)) | {"ranks": tp, "pages": 1, "page_size": 1}
    return buffer_bytes(b, dims)


def draft_dims(cfg: DraftConfig, *, tp: int, num_drafts: int, seqs: int, slots: int, pages: int, slot_pages: int, rows: int = DECODE_ROWS) -> dict[str, int]:
    """Sizes of `DraftConfig.dims()`, padded, and those of the machine. `rows` are enough for the context rows of a target step and for the blocks of `seqs`
    sequences."""
    return padded_dims(cfg.dims(), tp, cut_weights(cfg)) | {"ranks": tp, "rows": rows, "decode_rows": rows, "head_rows": rows, "seqs": seqs, "num_drafts": num_drafts, "slots": slots, "pages": pages,
                         "slot_pages": slot_pages, "page_size": PAGE_SIZE}
