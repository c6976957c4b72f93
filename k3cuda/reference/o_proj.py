"""Output projection of either attention, cut over its inputs: every rank has a partial sum."""
from .numerics import linear


def o_proj(m, w, b, op):
    b.attn_partial[:] = linear(b.mixer_out, w.o_proj)

