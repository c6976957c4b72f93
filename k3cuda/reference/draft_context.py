"""A draft's context: one fused vector a committed position, of which the families make keys and values of every layer. docs/dspark.md, section 2.

The fused vector goes into the projections as it is: a block's own rows pass the layer's input norm first, these do not.
Shapes here: T taps.
"""
from ..config import PAGE_SIZE
from .numerics import linear, rms_norm


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


def store(cache, slot_pages, positions, values):
    cache[slot_pages[positions // PAGE_SIZE], positions % PAGE_SIZE] = values
