"""Gated multi-head latent attention in absorbed form. Nothing is rotated; the 64 "rope" values are plain shared-key values.

Shapes here: h heads of this rank, cache rows of kv_lora_rank latent values and qk_rope_head_dim shared-key values.
Source: the released modeling code; the absorbed form equals its expanded one in real arithmetic.
"""
import numpy as np

from ..config import MLA_NORM_EPS, PAGE_SIZE
from ..context_split import own_length
from .numerics import F32, linear, linear_by_head, rms_norm, sigmoid


def mla_in(m, w, b, op):
    """Projections of attn_in [n, H]: low-rank query, latent with shared key, output gate [n, h v]."""
    r = m.num.round
    b.mla_q_a_part[:] = r(linear(b.attn_in, w.mla_q_a_proj))
    b.mla_kv_a_part[:] = r(linear(b.attn_in, w.mla_kv_a_proj))
    b.mla_out_gate[:] = r(linear(b.attn_in, w.mla_g_proj))


def mla_norm(m, w, b, op):
    """Norms the low-rank query and the latent; stores latent and raw shared key in the cache, rounded as the cache stores, where the row's
    position is the rank's own."""
    b.mla_q_latent[:] = rms_norm(b.mla_q_a, w.mla_q_a_layernorm, MLA_NORM_EPS, m.num)
    latent, key = np.split(b.mla_kv_a, [m.cfg.kv_lora_rank], axis=1)
    latent = rms_norm(latent, w.mla_kv_a_layernorm, MLA_NORM_EPS, m.num)
    for slot, rows in m.sequences(b.row_slot):
        page, row = np.divmod(b.row_position[rows], PAGE_SIZE)
        own = page % m.dcp == m.place
        b.mla_cache[b.page_table[slot, page[own] // m.dcp], row[own]] = m.num.round_cache(np.concatenate([latent[rows], key[rows]], axis=1)[own])


def mla_q(m, w, b, op):
    """mla_q [n, h, nope + rope] from the normed low-rank query."""
    b.mla_q[:] = m.num.round(linear(b.mla_q_latent, w.mla_q_b_proj)).reshape(b.mla_q.shape)


def kv_b(m, w):
    """kv_b_proj by head: [h, nope, latent] for keys, [h, v, latent] for values."""
    per_head = w.mla_kv_b_proj.reshape(-1, m.cfg.qk_nope_head_dim + m.cfg.v_head_dim, m.cfg.kv_lora_rank)
    return np.split(per_head, [m.cfg.qk_nope_head_dim], axis=1)


def mla_absorb(m, w, b, op):
    """Query against a cache row: W_k^T q_nope beside q_rope, [n, h, kv_lora_rank + rope]."""
    keys, _ = kv_b(m, w)
    nope, rope = np.split(b.mla_q, [m.cfg.qk_nope_head_dim], axis=2)
    absorbed = linear_by_head(nope, keys)
    b.mla_q_absorbed[:] = np.concatenate([m.num.round(absorbed), rope], axis=2)


def mla_attend(m, w, b, op):
    """Softmax over every cached position up to the row's own. A row's product has a shape that only its position decides."""
    for r, seen in seen_rows(m, b):
        scores = scores_of(m, b.mla_q_absorbed[r], seen)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        b.mla_o_latent[r] = p @ seen[:, :m.cfg.kv_lora_rank]


def seen_rows(m, b):
    """(row, cache rows that it sees of those that the rank holds, in order of position) for every row of a sequence."""
    for slot, rows in m.sequences(b.row_slot):
        length = own_length(b.row_position[rows] + 1, m.place, m.dcp)
        cache = slot_cache(b.mla_cache, b.page_table[slot], length[-1])
        for r in range(rows.start, rows.stop):
            yield r, cache[:length[r - rows.start]]


def scores_of(m, queries, seen):
    """[h, n] of absorbed queries [h, cache row] over cache rows [n, cache row]."""
    return (queries @ seen.T) * F32((m.cfg.qk_nope_head_dim + m.cfg.qk_rope_head_dim) ** -0.5)


def slot_cache(cache, slot_pages, length):
    """The first `length` rows of a paged cache [pages, page size, ..] that lie in `slot_pages`, in order of position."""
    pages = slot_pages[:-(-length // PAGE_SIZE)]
    if len(pages) and np.array_equal(pages, np.arange(pages[0], pages[0] + len(pages))):
        chosen = cache[pages[0]:pages[0] + len(pages)]  # neighbours need no copy
    else:
        chosen = cache[pages]
    return chosen.reshape(-1, *chosen.shape[2:])[:length]


def mla_out(m, w, b, op):
    """mixer_out [n, h v]: W_v of the mean latent [n, h, latent], times the sigmoid of the output gate. No norm here."""
    _, values = kv_b(m, w)
    o = linear_by_head(b.mla_o_latent, values.swapaxes(1, 2))
    gate = sigmoid(b.mla_out_gate)
    b.mixer_out[:] = m.num.round(m.num.round(o.reshape(gate.shape)) * gate)
