"""Grouped-query attention of a draft's block. Shapes here: h query heads and g key heads of this rank, h / g queries share a key; d a head."""
import numpy as np

from .draft_context import store
from .draft_mla import softmax, visible
from .numerics import F32, linear, rms_norm
from .rope import rotate


def gqa_in(m, w, b, op):
    """gqa_q [n, h, d] and gqa_kv [n, 2, g, d] of attn_in [n, H]."""
    r = m.num.round
    b.gqa_q[:] = r(linear(b.attn_in, w.gqa_q_proj)).reshape(b.gqa_q.shape)
    b.gqa_kv[:, 0] = r(linear(b.attn_in, w.gqa_k_proj)).reshape(b.gqa_kv[:, 0].shape)
    b.gqa_kv[:, 1] = r(linear(b.attn_in, w.gqa_v_proj)).reshape(b.gqa_kv[:, 1].shape)


def gqa_norm(m, w, b, op):
    """gqa_query [n, h, d]: normed over each head and turned; stores the block's own cache rows behind the committed ones."""
    b.gqa_query[:] = m.num.round(rotate(rms_norm(b.gqa_q, w.gqa_q_norm, m.cfg.rms_norm_eps, m.num), b.row_position, m.cfg.rope))
    for slot, rows in m.sequences(b.row_slot):
        positions = b.row_position[rows]
        store(b.gqa_cache, b.page_table[slot], positions, head_rows(m, b.gqa_kv[rows], positions, w.gqa_k_norm))


def gqa_attend(m, w, b, op):
    """mixer_out [n, h d]: softmax over what each row sees, weighted values."""
    scale = F32(m.cfg.score_scale)
    for r, seen in visible(m, b, b.gqa_cache, op):
        keys, values = seen[:, 0].transpose(1, 2, 0), seen[:, 1].swapaxes(0, 1)  # [g, d, t] and [g, t, d]
        query = b.gqa_query[r].reshape(len(keys), -1, keys.shape[1])
        b.mixer_out[r] = m.num.round(np.matmul(softmax(np.matmul(query, keys) * scale), values)).reshape(-1)


# ---- context rows; L layers of the draft ----

def context_keys(m, w, b, op):
    """context_heads [n, L, 2, kv heads of this rank, head]: keys and values of every layer."""
    shape = (len(b.context), *b.context_heads.shape[3:])
    for layer in range(len(w.context_k_proj)):
        b.context_heads[:, layer, 0] = m.num.round(linear(b.context, w.context_k_proj[layer])).reshape(shape)
        b.context_heads[:, layer, 1] = m.num.round(linear(b.context, w.context_v_proj[layer])).reshape(shape)


def store_keys(m, w, b, op):
    """Cache rows of the accepted positions in one layer."""
    for slot, rows in m.sequences(b.row_slot):
        rows = slice(rows.start, rows.start + int(b.row_accepted[rows].sum()))
        heads = b.context_heads[rows, op.layer]
        store(b.gqa_cache, b.page_table[slot], b.row_position[rows], head_rows(m, heads, b.row_position[rows], w.gqa_k_norm))


def head_rows(m, keys_and_values, positions, norm):
    """[n, 2, kv heads, head]: each key normed over its head and turned, values as they are."""
    keys = rms_norm(keys_and_values[:, 0], norm, m.cfg.rms_norm_eps, m.num)
    return np.stack([m.num.round(rotate(keys, positions, m.cfg.rope)), keys_and_values[:, 1]], axis=1)
