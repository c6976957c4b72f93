"""Weights of ranks on their GPU, in kernel order."""
import cupy

from ..plan import Plan
from .cuda_driver import Device
from .cuda_load import CudaLoadDevice
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
