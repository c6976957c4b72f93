"""A draft's context: one fused vector a committed position, and from it the keys and values of every layer. docs/dspark.md, section 2.

The fused vector goes into the projections as it is: a block's own rows pass the layer's input norm first, these do not.
Shapes here: T taps, L layers of the draft.
"""
import numpy as np

from ..config import PAGE_SIZE
from .numerics import linear, rms_norm
from .rope import rotate


def fuse(m, w, b, op):
    """context_part [n, this rank's outputs]: taps [n, T, H], ascending by layer, times context_proj."""
    b.context_part[:] = m.num.round(linear(b.taps.reshape(len(b.taps), -1), w.context_proj))


def fuse_normed(m, w, b, op):
    """The same with every tap normed by its own weight, fc_norm [T, H]."""
    taps = rms_norm(b.taps, w.fc_norm, m.cfg.rms_norm_eps, m.num)
    b.context_part[:] = m.num.round(linear(taps.reshape(len(taps), -1), w.context_proj))


def context_mean(m, w, b, op):
    """context [n, H]: RMSNorm of the fused taps."""
    b.context[:] = rms_norm(b.context_raw, w.context_norm, m.cfg.rms_norm_eps, m.num)


def context_latents(m, w, b, op):
    """context_latent_part [n, L, this rank's outputs]: latent and shared key of every layer."""
    for layer, proj in enumerate(w.context_kv_proj):
        b.context_latent_part[:, layer] = m.num.round(linear(b.context, proj))


def context_keys(m, w, b, op):
    """context_heads [n, L, 2, kv heads of this rank, head]: keys and values of every layer."""
    shape = (len(b.context), *b.context_heads.shape[3:])
    for layer in range(len(w.context_k_proj)):
        b.context_heads[:, layer, 0] = m.num.round(linear(b.context, w.context_k_proj[layer])).reshape(shape)
        b.context_heads[:, layer, 1] = m.num.round(linear(b.context, w.context_v_proj[layer])).reshape(shape)


def store_latents(m, w, b, op):
    """Cache rows of the accepted positions in one layer."""
    for slot, rows in m.sequences(b.row_slot):
        rows = slice(rows.start, rows.start + int(b.row_accepted[rows].sum()))
        values = cache_row(m, b.context_latent[rows, op.layer], b.row_position[rows], w.mla_kv_a_layernorm)
        store(b.mla_cache, b.page_table[slot], b.row_position[rows], m.num.round(values))


def store_keys(m, w, b, op):
    """Cache rows of the accepted positions in one layer."""
    for slot, rows in m.sequences(b.row_slot):
        rows = slice(rows.start, rows.start + int(b.row_accepted[rows].sum()))
        heads = b.context_heads[rows, op.layer]
        store(b.gqa_cache, b.page_table[slot], b.row_position[rows], head_rows(m, heads, b.row_position[rows], w.gqa_k_norm))


def cache_row(m, latent_and_key, positions, norm):
    """[n, latent + key]: the latent normed, the shared key turned to its position."""
    latent, key = np.split(latent_and_key, [m.cfg.kv_lora_rank], axis=1)
    latent = rms_norm(latent, norm, m.cfg.rms_norm_eps, m.num)
    return np.concatenate([latent, m.num.round(rotate(key, positions, m.cfg.rope))], axis=1)


def head_rows(m, keys_and_values, positions, norm):
    """[n, 2, kv heads, head]: each key normed over its head and turned, values as they are."""
    keys = rms_norm(keys_and_values[:, 0], norm, m.cfg.rms_norm_eps, m.num)
    return np.stack([m.num.round(rotate(keys, positions, m.cfg.rope)), keys_and_values[:, 1]], axis=1)


def store(cache, slot_pages, positions, values):
    cache[slot_pages[positions // PAGE_SIZE], positions % PAGE_SIZE] = values
