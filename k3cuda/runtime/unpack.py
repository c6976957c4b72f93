"""The way back from kernel order: a rank's slices of the checkpoint, bit for bit, from arrays that cuda_weights.py packed."""
from typing import NamedTuple

import numpy as np

from .. import packing
from ..config import K3Config
from ..packing import Packed
from ..weights import BY_NAME, rank_shape
from .repack import LANES, leaf_bytes, tiles_of, unpack_bf16, unpack_mxfp4
from .safetensors_file import numpy_dtype


class Tiles(NamedTuple):
    """Where one weight lies in an array of kernel order.

    Attributes:
        tiles: uint16 [tiles, leaves, steps, LANES, 8], with the heads before them where each is packed on its own; of MXFP4 uint8
            [experts, tiles, leaves, bytes].
        rows: that they hold; the last tile may have more. steps: k-steps of a leaf (MXFP4: groups).
    """

    tiles: np.ndarray
    rows: int
    steps: int


def tiles_in(p: Packed, array, cfg: K3Config, tp: int) -> dict[str, Tiles]:
    """Weight name -> its place in `array`, uint8 [bytes] of NumPy's or CuPy's, of any number of experts. Not for what is stored as it is, or folded."""
    if p.how in (packing.HEADS, packing.HEADS_TURNED):
        rows, k = (cfg.kv_lora_rank, cfg.qk_nope_head_dim) if p.how == packing.HEADS_TURNED else (cfg.v_head_dim, cfg.kv_lora_rank)
        leaves, steps = packing.inputs_leaves_and_steps(k)
        return {p.sources[0]: Tiles(array.view(np.uint16).reshape(-1, tiles_of(rows), leaves, steps, LANES, 8), rows, steps)}
    leaves, steps = packing.leaves_and_steps(p.sources[-1], cfg, tp)
    rows = {name: rank_shape(BY_NAME[name], cfg.dims(), tp)[0] for name in p.sources}
    if p.how in (packing.EXPERTS, packing.EXPERT_PAIRS):
        tiles = array.reshape(-1, tiles_of(rows[p.sources[0]]), len(p.sources), leaves, leaf_bytes(steps))
        return {name: Tiles(tiles[:, :, i], rows[name], steps) for i, name in enumerate(p.sources)}
    # Matrices behind each other; of PAIRS the last two come first, their tiles in turn.
    tiles, at, names, found = array.view(np.uint16).reshape(-1, leaves, steps, LANES, 8), 0, p.sources, {}
    if p.how == packing.PAIRS:
        *names, gate, up = names
        at = 2 * tiles_of(rows[gate])
        found = {gate: Tiles(tiles[0:at:2], rows[gate], steps), up: Tiles(tiles[1:at:2], rows[up], steps)}
    for name in names:
        found[name] = Tiles(tiles[at:at + tiles_of(rows[name])], rows[name], steps)
        at += tiles_of(rows[name])
    assert at == len(tiles), (p, at, len(tiles))
    return found


def unpacked(arrays: dict[str, np.ndarray], stored: tuple[Packed, ...], cfg: K3Config, tp: int) -> dict[str, np.ndarray]:
    """Weight name -> its slice, [(experts,) rows, columns ..] in the stored dtype, of all weights that the arrays of one layer hold.

    Args:
        arrays: uint8 [bytes] by name, for each of `stored`, of any number of experts. A folded product is not among them.
    """
    found, halves = {}, {}
    for p in stored:
        array = arrays[p.name]
        if p.how == packing.PLAIN:
            first = BY_NAME[p.sources[0]]
            found[first.name] = array.view(numpy_dtype(first.dtype)).reshape(rank_shape(first, cfg.dims(), tp))
            continue
        for name, place in tiles_in(p, array, cfg, tp).items():
            if p.how in (packing.HEADS, packing.HEADS_TURNED):
                heads = np.stack([unpack_bf16(tiles, place.rows) for tiles in place.tiles])
                halves[p.how] = heads.swapaxes(1, 2) if p.how == packing.HEADS_TURNED else heads
            elif p.how in (packing.EXPERTS, packing.EXPERT_PAIRS):
                found[name], found[f"{name}_scale"] = _experts(*place)
            else:
                found[name] = _bf16(unpack_bf16(place.tiles, place.rows))
    if halves:
        kv_b = np.concatenate([halves[packing.HEADS_TURNED], halves[packing.HEADS]], axis=1)
        found["mla_kv_b_proj"] = _bf16(kv_b.reshape(-1, cfg.kv_lora_rank))
    return found


def _experts(tiles: np.ndarray, rows: int, groups: int) -> tuple[np.ndarray, np.ndarray]:
    """One expert after the other: what unpacking passes through is many times as large as what comes out."""
    out = []
    for expert, matrix in enumerate(tiles):
        halves = unpack_mxfp4(np.ascontiguousarray(matrix), rows, groups)
        out = out or [np.empty((len(tiles), *half.shape), np.uint8) for half in halves]
        for whole, half in zip(out, halves):
            whole[expert] = half
    return tuple(out)


def _bf16(bits: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(bits).view(numpy_dtype("BF16"))
