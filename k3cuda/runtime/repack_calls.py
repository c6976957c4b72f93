"""Which kernels of repack.cuh make a packed array of a rank's slices, and with which arguments; nothing here touches a device."""
from dataclasses import dataclass

from .. import packing
from ..config import K3Config
from ..packing import Packed
from ..weights import BY_NAME, rank_shape
from .repack import LANES, MAX_SCALE_CODE, SCALE_SHIFT, leaf_bytes, tiles_of

BF16, MXFP4 = "repack_bf16", "repack_mxfp4"


@dataclass(frozen=True)
class Call:
    """One launch.

    Attributes:
        source: weight whose slice is read; MXFP4 reads its scales too. skip: its elements before the first one that is.
        out: bytes of the packed array before the first that is written.
        ints, longs: arguments of the kernel by kind, in its order: ints, then (BF16) three u64 strides before the last two ints.
    """

    kernel: str
    source: str
    skip: int
    out: int
    ints: tuple[int, ...]
    longs: tuple[int, ...] = ()


def calls_of(p: Packed, cfg: K3Config, tp: int, experts: int) -> list[Call]:
    """The launches that make `p` on one of `tp` ranks; of weights of the experts, of so many. [] for what is copied as it is."""
    if p.how in (packing.PLAIN, packing.FOLDED):
        return []
    if p.how in (packing.HEADS, packing.HEADS_TURNED):
        return [_heads(p, cfg, tp)]
    dims = cfg.dims()
    if p.how in (packing.EXPERTS, packing.EXPERT_PAIRS):
        calls = []
        for i, name in enumerate(p.sources):
            leaves, groups = packing.leaves_and_steps(name, cfg, tp)
            rows = rank_shape(BY_NAME[name], dims, tp)[0]
            ints = (experts, rows, leaves, groups, SCALE_SHIFT, MAX_SCALE_CODE, len(p.sources))
            calls.append(Call(MXFP4, name, 0, i * leaves * leaf_bytes(groups), ints))
        return calls
    leaves, steps = packing.leaves_and_steps(p.sources[-1], cfg, tp)
    in_turn = p.sources[-2:] if p.how == packing.PAIRS else ()
    calls, tile = [], 0
    for name in (*in_turn, *(n for n in p.sources if n not in in_turn)):
        rows, k = rank_shape(BY_NAME[name], dims, tp)
        step = len(in_turn) if name in in_turn else 1
        first = in_turn.index(name) if name in in_turn else tile
        calls.append(Call(BF16, name, 0, first * leaves * steps * LANES * 16, (1, rows, leaves, steps, 0, step), (0, k, 1)))
        tile += tiles_of(rows)
    return calls


def _heads(p: Packed, cfg: K3Config, tp: int) -> Call:
    name, = p.sources
    rows, rank = rank_shape(BY_NAME[name], cfg.dims(), tp)
    keys, values = cfg.qk_nope_head_dim, cfg.v_head_dim
    of_head, heads = keys + values, rows // (keys + values)
    turned = p.how == packing.HEADS_TURNED
    rows, k, skip, strides = (rank, keys, 0, (1, rank)) if turned else (values, rank, keys * rank, (rank, 1))
    leaves, steps = packing.inputs_leaves_and_steps(k)
    return Call(BF16, name, skip, 0, (heads, rows, leaves, steps, tiles_of(rows), 1), (of_head * rank, *strides))
