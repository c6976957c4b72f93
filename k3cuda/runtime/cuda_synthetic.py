"""Random weights of one rank made on the device, in kernel order: a rank of the full model, or of its draft, without a checkpoint.

Linears and experts are drawn on the GPU from the same distributions as runtime/made_model.py; what is small and has structure
(norms, decays, convs) is that module's own, tensor for tensor.
"""
import ctypes
from zlib import crc32

import cupy
import numpy as np

from .. import packing
from ..draft_plan import DraftPlan
from ..draft_weights import BY_NAME as DRAFT_WEIGHT
from ..packing import PACKED, Packed
from ..plan import Plan
from ..weights import BY_NAME, rank_bytes
from . import repack
from .cuda_driver import Launch, Module
from .cuda_jit import compile_cuda
from .cuda_upload import draft_weights
from .cuda_weights import packed_array, packed_bytes
from .made_draft import MadeDraft
from .made_model import MadeCheckpoint, scale_byte, value_range

_BLOCKS, _THREADS = 1056, 512
_HOST_BYTES = 1 << 22  # a plain weight above this is drawn on the device


class Filler:
    """The kernels of synthetic.cuh."""

    def __init__(self, arch: str):
        self.module = Module(compile_cuda('#include "synthetic.cuh"\n', arch, name="synthetic weights").cubin)

    def run(self, name: str, array: cupy.ndarray, count: int, *arguments, stream: int = 0) -> None:
        values = [ctypes.c_void_p(array.data.ptr), ctypes.c_uint64(count), *arguments]
        Launch(self.module.function(name), _BLOCKS, _THREADS, values, stream=stream).launch()


def synthetic_weights(plan: Plan, cfg_source, tp: int, rank: int, *, arch: str, seed: int = 0) -> dict:
    """(layer, stage) -> packed arrays on the device, as cuda_backend.py wants them; `cfg_source` has `cfg`."""
    filler, made = Filler(arch), MadeCheckpoint(cfg_source.cfg, seed)
    held = {}
    for op in plan.ops:
        groups = PACKED.get(op.stage.name, ())
        if groups:
            held[op.layer, op.stage.name] = [_array(p, op.layer, made, tp, rank, filler, f"{seed}", BY_NAME) for p in groups]
    cupy.cuda.runtime.deviceSynchronize()
    return held


def synthetic_draft(plan: DraftPlan, source: MadeDraft, tp: int, rank: int, shared: dict, *, arch: str) -> dict:
    """The same of a draft, as cuda_upload.upload_draft gives it."""
    filler = Filler(arch)
    held = draft_weights(plan, shared, lambda p, layer: _array(p, layer, source, tp, rank, filler, f"draft {source.seed}", DRAFT_WEIGHT))
    cupy.cuda.runtime.deviceSynchronize()
    return held


def _array(p: Packed, layer: int | None, made: MadeCheckpoint | MadeDraft, tp: int, rank: int, filler: Filler, seed: str, weights: dict) -> cupy.ndarray:
    cfg, weight = made.cfg, weights[p.sources[0]]
    small = rank_bytes(weight, cfg.dims(), 1) <= _HOST_BYTES
    if p.how == packing.FOLDED or (p.how == packing.PLAIN and small):
        return cupy.asarray(np.ascontiguousarray(packed_array(p, cfg, tp, lambda name: made.rank_slices(name, layer, tp, rank), weights)).view(np.uint8).reshape(-1))
    draw = ctypes.c_uint(crc32(f"{seed} {rank} {layer} {p.name}".encode()))
    nbytes = packed_bytes(p, cfg, tp, weights)
    array = cupy.empty(nbytes, cupy.uint8)
    if p.how in (packing.EXPERTS, packing.EXPERT_PAIRS):
        _, groups = packing.leaves_and_steps(p.sources[0], cfg, tp)
        words = repack.leaf_bytes(groups) // 4 - repack.scale_words(groups) * repack.TILE_ROWS
        lowest = scale_byte(BY_NAME[p.sources[0] + "_scale"], cfg.dims()) + repack.SCALE_SHIFT
        filler.run("fill_mxfp4", array, nbytes // 4, draw, ctypes.c_int(words), ctypes.c_int(repack.leaf_bytes(groups) // 4 - words), ctypes.c_int(lowest))
    else:
        low, high = value_range(weight, cfg.dims())
        filler.run("fill_bf16", array, nbytes // 2, draw, ctypes.c_float(low), ctypes.c_float(high))
    return array
