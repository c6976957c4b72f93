"""Rotary embedding: pairs of values turned by an angle that grows with the position. Source: `apply_rotary_pos_emb` of transformers."""
import functools

import numpy as np

from ..draft_rope import Rope
from .numerics import F32


def rotate(x: np.ndarray, positions: np.ndarray, rope: Rope | None) -> np.ndarray:
    """x [n, .., dim] turned by positions [n], F32; x itself where nothing is rotated. Angles are made in F64: positions reach a million."""
    if rope is None:
        return x
    angles = positions.astype(np.float64)[:, None] * _frequencies(rope)
    angles = angles.reshape(len(x), *(1,) * (x.ndim - 2), -1)
    cos, sin = F32(rope.magnitude) * np.cos(angles).astype(F32), F32(rope.magnitude) * np.sin(angles).astype(F32)
    half = rope.dim // 2
    first, second = (x[..., 0::2], x[..., 1::2]) if rope.interleaved else (x[..., :half], x[..., half:])
    out = np.empty_like(x)
    turned = (out[..., 0::2], out[..., 1::2]) if rope.interleaved else (out[..., :half], out[..., half:])
    turned[0][...] = first * cos - second * sin
    turned[1][...] = first * sin + second * cos
    return out


@functools.cache
def _frequencies(rope: Rope) -> np.ndarray:
    return np.array(rope.inverse_frequencies())
