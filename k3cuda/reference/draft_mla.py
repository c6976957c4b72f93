"""Latent attention of a draft's block: as the target's in absorbed form, but keys and queries turn, and a block sees itself both ways.

What a row sees is decided by its layer: the context from the window's start on, and of the block all rows, or those up to itself.
"""
import numpy as np

from .draft_context import store
from .mla import kv_b, slot_cache
from .numerics import F32, linear, linear_by_head, rms_norm
from .rope import rotate


def draft_mla_in(m, w, b, op):
    """Projections of attn_in [n, H]: low-rank query, latent with shared key."""
    b.mla_q_a_part[:] = m.num.round(linear(b.attn_in, w.mla_q_a_proj))
    b.mla_kv_a_part[:] = m.num.round(linear(b.attn_in, w.mla_kv_a_proj))


def draft_mla_norm(m, w, b, op):
    """Norms the low-rank query; stores the block's own cache rows behind the committed ones."""
    b.mla_q_latent[:] = rms_norm(b.mla_q_a, w.mla_q_a_layernorm, m.cfg.rms_norm_eps, m.num)
    for slot, rows in m.sequences(b.row_slot):
        positions = b.row_position[rows]
        store(b.mla_cache, b.page_table[slot], positions, cache_row(m, b.mla_kv_a[rows], positions, w.mla_kv_a_layernorm))


def draft_mla_absorb(m, w, b, op):
    """Query against a cache row: W_k^T q_nope beside the turned q_rope, [n, h, kv_lora_rank + rope]."""
    keys, _ = kv_b(m, w)
    nope, rope = np.split(b.mla_q, [m.cfg.qk_nope_head_dim], axis=2)
    turned = m.num.round(rotate(rope, b.row_position, m.cfg.rope))
    b.mla_q_absorbed[:] = np.concatenate([m.num.round(linear_by_head(nope, keys)), turned], axis=2)


def draft_mla_attend(m, w, b, op):
    """mla_o_latent [n, h, latent]: softmax over what each row sees, weighted latents."""
    scale = F32(m.cfg.score_scale)
    for r, seen in visible(m, b, b.mla_cache, op):
        b.mla_o_latent[r] = softmax((b.mla_q_absorbed[r] @ seen.T) * scale) @ seen[:, :m.cfg.kv_lora_rank]


def draft_mla_out(m, w, b, op):
    """mixer_out [n, h v]: W_v of the mean latent, no gate."""
    _, values = kv_b(m, w)
    b.mixer_out[:] = m.num.round(linear_by_head(b.mla_o_latent, values.swapaxes(1, 2))).reshape(b.mixer_out.shape)


def visible(m, b, cache, op):
    """Yields (row, cache rows that it sees in this layer). The window counts from the anchor, the first row, for all of a block."""
    causal, window = m.cfg.causal[op.layer], m.cfg.windows[op.layer]
    for slot, rows in m.sequences(b.row_slot):
        anchor, last = b.row_position[rows.start], b.row_last[rows.start]
        whole = slot_cache(cache, b.page_table[slot], last + 1)
        first = 0 if window is None else max(0, anchor - window)
        for r in range(rows.start, rows.stop):
            yield r, whole[first:(b.row_position[r] if causal else last) + 1]


def softmax(scores):
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


# ---- context rows; L layers of the draft ----

def context_latents(m, w, b, op):
    """context_latent_part [n, L, this rank's outputs]: latent and shared key of every layer."""
    for layer, proj in enumerate(w.context_kv_proj):
        b.context_latent_part[:, layer] = m.num.round(linear(b.context, proj))


def store_latents(m, w, b, op):
    """Cache rows of the accepted positions in one layer."""
    for slot, rows in m.sequences(b.row_slot):
        rows = slice(rows.start, rows.start + int(b.row_accepted[rows].sum()))
        values = cache_row(m, b.context_latent[rows, op.layer], b.row_position[rows], w.mla_kv_a_layernorm)
        store(b.mla_cache, b.page_table[slot], b.row_position[rows], m.num.round(values))


def cache_row(m, latent_and_key, positions, norm):
    """[n, latent + key]: the latent normed, the shared key turned to its position."""
    latent, key = np.split(latent_and_key, [m.cfg.kv_lora_rank], axis=1)
    latent = rms_norm(latent, norm, m.cfg.rms_norm_eps, m.num)
    return np.concatenate([latent, m.num.round(rotate(key, positions, m.cfg.rope))], axis=1)
