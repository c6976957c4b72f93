"""Weights in the order in which the kernels read them: fragments of mma.m16n8k16, leaf by leaf, 16 bytes a lane.

Packing of BF16 and all unpacking work on NumPy and on CuPy arrays alike (every call is a method of the array or of its module).
docs/kernels.md draws the layouts.

Order of k. Lane 4 g + q of a warp holds the weights that meet token g's k = 8 q .. 8 q + 7 of every 32, so that a lane reads
a token's BF16 values 16 bytes at a time. The tensor product's own k is a name only: both operands use the same permutation.
"""
import functools

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

_MASK = 0x81C081C0   # sign at the top of each half, e1 e0 m at bits 8..6


def expand(word):
    """The four pairs of weights of a packed word, low and high half, as BF16 bits of 2^-126 times their values: Python's integers or arrays of uint32.

    Eight instructions for eight weights, three of them products (`expand_mxfp4` in kernels_cu/mxfp4.cuh). No four rotations and a mask tile a word, so the
    last pair has two terms, and the bits that both bring along stay in: a word is stored so that they cancel.
    """
    turned = word << 22 | word >> 10
    return [word & _MASK, turned << 4 & _MASK, word << 4 & _MASK, (turned ^ turned << 8) & _MASK]


_HOME = (6, 7, 8, 15)   # of a code's bits m, e0, e1, sign in a half


def _nibble_tables() -> np.ndarray:
    """[pair, half, code] -> what the code adds to a word, XORed: the inverse of `expand`, which is linear over bits."""
    places = [(pair, bit + 16 * half) for pair in range(4) for half in range(2) for bit in _HOME]
    rows = []   # (which places see a bit of the word, the bit)
    for i in range(32):
        pairs = expand(1 << i)
        rows.append((sum((pairs[pair] >> bit & 1) << n for n, (pair, bit) in enumerate(places)), 1 << i))
    for n in range(32):   # until each row has one place of its own
        pivot = next(i for i in range(n, 32) if rows[i][0] >> n & 1)
        rows[n], rows[pivot] = rows[pivot], rows[n]
        for i in range(32):
            if i != n and rows[i][0] >> n & 1:
                rows[i] = rows[i][0] ^ rows[n][0], rows[i][1] ^ rows[n][1]
    table = np.zeros((8, 16), np.uint32)
    for code in range(16):
        for bit in range(4):
            if code >> bit & 1:
                table[:, code] ^= np.array([word for _, word in rows[bit::4]], np.uint32)
    return table.reshape(4, 2, 16)


def _word_tables() -> np.ndarray:
    """[row half, two bytes] -> their bits of the word: a byte holds the codes of pair row half, the next one of pair row half + 2."""
    both = np.arange(1 << 16)
    tables = np.zeros((2, 1 << 16), np.uint32)
    for half in range(2):
        for k in range(2):
            low, high = NIBBLE_TABLES[half + 2 * k]
            byte = both >> 8 * k & 255
            tables[half] ^= low[byte & 15] ^ high[byte >> 4]
    return tables


NIBBLE_TABLES = _nibble_tables()
WORD_TABLES = _word_tables()


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


def pack_mxfp4(packed, scale, leaves: int, out=None):
    """One expert's matrix, or several at once, in kernel order. NumPy only.

    Args:
        packed: uint8 [.., rows, k / 2], low nibble first.
        scale: uint8 [.., rows, k / 32], E8M0.
        leaves: leaves of the tree over K; each is whole groups of 32.
        out: where the result goes, its last axis contiguous; None: a new array.
    Returns:
        uint8 [.., tiles, leaves, leaf_bytes]: for every two groups 32 lanes x 16 bytes (an odd last group: x 8), then
        for every four groups the scales of rows g and g + 8 side by side.
    Raises:
        CheckpointError: a scale above 2^65, which the F32 factor cannot hold.
    """
    *lead, rows, half = packed.shape
    groups = scale.shape[-1] // leaves
    if half * 2 != groups * leaves * MXFP4_GROUP:
        raise ValueError(f"{half * 2} inputs and {scale.shape[-1]} scales don't make {leaves} leaves of whole groups")
    if bool(((scale > MAX_SCALE_CODE) & (scale < 255)).any()):
        raise CheckpointError(f"an MXFP4 scale code is {int(scale[scale < 255].max())}, wanted at most {MAX_SCALE_CODE}",
                              "no trained weight is that large: check the file")
    if out is None:
        out = np.empty((*lead, tiles_of(rows), leaves, leaf_bytes(groups)), np.uint8)
    for index in np.ndindex(*lead):   # one matrix at a time: what it passes through stays in the cache
        _pack_matrix(np.ascontiguousarray(_pad_rows(packed[index])), _pad_rows(scale[index]), out[index], leaves, groups)
    return out


def _pack_matrix(packed: np.ndarray, scale: np.ndarray, out: np.ndarray, leaves: int, groups: int) -> None:
    # Rows g and g + 8, two bytes of each at once: a look-up of two bytes is six times as fast as four of a nibble.
    tiles, sw = len(packed) // TILE_ROWS, scale_words(groups)
    halves = packed.view("<u2").reshape(tiles, 2, 8, -1)
    words = np.take(WORD_TABLES[0], halves[:, 0], mode="clip")   # clip: no check of every index
    words ^= np.take(WORD_TABLES[1], halves[:, 1], mode="clip")
    exponents = np.zeros((tiles, 8, leaves, sw, 2, 4), np.uint8)   # of the factors: of rows g and g + 8 side by side
    padded = np.zeros((tiles, 2, 8, leaves, sw * 4), np.uint8)
    padded[..., :groups] = np.where(scale == 255, 255, scale + np.uint8(SCALE_SHIFT)).reshape(tiles, 2, 8, leaves, groups)
    exponents[...] = padded.reshape(tiles, 2, 8, leaves, sw, 4).transpose(0, 2, 3, 4, 1, 5)
    both = np.concatenate([words.reshape(-1).view("<u8"), exponents.reshape(-1).view("<u8")])
    out.view("<u8")[...] = np.take(both, _order(tiles, leaves, groups), mode="clip")


@functools.lru_cache(maxsize=8)
def _order(tiles: int, leaves: int, groups: int) -> np.ndarray:
    """[tile, leaf, eight bytes]: where each comes from: [tile, g, leaf, group, q] of weights, then [tile, g, leaf, four groups] of scales."""
    even, sw = groups // 2 * 2, scale_words(groups)
    w = np.arange(tiles * 8 * leaves * groups * 4).reshape(tiles, 8, leaves, groups, 4)
    pairs = w[:, :, :, :even].reshape(tiles, 8, leaves, even // 2, 2, 4).transpose(0, 2, 3, 1, 5, 4)
    odd = w[:, :, :, even:].transpose(0, 2, 3, 1, 4)
    s = w.size + np.arange(tiles * 8 * leaves * sw).reshape(tiles, 8, leaves, sw).transpose(0, 2, 3, 1)
    return np.concatenate([part.reshape(tiles, leaves, -1) for part in (pairs, odd, s)], axis=2)


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
    for pair, register in enumerate(expand(words)):
        byte = xp.zeros(words.shape, xp.uint8)
        for half in range(2):
            for bit, home in enumerate(_HOME):
                byte |= ((register >> xp.uint32(home + 16 * half) & xp.uint32(1)) << xp.uint32(bit + 4 * half)).astype(xp.uint8)
        b[:, :, pair % 2, :, :, :, :, :, pair // 2] = byte.transpose(0, 1, 4, 2, 3, 5, 6)
    s = out[..., at:].reshape(n, tiles, leaves, sw, 8, 2, 4).transpose(0, 1, 5, 4, 2, 3, 6)
    s = s.reshape(n, tiles * TILE_ROWS, leaves, sw * 4)[..., :groups].reshape(n, tiles * TILE_ROWS, -1)
    s = xp.where(s == 255, 255, s.astype(xp.int32) - SCALE_SHIFT).astype(xp.uint8)
    packed = b.reshape(n, tiles * TILE_ROWS, -1)
    return packed[:, :rows].reshape(*lead, rows, -1), s[:, :rows].reshape(*lead, rows, -1)
