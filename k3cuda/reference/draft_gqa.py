"""Grouped-query attention of a draft's block. Shapes here: h query heads and g key heads of this rank, h / g queries share a key; d a head."""
import numpy as np

from .draft_context import head_rows, store
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
