"""A rank's checkpoint slices as the arrays its kernels read, on the host; cuda_memory.py uploads them."""
import ml_dtypes
import numpy as np

from .. import packing
from ..config import K3Config
from ..packing import PACKED, Packed
from ..plan import Op
from .repack import join, pack_bf16, pack_mxfp4


def op_arrays(op: Op, source, tp: int, rank: int) -> list[np.ndarray]:
    """The packed arrays of one operation in the order of `OpArgs.w`; `source` is a runtime/tensor_source.py."""
    return [packed_array(p, op, source, tp, rank) for p in PACKED.get(op.stage.name, ())]


def packed_array(p: Packed, op: Op, source, tp: int, rank: int) -> np.ndarray:
    layer, cfg = op.layer, source.cfg

    def read(name):
        return np.ascontiguousarray(source.rank_slices(name, layer, tp, rank))

    if p.how == packing.PLAIN:
        return read(p.sources[0])
    if p.how == packing.FOLDED:
        norm, score = (read(n).astype(np.float32) for n in p.sources)
        return norm * score
    if p.how in (packing.TILES, packing.PAIRS):
        leaves, _ = packing.leaves_and_steps(p.sources[-1], cfg, tp)
        parts = [pack_bf16(_bits(read(n)), leaves) for n in p.sources]
        return join([join(parts[-2:], interleave=True), *parts[:-2]] if p.how == packing.PAIRS else parts)
    if p.how in (packing.HEADS, packing.HEADS_TURNED):
        return _heads(p, read(p.sources[0]), cfg)
    leaves, _ = packing.leaves_and_steps(p.sources[0], cfg, tp)
    matrices = [pack_mxfp4(read(n), read(n + "_scale"), leaves) for n in p.sources]
    if p.how == packing.EXPERTS:
        return matrices[0]
    tiles = np.stack(matrices, axis=2)  # [expert, tile, gate or up, leaf, bytes]
    return tiles.reshape(len(tiles), -1, *tiles.shape[3:])


def _bits(x: np.ndarray) -> np.ndarray:
    assert x.dtype == ml_dtypes.bfloat16, x.dtype
    return x.view(np.uint16)


def _heads(p: Packed, kv_b: np.ndarray, cfg: K3Config) -> np.ndarray:
    per_head = _bits(kv_b).reshape(-1, cfg.qk_nope_head_dim + cfg.v_head_dim, cfg.kv_lora_rank)
    keys, values = np.split(per_head, [cfg.qk_nope_head_dim], axis=1)
    matrices = keys.swapaxes(1, 2) if p.how == packing.HEADS_TURNED else values
    leaves, _ = packing.inputs_leaves_and_steps(matrices.shape[2])
    return np.stack([pack_bf16(np.ascontiguousarray(x), leaves) for x in matrices])
