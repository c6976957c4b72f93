"""Output projection of either attention, cut over its inputs; the sum over ranks joins the prefix sum."""
from .numerics import linear, tree_sum


def o_proj(m, w, b, op):
    b.attn_partial[:] = linear(b.mixer_out, w.o_proj)


def attn_sum(m, w, b, op):
    b.hidden[:] = m.num.round(b.hidden + m.num.round(tree_sum(b.attn_parts)))
