"""Output projection of either attention, cut over its inputs: every rank has a partial sum."""
from .numerics import linear


def o_proj(m, w, b, op):
    """attn_partial [n, H]: mixer_out [n, this rank's inputs] times its columns of W_o."""
    b.attn_partial[:] = linear(b.mixer_out, w.o_proj)

