"""Weights in the order in which the kernels read them: fragments of mma.m16n8k16, leaf by leaf, 16 bytes a lane.

Works on NumPy and on CuPy arrays alike (every call is a method of the array or of its module). docs/kernels.md draws the layouts.

Order of k. Lane 4 g + q of a warp holds the weights that meet token g's k = 8 q .. 8 q + 7 of every 32, so that a lane reads
a token's BF16 values 16 bytes at a time. The tensor product's own k is a name only: both operands use the same permutation.
"""
import numpy as np

from ..config import MXFP4_GROUP
from ..errors import CheckpointError
from ..weights import MMA_K

TILE_ROWS = 16
LANES = 32
PAIR_K = 2 * MMA_K
# Activations are multiplied by 2^X_EXPONENT before they meet expanded MXFP4 weights, which are 2^-126 too small (their two
# exponent bits land at the bottom of BF16's): the product of both stays far from the subnormal end of F32.
X_EXPONENT = 64
SCALE_SHIFT = 126 - X_EXPONENT          # E8M0 code -> exponent field of the F32 factor that undoes both
MAX_SCALE_CODE = 254 - SCALE_SHIFT      # 2^65; code 255 (NaN) becomes infinity, which also ends in a row that isn't finite

# Where the bits of a packed word go. Pair i (two weights, low and high half) of a word w is
#   0: w & M      1: rotl(w, 10) & M      2: w << 4 & M      3: (w << 6 & 0x80C080C0) | (w >> 2 & 0x01000100)
# with M = 0x81C081C0: sign at the top of each half, e1 e0 m at bits 8..6. No three rotations and a mask tile a word: this is
# the cheapest exact cover, nine instructions for eight weights.
_LEFT = ((0, 0, 0, 0), (10, 10, 10, 10), (4, 4, 4, 4), (6, 6, -2, 6))   # rotation that brings (m, e0, e1, sign) of a pair home
_HOME = (6, 7, 8, 15)


def _nibble_tables() -> np.ndarray:
    """[pair, half, code] -> the code's bits where the word keeps them."""
    table = np.zeros((4, 2, 16), np.uint32)
    for pair in range(4):
        for half in range(2):
            for code in range(16):
                for bit in range(4):
                    at = (_HOME[bit] + 16 * half - _LEFT[pair][bit]) % 32
                    table[pair, half, code] |= np.uint32((code >> bit & 1) << at)
    return table


NIBBLE_TABLES = _nibble_tables()


def _module(a):
    """numpy or cupy, whichever made `a`."""
    if isinstance(a, np.ndarray):
        return np
    import cupy
    return cupy


def tiles_of(rows: int) -> int:
    return -(-rows // TILE_ROWS)


def _pad_rows(w):
    missing = -len(w) % TILE_ROWS
    if not missing:
        return w
    return _module(w).concatenate([w, _module(w).zeros((missing, *w.shape[1:]), w.dtype)])


# ---- BF16 ----

def pack_bf16(w, leaves: int):
    """w uint16 [rows, k] (BF16 bits) -> uint16 [tiles, leaves, k-steps, 32 lanes, 8]; missing rows of the last tile are zero.

    Args:
        leaves: leaves of the tree over K that `w` holds; each is k / leaves inputs, whole k-steps.
    """
    rows, k = w.shape
    if k % (leaves * MMA_K):
        raise ValueError(f"{k} inputs don't make {leaves} leaves of whole k-steps")
    xp, steps = _module(w), k // leaves // MMA_K
    tiles = tiles_of(rows)
    w = _pad_rows(w).reshape(tiles, 2, 8, leaves, steps * MMA_K)
    out = xp.empty((tiles, leaves, steps, LANES, 8), w.dtype)
    pairs = steps // 2
    if pairs:
        # [tile, row half, g, leaf, pair, q, step, k half, odd] -> [tile, leaf, pair, step, g, q, k half, row half, odd]
        part = w[..., :pairs * PAIR_K].reshape(tiles, 2, 8, leaves, pairs, 4, 2, 2, 2)
        out[:, :, :pairs * 2] = part.transpose(0, 3, 4, 6, 2, 5, 7, 1, 8).reshape(tiles, leaves, pairs * 2, LANES, 8)
    if steps % 2:
        part = w[..., pairs * PAIR_K:].reshape(tiles, 2, 8, leaves, 4, 2, 2)
        out[:, :, -1] = part.transpose(0, 3, 2, 4, 5, 1, 6).reshape(tiles, leaves, LANES, 8)
    return out


def unpack_bf16(packed, rows: int):
    """The inverse of `pack_bf16`: uint16 [rows, k]."""
    xp = _module(packed)
    tiles, leaves, steps = packed.shape[:3]
    pairs = steps // 2
    w = xp.empty((tiles, 2, 8, leaves, steps * MMA_K), packed.dtype)
    if pairs:
        part = packed[:, :, :pairs * 2].reshape(tiles, leaves, pairs, 2, 8, 4, 2, 2, 2)
        w[..., :pairs * PAIR_K] = part.transpose(0, 7, 4, 1, 2, 5, 3, 6, 8).reshape(tiles, 2, 8, leaves, pairs * PAIR_K)
    if steps % 2:
        part = packed[:, :, -1].reshape(tiles, leaves, 8, 4, 2, 2, 2)
        w[..., pairs * PAIR_K:] = part.transpose(0, 5, 2, 1, 3, 4, 6).reshape(tiles, 2, 8, leaves, MMA_K)
    return w.reshape(tiles * TILE_ROWS, leaves * steps * MMA_K)[:rows]


def join(parts, interleave: bool = False):
    """Packed arrays of one K as one matrix: tiles behind each other, or taken in turn (gate and up of a GLU side by side)."""
    xp = _module(parts[0])
    return xp.stack(parts, axis=1).reshape(-1, *parts[0].shape[1:]) if interleave else xp.concatenate(parts)


# ---- MXFP4 ----

def scale_words(groups: int) -> int:
    """32-bit words of scales a row keeps for one leaf."""
    return -(-groups // 4)


def leaf_bytes(groups: int) -> int:
    """Bytes of one tile's leaf: weights, then scales."""
    return groups * TILE_ROWS * MXFP4_GROUP // 2 + scale_words(groups) * TILE_ROWS * 4


def pack_mxfp4(packed, scale, leaves: int):
    """One expert's matrix, or several at once, in kernel order.

    Args:
        packed: uint8 [.., rows, k / 2], low nibble first.
        scale: uint8 [.., rows, k / 32], E8M0.
        leaves: leaves of the tree over K; each is whole groups of 32.
    Returns:
        uint8 [.., tiles, leaves, leaf_bytes]: for every two groups 32 lanes x 16 bytes (an odd last group: x 8), then
        for every four groups the scales of rows g and g + 8 side by side.
    Raises:
        CheckpointError: a scale above 2^65, which the F32 factor cannot hold.
    """
    xp = _module(packed)
    *lead, rows, half = packed.shape
    groups = scale.shape[-1] // leaves
    if half * 2 != groups * leaves * MXFP4_GROUP:
        raise ValueError(f"{half * 2} inputs and {scale.shape[-1]} scales don't make {leaves} leaves of whole groups")
    if bool(((scale > MAX_SCALE_CODE) & (scale < 255)).any()):
        raise CheckpointError(f"an MXFP4 scale code is {int(scale[scale < 255].max())}, wanted at most {MAX_SCALE_CODE}",
                              "no trained weight is that large: check the file")
    tiles = tiles_of(rows)
    packed, scale = packed.reshape(-1, rows, half), scale.reshape(-1, rows, groups * leaves)
    if rows % TILE_ROWS:
        packed, scale = (xp.concatenate([a, xp.zeros((len(a), tiles * TILE_ROWS - rows, a.shape[-1]), a.dtype)], axis=1)
                         for a in (packed, scale))
    n = len(packed)
    # Bytes hold (even, odd) k: [n, tile, row half, g, leaf, group, q, step, k half] -> word [n, tile, leaf, group, g, q, step]
    b = packed.reshape(n, tiles, 2, 8, leaves, groups, 4, 2, 2)
    words = xp.zeros((n, tiles, leaves, groups, 8, 4, 2), xp.uint32)
    for pair in range(4):   # register `pair` of the fragment: row half pair % 2, k half pair // 2
        byte = b[:, :, pair % 2, :, :, :, :, :, pair // 2].transpose(0, 1, 3, 4, 2, 5, 6)
        for half_of_pair in range(2):
            table = xp.asarray(NIBBLE_TABLES[pair, half_of_pair])
            words |= table[byte >> 4 if half_of_pair else byte & 15]
    out = xp.zeros((n, tiles, leaves, leaf_bytes(groups)), xp.uint8)
    even = groups // 2 * 2
    at = 0
    if even:   # [.., group pair, lane, group of the pair, step]
        w = words[:, :, :, :even].reshape(n, tiles, leaves, even // 2, 2, LANES, 2).transpose(0, 1, 2, 3, 5, 4, 6)
        at = even * LANES * 8
        out[..., :at] = _bytes(xp, w).reshape(n, tiles, leaves, at)
    if groups % 2:
        out[..., at:at + LANES * 8] = _bytes(xp, words[:, :, :, -1]).reshape(n, tiles, leaves, LANES * 8)
        at += LANES * 8
    sw = scale_words(groups)
    s = xp.zeros((n, tiles, 2, 8, leaves, sw * 4), xp.uint8)
    s[..., :groups] = _factor_exponent(xp, scale).reshape(n, tiles, 2, 8, leaves, groups)
    out[..., at:] = s.reshape(n, tiles, 2, 8, leaves, sw, 4).transpose(0, 1, 4, 5, 3, 2, 6).reshape(n, tiles, leaves, sw * 64)
    return out.reshape(*lead, tiles, leaves, leaf_bytes(groups))


def _bytes(xp, words):
    return xp.ascontiguousarray(words).view(xp.uint8)


def _factor_exponent(xp, scale):
    """Exponent field of the F32 factor of each scale code."""
    return xp.where(scale == 255, 255, scale.astype(xp.int32) + SCALE_SHIFT).astype(xp.uint8)


def unpack_mxfp4(out, rows: int, groups: int):
    """The inverse of `pack_mxfp4` for one or several matrices: (packed, scale); `groups` in a leaf."""
    xp = _module(out)
    *lead, tiles, leaves, _ = out.shape
    out = out.reshape(-1, tiles, leaves, out.shape[-1])
    n, even, sw = len(out), groups // 2 * 2, scale_words(groups)
    words = xp.empty((n, tiles, leaves, groups, 8, 4, 2), xp.uint32)
    at = even * LANES * 8
    if even:
        w = xp.ascontiguousarray(out[..., :at]).view(xp.uint32).reshape(n, tiles, leaves, even // 2, LANES, 2, 2)
        words[:, :, :, :even] = w.transpose(0, 1, 2, 3, 5, 4, 6).reshape(n, tiles, leaves, even, 8, 4, 2)
    if groups % 2:
        w = xp.ascontiguousarray(out[..., at:at + LANES * 8]).view(xp.uint32)
        words[:, :, :, -1] = w.reshape(n, tiles, leaves, 8, 4, 2)
        at += LANES * 8
    b = xp.zeros((n, tiles, 2, 8, leaves, groups, 4, 2, 2), xp.uint8)
    for pair in range(4):
        byte = xp.zeros(words.shape, xp.uint8)
        for half in range(2):
            for bit in range(4):
                at_bit = (_HOME[bit] + 16 * half - _LEFT[pair][bit]) % 32
                byte |= ((words >> xp.uint32(at_bit) & xp.uint32(1)) << xp.uint32(bit + 4 * half)).astype(xp.uint8)
        b[:, :, pair % 2, :, :, :, :, :, pair // 2] = byte.transpose(0, 1, 4, 2, 3, 5, 6)
    s = out[..., at:].reshape(n, tiles, leaves, sw, 8, 2, 4).transpose(0, 1, 5, 4, 2, 3, 6)
    s = s.reshape(n, tiles * TILE_ROWS, leaves, sw * 4)[..., :groups].reshape(n, tiles * TILE_ROWS, -1)
    s = xp.where(s == 255, 255, s.astype(xp.int32) - SCALE_SHIFT).astype(xp.uint8)
    packed = b.reshape(n, tiles * TILE_ROWS, -1)
    return packed[:, :rows].reshape(*lead, rows, -1), s[:, :rows].reshape(*lead, rows, -1)
