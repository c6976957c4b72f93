"""Logits of the rows that were asked for."""
from .numerics import linear


def lm_head(m, w, b, op):
    """logits_part [rows wanted, this rank's tokens]: no scale, no soft cap."""
    b.logits_part[:] = m.num.round(linear(b.head_in, w.lm_head))
