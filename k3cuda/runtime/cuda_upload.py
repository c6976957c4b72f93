"""A rank's weights on its GPU, in kernel order."""
import cupy
import numpy as np

from ..plan import Plan
from . import cuda_weights
from .loading import Loading
from .repacked import RepackedModel, packed_ops


def upload(plan: Plan, source, tp: int, rank: int, loading: Loading) -> dict:
    """(layer, stage) -> packed arrays on the device."""
    if isinstance(source, RepackedModel):
        return {key: [cupy.asarray(a) for a in arrays] for key, arrays in packed_ops(plan, source, rank, loading)}
    held, ops = {}, {}
    for op in plan.ops:
        ops.setdefault(op.layer, []).append(op)
    for unit, slices in loading.slices(source, tp, range(rank, rank + 1)):
        for op in ops.get(unit.layer, ()):
            if arrays := cuda_weights.op_arrays(op, source.cfg, tp, lambda name: slices[name][0]):
                held[op.layer, op.stage.name] = [cupy.asarray(np.ascontiguousarray(a).view(np.uint8).reshape(-1)) for a in arrays]
    return held
