"""The way back from kernel order: a rank's slices of the checkpoint, bit for bit, from arrays that cuda_weights.py packed."""
from math import prod

import numpy as np

from .. import packing
from ..config import K3Config
from ..packing import Packed
from ..weights import BY_NAME
from .repack import LANES, leaf_bytes, tiles_of, unpack_bf16, unpack_mxfp4
from .safetensors_file import numpy_dtype
from .slices import slice_shape


def unpacked(arrays: dict[str, np.ndarray], stored: tuple[Packed, ...], cfg: K3Config, tp: int) -> dict[str, np.ndarray]:
    """Weight name -> its slice, [(experts,) rows, columns ..] in the stored dtype, of all weights that the arrays of one layer hold.

    Args:
        arrays: uint8 [bytes] by name, for each of `stored`, of any number of experts. A folded product is not among them.
    """
    dims, found, halves = cfg.dims(), {}, {}
    for p in stored:
        array, first = arrays[p.name], BY_NAME[p.sources[0]]
        shape = slice_shape(first, dims, tp)
        if p.how == packing.PLAIN:
            found[first.name] = array.view(numpy_dtype(first.dtype)).reshape(shape)
        elif p.how in (packing.HEADS, packing.HEADS_TURNED):
            halves[p.how] = _heads(p, array, cfg, tp)
        elif p.how in (packing.EXPERTS, packing.EXPERT_PAIRS):
            leaves, groups = packing.leaves_and_steps(first.name, cfg, tp)
            tiles = array.reshape(-1, tiles_of(shape[0]), len(p.sources), leaves, leaf_bytes(groups))
            for i, name in enumerate(p.sources):
                found[name], found[f"{name}_scale"] = _experts(tiles[:, :, i], shape[0], groups)
        else:
            found |= _matrices(p, array, cfg, tp)
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


def _matrices(p: Packed, array: np.ndarray, cfg: K3Config, tp: int) -> dict[str, np.ndarray]:
    """Matrices behind each other; of PAIRS the last two come first, their tiles in turn."""
    leaves, steps = packing.leaves_and_steps(p.sources[-1], cfg, tp)
    tiles = array.view(np.uint16).reshape(-1, leaves, steps, LANES, 8)
    rows = {name: slice_shape(BY_NAME[name], cfg.dims(), tp)[0] for name in p.sources}
    parts, at, names = {}, 0, list(p.sources)
    if p.how == packing.PAIRS:
        *names, gate, up = names
        at = 2 * tiles_of(rows[gate])
        parts = {gate: tiles[0:at:2], up: tiles[1:at:2]}
    for name in names:
        parts[name] = tiles[at:at + tiles_of(rows[name])]
        at += tiles_of(rows[name])
    return {name: _bf16(unpack_bf16(part, rows[name])) for name, part in parts.items()}


def _heads(p: Packed, array: np.ndarray, cfg: K3Config, tp: int) -> np.ndarray:
    """uint16 [heads, rows of this half, kv_lora_rank]."""
    turned = p.how == packing.HEADS_TURNED
    rows, k = (cfg.kv_lora_rank, cfg.qk_nope_head_dim) if turned else (cfg.v_head_dim, cfg.kv_lora_rank)
    shape = cfg.num_attention_heads // tp, tiles_of(rows), *packing.inputs_leaves_and_steps(k), LANES, 8
    assert prod(shape) * 2 == array.nbytes, p
    matrices = np.stack([unpack_bf16(tiles, rows) for tiles in array.view(np.uint16).reshape(shape)])
    return matrices.swapaxes(1, 2) if turned else matrices


def _bf16(bits: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(bits).view(numpy_dtype("BF16"))
