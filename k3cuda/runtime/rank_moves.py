"""A move of a collective between processes as its kernels get it (kernels_cu/rank_moves.cuh)."""
import ctypes
from math import gcd

from ..emit import MoveLayout

VECTOR, THREADS = 16, 256   # bytes; of a block
PACK, SPREAD = "move_pack", "move_spread"


class RankMove(ctypes.Structure):
    """`struct RankMove`; a test compares its size with the compiled one."""

    _fields_ = [("source", ctypes.c_void_p), ("target", ctypes.c_void_p), ("slot", ctypes.c_uint64),
                *((name, ctypes.c_int) for name in ("rows", "slice", "source_row", "target_row", "ranks", "is_cut", "unit"))]


def rank_move(layout: MoveLayout, source: int, target: int) -> RankMove:
    """`layout` between two addresses."""
    at = layout
    even = gcd(VECTOR, at.slice, at.source_row, at.target_row, at.slot, source, target) == VECTOR
    return RankMove(source, target, at.slot, at.rows, at.slice, at.source_row, at.target_row, at.ranks, at.is_cut, VECTOR if even else 2)


def part_bytes(layout: MoveLayout) -> int:
    """What one rank sends another, in whole vectors."""
    return layout.rows * -(-layout.slice // VECTOR) * VECTOR


def blocks_for(vectors: int, sms: int) -> int:
    """Of a kernel with THREADS threads, to which any number is right."""
    return max(1, min(sms, -(-vectors // THREADS)))
