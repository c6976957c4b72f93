"""A rank's checkpoint slices as the arrays its kernels read, on the host; cuda_memory.py uploads them."""
import functools
from concurrent.futures import ThreadPoolExecutor
from math import prod

import ml_dtypes
import numpy as np

from .. import packing
from ..config import K3Config
from ..draft_config import DraftConfig
from ..draft_plan import DraftPlan
from ..draft_weights import BY_NAME as DRAFT_WEIGHT
from ..draft_weights import is_shared
from ..packing import DRAFT_PACKED, PACKED, Packed
from ..plan import Op, Plan
from ..weights import BY_NAME, rank_bytes, rank_shape
from .machine import host
from .repack import TILE_ROWS, join, leaf_bytes, pack_bf16, pack_mxfp4, tiles_of

_LOT = 8   # experts that a thread packs before it takes others


def packed_array(p: Packed, cfg: K3Config | DraftConfig, tp: int, read, weights: dict = BY_NAME) -> np.ndarray:
    """One packed array; `read` gives the rank's slice of a weight by its name: [(experts or layers,) rows, columns]."""
    if p.how == packing.PLAIN:
        return read(p.sources[0])
    if p.how == packing.FOLDED:
        norm, score = (read(n).astype(np.float32) for n in p.sources)
        return norm * score
    if p.how in (packing.TILES, packing.PAIRS):
        leaves, _ = packing.leaves_and_steps(p.sources[-1], cfg, tp, weights)
        parts = [pack_bf16(_bits(part), leaves) for n in p.sources for part in (read(n) if weights[n].count else (read(n),))]
        return join([join(parts[-2:], interleave=True), *parts[:-2]] if p.how == packing.PAIRS else parts)
    if p.how in (packing.HEADS, packing.HEADS_TURNED):
        return _heads(p, read(p.sources[0]), cfg)
    return _experts(p, cfg, tp, [(read(n), read(n + "_scale")) for n in p.sources])


def _experts(p: Packed, cfg: K3Config, tp: int, matrices) -> np.ndarray:
    """`matrices` are (packed, scale) of each source, [expert, rows, columns]; several threads take experts in turn."""
    leaves, groups = packing.leaves_and_steps(p.sources[0], cfg, tp)
    count, rows = matrices[0][0].shape[:2]
    out = np.empty((count, tiles_of(rows), len(matrices), leaves, leaf_bytes(groups)), np.uint8)   # gate and up tiles in turn
    lots = [slice(i, i + _LOT) for i in range(0, count, _LOT)]
    jobs = [_pool().submit(pack_mxfp4, packed[lot], scale[lot], leaves, out[lot, :, i]) for i, (packed, scale) in enumerate(matrices) for lot in lots]
    for job in jobs:
        job.result()
    return out.reshape(count, -1, leaves, leaf_bytes(groups))


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(host()["cores"] or 1, "k3cuda-pack")


def _bits(x: np.ndarray) -> np.ndarray:
    assert x.dtype == ml_dtypes.bfloat16, x.dtype
    return x.view(np.uint16)


def _heads(p: Packed, kv_b: np.ndarray, cfg: K3Config | DraftConfig) -> np.ndarray:
    per_head = _bits(kv_b).reshape(-1, cfg.qk_nope_head_dim + cfg.v_head_dim, cfg.kv_lora_rank)
    keys, values = np.split(per_head, [cfg.qk_nope_head_dim], axis=1)
    matrices = keys.swapaxes(1, 2) if p.how == packing.HEADS_TURNED else values
    leaves, _ = packing.inputs_leaves_and_steps(matrices.shape[2])
    return np.stack([pack_bf16(np.ascontiguousarray(x), leaves) for x in matrices])


def packed_bytes(p: Packed, cfg: K3Config | DraftConfig, tp: int, weights: dict = BY_NAME) -> int:
    """Bytes of a packed array on one rank, padding to whole tiles included. `weights`: the table that has its sources."""
    dims = cfg.dims()
    if p.how in (packing.PLAIN, packing.FOLDED):
        return rank_bytes(weights[p.sources[0]], dims, tp) * (2 if p.how == packing.FOLDED else 1)
    if p.how in (packing.HEADS, packing.HEADS_TURNED):
        rows, k = (cfg.v_head_dim, cfg.kv_lora_rank) if p.how == packing.HEADS else (cfg.kv_lora_rank, cfg.qk_nope_head_dim)
        return rank_shape(weights[p.sources[0]], dims, tp)[0] // (cfg.qk_nope_head_dim + cfg.v_head_dim) * _tiled(rows, k)
    total = 0
    for name in p.sources:
        w = weights[name]
        rows, k = rank_shape(w, dims, tp)
        if w.mxfp4:
            leaves, groups = packing.leaves_and_steps(name, cfg, tp)
            total += cfg.num_experts * tiles_of(rows) * leaves * leaf_bytes(groups)
        else:
            total += _tiled(rows, k) * (dims[w.count] if w.count else 1)
    return total


def plan_bytes(plan: Plan) -> int:
    """Bytes of all packed arrays of a step on one rank."""
    return sum(packed_bytes(p, plan.cfg, plan.tp) for op in plan.ops for p in PACKED.get(op.stage.name, ()))


def draft_plan_bytes(plan: DraftPlan) -> int:
    """Bytes of all packed arrays that a draft brings itself, on one rank."""
    return sum(packed_bytes(p, plan.cfg, plan.tp, DRAFT_WEIGHT) for _, p in draft_arrays(plan))


def draft_arrays(plan: DraftPlan) -> list[tuple[int | None, Packed]]:
    """(layer, array) of all that a draft's stages read and its target does not have, each once."""
    found = {(op.layer, p.name): p for op in plan.context + plan.ops if op.stage.weights and is_own(op, plan) for p in DRAFT_PACKED[op.stage.name]}
    return [(layer, p) for (layer, _), p in found.items()]


def is_own(op: Op, plan: DraftPlan) -> bool:
    """Whether an operation of a draft reads weights of the draft, not of its target."""
    return not any(is_shared(DRAFT_WEIGHT[name], plan.cfg) for name in op.stage.weights)


def _tiled(rows: int, k: int) -> int:
    return prod((tiles_of(rows), TILE_ROWS, k)) * 2
