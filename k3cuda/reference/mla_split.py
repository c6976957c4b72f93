"""Multi-head latent attention where a group of ranks holds the cache together: each over its own positions, and their merge."""
import numpy as np

from .mla import scores_of, seen_rows
from .numerics import tree_sum


def mla_attend_own(m, w, b, op):
    """Of the rank's own positions and all heads of its group, [n, group's heads, latent + 2]: the weighted sum of latents, the largest score, which
    weighs 1 in it, and the sum of weights. A row that sees none of them: 0, -inf, 0."""
    latent = m.cfg.kv_lora_rank
    for r, seen in seen_rows(m, b):
        values, top, total = np.split(b.mla_own[r], [latent, latent + 1], axis=1)
        scores = scores_of(m, b.mla_q_group[r], seen)
        top[:] = scores.max(-1, keepdims=True, initial=-np.inf)
        p = np.exp(scores - top)
        total[:] = p.sum(-1, keepdims=True)
        values[:] = p @ seen[:, :latent]


def mla_merge(m, w, b, op):
    """Mean latent [n, h, latent] of what the ranks of a group attended to, mla_owns [ranks, n, h, latent + 2]: sums over places, neighbours first."""
    values, top, total = np.split(b.mla_owns, [m.cfg.kv_lora_rank, m.cfg.kv_lora_rank + 1], axis=-1)
    weight = np.exp(top - top.max(0))
    b.mla_o_latent[:] = tree_sum(values * weight) / tree_sum(total * weight)
