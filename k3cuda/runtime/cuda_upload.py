"""Weights of ranks, and of their drafts, on their GPU in kernel order."""
import cupy
import numpy as np

from ..draft_plan import DraftPlan
from ..draft_weights import BY_NAME as DRAFT_WEIGHT
from ..packing import DRAFT_PACKED, Packed
from ..plan import Plan
from .cuda_driver import Device
from .cuda_load import CudaLoadDevice
from .cuda_weights import draft_arrays, is_own, packed_array
from .device_load import load_weights
from .load_plan import BLOCK_BYTES
from .loading import Loading
from .repacked import RepackedModel, packed_ops


def upload(plan: Plan, source, tp: int, ranks: range, device: Device, loading: Loading) -> list[dict]:
    """For each of `ranks`: (layer, stage) -> packed arrays on the device. Every byte is read once for all of them.

    Raises what `load_weights` raises.
    """
    if isinstance(source, RepackedModel):
        return [{key: [cupy.asarray(a) for a in arrays] for key, arrays in packed_ops(plan, source, rank, loading)} for rank in ranks]
    with CudaLoadDevice(device, BLOCK_BYTES) as loader:
        return load_weights(plan, source, tp, ranks, loader, loading)


def upload_draft(plan: DraftPlan, source, tp: int, rank: int, shared: dict) -> dict:
    """(layer, stage) -> packed arrays of a draft on the device; what it has not is its target's, one of `shared`, which has the same keys."""
    def make(p: Packed, layer: int | None):
        return _array(packed_array(p, plan.cfg, tp, lambda name: source.rank_slices(DRAFT_WEIGHT[name], layer, tp, rank), DRAFT_WEIGHT))

    return draft_weights(plan, shared, make)


def draft_weights(plan: DraftPlan, shared: dict, make) -> dict:
    """As `upload_draft`, with `make(packed, layer)` for each array that is the draft's own; stages that read the same one share it."""
    own = draft_arrays(plan)
    made = {(layer, p.name): make(p, layer) for layer, p in own}
    held = {}
    for op in plan.context + plan.ops:
        if op.stage.weights:
            held[op.layer, op.stage.name] = [made[op.layer, p.name] for p in DRAFT_PACKED[op.stage.name]] if is_own(op, plan) else shared[op.layer, op.stage.name]
    return held


def _array(on_host) -> cupy.ndarray:
    return cupy.asarray(np.ascontiguousarray(on_host).view(np.uint8).reshape(-1))
