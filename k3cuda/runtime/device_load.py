"""A checkpoint's slices into a device's memory and there into kernel order, unit by unit. What touches a device is behind `Device`."""
from math import prod
from typing import Protocol

import numpy as np

from ..errors import CheckpointError, OutOfMemory
from ..packing import FOLDED, PACKED, PLAIN, Packed
from ..plan import Plan
from ..weights import Weight, checkpoint_key, rank_shape
from .checkpoint import Checkpoint
from .cuda_weights import packed_array, packed_bytes, plan_bytes
from .load_plan import Segment, Unit, parts_of_layers, row_bytes
from .loader import AHEAD
from .loading import Loading
from .repack import MAX_SCALE_CODE
from .repack_calls import MXFP4, Call, calls_of
from .slices import HostSlices, bad_values, check_values, is_never_zero, ranks_with_piece

STAGING_BYTES = 512 << 20   # of one unit's raw slices on the device
_ALIGN = 512


class Device(Protocol):
    """Memory and kernels of one GPU. Addresses are integers; every method may be called by any thread."""

    def free_bytes(self) -> int: ...
    def array(self, nbytes: int): "Memory that stays: an array uint8."
    def staging(self, nbytes: int): "Memory with an `address`, given back when nothing refers to it."
    def buffer(self, nbytes: int) -> np.ndarray: "Host memory of the calling thread that the device reads directly, from a page on."
    def bounce(self, nbytes: int) -> np.ndarray: "A piece of the same, of the thread's own, until it flushes."
    def copy(self, address: int, view: np.ndarray) -> None: "Begins to copy host memory to the device, in the calling thread's order."
    def flush(self) -> None: "Waits for what the calling thread copies."
    def clear(self, address: int, nbytes: int) -> None: "Zeros into staging, in the order of `launch`."
    def upload(self, out, values: np.ndarray) -> None: "Host memory to an array, at once."
    def copy_within(self, out, address: int) -> None: "Staging to an array, in the order of `launch`."
    def launch(self, call: Call, source: int, scales: int, out, offset: int) -> None: "One kernel; it writes from `offset` on."
    def finish(self) -> int: "Waits for all launches; an MXFP4 scale code that was too large, or 0."


class DeviceSlices:
    """Raw slices of one unit on the device; what is small, and looked at as numbers, stays on the host until it is packed."""

    def __init__(self, unit: Unit, cfg, tp: int, ranks: range, device: Device):
        self.unit, self.ranks, self._device, dims = unit, ranks, device, cfg.dims()
        self._place, self._with_piece, size = {}, {w.name: ranks_with_piece(w, dims, tp, ranks) for w in unit.weights}, 0
        for w in unit.weights:
            if not _is_small(w):
                rows, nbytes = rank_shape(w, dims, tp)[0], row_bytes(w, dims, tp)
                experts = len(unit.experts) if w.count else 1
                self._place[w.name] = (size, experts, rows, nbytes)
                size += -(-len(ranks) * experts * rows * nbytes // _ALIGN) * _ALIGN
        self.host = HostSlices(Unit(unit.layer, tuple(w for w in unit.weights if _is_small(w)), unit.experts), dims, tp, ranks)
        self._memory = device.staging(size) if size else None
        for name, (_, *each) in self._place.items():
            if idle := len(ranks) - self._with_piece[name]:
                device.clear(self.address(name, self._with_piece[name]), idle * prod(each))
        self._alive: set[tuple[str, int]] = set()   # (weight, rank) of which something was not zero

    def address(self, name: str, rank: int, expert: int = 0, row: int = 0) -> int:
        """Where a row of a slice begins. `rank` counts from the first one here, `expert` from the unit's first."""
        offset, experts, rows, nbytes = self._place[name]
        return self._memory.address + offset + ((rank * experts + expert) * rows + row) * nbytes

    def put(self, segment: Segment, view: np.ndarray) -> None:
        name, cut = segment.weight.name, segment.weight.cut
        if name not in self._place:
            self.host.put(segment, view)
            return
        expert = 0 if segment.expert is None else segment.expert - self.unit.experts.start
        _, _, part_rows, nbytes = self._place[name]
        if cut is None:
            for rank in range(len(self.ranks)):
                self._copy(segment.weight, rank, expert, segment.first_row, view)
        elif cut.axis:
            first, count = self.ranks.start, self._with_piece[name]
            own = view.reshape(segment.rows, -1)[:, first * nbytes:(first + count) * nbytes]
            gathered = self._device.bounce(own.size).reshape(count, segment.rows, nbytes)
            gathered[...] = own.reshape(segment.rows, count, nbytes).transpose(1, 0, 2)
            for rank, rows in enumerate(gathered):
                self._copy(segment.weight, rank, expert, segment.first_row, rows.reshape(-1))
        else:
            rank, row = divmod(segment.first_row - self.ranks.start * part_rows, part_rows)
            while len(view):
                count = min(len(view) // nbytes, part_rows - row)
                self._copy(segment.weight, rank, expert, row, view[:count * nbytes])
                rank, row, view = rank + 1, 0, view[count * nbytes:]

    def _copy(self, weight: Weight, rank: int, expert: int, row: int, view: np.ndarray) -> None:
        if is_never_zero(weight) and (weight.name, rank) not in self._alive and (view[:4096].any() or view.any()):
            self._alive.add((weight.name, rank))
        self._device.copy(self.address(weight.name, rank, expert, row), view)

    def flush(self) -> None:
        self._device.flush()

    def fill(self, arrays: dict[str, np.ndarray]) -> None:
        """Takes whole slices, [ranks, (experts,) rows, columns], of a source that is no file."""
        for w in self.unit.weights:
            if _is_small(w):
                self.host.arrays[w.name][...] = arrays[w.name]
                continue
            for rank, array in enumerate(arrays[w.name]):
                self._copy(w, rank, 0, 0, np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        self._device.flush()

    def check(self, checkpoint: Checkpoint) -> None:
        """Raises CheckpointError for what no trained model holds."""
        check_values(checkpoint, self.unit, self.host.arrays)
        for w in self.unit.weights:
            if is_never_zero(w) and w.name in self._place and any((w.name, rank) not in self._alive for rank in range(len(self.ranks))):
                key = checkpoint_key(w, self.unit.layer)
                raise bad_values(checkpoint.shards.owner[key], key, "nothing but zeros")


def _is_small(weight: Weight) -> bool:
    return weight.dtype == "F32" or len(weight.shape) == 1


def load_weights(plan: Plan, source, tp: int, ranks: range, device: Device, loading: Loading) -> list[dict]:
    """For each of `ranks`: (layer, stage) -> its packed arrays, in the order of `OpArgs.w`.

    Raises:
        OutOfMemory: the device has not enough memory, told before anything is read. CheckpointError: as the loader raises it, or a scale
            that kernel order cannot hold. Nothing stays on the device then.
    """
    cfg = plan.cfg
    _check_room(plan, len(ranks), device)
    wanted = [(op.layer, op.stage.name, i, p) for op in plan.ops for i, p in enumerate(PACKED.get(op.stage.name, ()))]
    held: list[dict] = [{} for _ in ranks]
    try:
        for slices in _units(plan, source, tp, ranks, device, loading):
            names = {w.name for w in slices.unit.weights}
            mine = [(stage, i, p) for layer, stage, i, p in wanted if layer == slices.unit.layer and names >= set(p.sources)]
            for rank, arrays in enumerate(held):
                for stage, i, p in mine:
                    packed = arrays.setdefault((slices.unit.layer, stage), [None] * len(PACKED[stage]))
                    if packed[i] is None:
                        packed[i] = device.array(packed_bytes(p, cfg, tp))
                    _pack(p, cfg, tp, slices, rank, device, packed[i])
            if worst := device.finish():
                raise CheckpointError(f"{source.path}: layer {slices.unit.layer} has an MXFP4 scale code of {worst}, wanted at most {MAX_SCALE_CODE}",
                                      "no trained weight is that large: check the files with --hash")
    except BaseException:
        held.clear()
        raise
    return held


def _units(plan: Plan, source, tp: int, ranks: range, device: Device, loading: Loading):
    """DeviceSlices of every unit, in order."""
    def open_target(unit):
        return DeviceSlices(unit, plan.cfg, tp, ranks, device)

    units = parts_of_layers(plan.cfg, tp, ranks, STAGING_BYTES)
    if isinstance(source, Checkpoint) and loading.reads_itself:
        for _, slices in loading.run(source, tp, ranks, units, open_target, make_buffer=device.buffer):
            slices.check(source)
            yield slices
        return
    for unit, arrays in loading.slices(source, tp, ranks, units):
        slices = open_target(unit)
        slices.fill(arrays)
        yield slices


def _pack(p: Packed, cfg, tp: int, slices: DeviceSlices, rank: int, device: Device, out) -> None:
    host = slices.host.arrays
    if all(name in host for name in p.sources):
        values = packed_array(p, cfg, tp, lambda name: host[name][rank])
        device.upload(out, np.ascontiguousarray(values).reshape(-1).view(np.uint8))
    elif p.how == PLAIN:
        device.copy_within(out, slices.address(p.sources[0], rank))
    else:
        assert p.how != FOLDED, p
        experts = slices.unit.experts
        for call in calls_of(p, cfg, tp, len(experts)):
            scales = slices.address(call.source + "_scale", rank) if call.kernel == MXFP4 else 0
            offset = call.out + (packed_bytes(p, cfg, tp) // cfg.num_experts * experts.start if call.kernel == MXFP4 else 0)
            device.launch(call, slices.address(call.source, rank) + 2 * call.skip, scales, out, offset)


def _check_room(plan: Plan, ranks: int, device: Device) -> None:
    arrays = plan_bytes(plan)
    needed, free = arrays * ranks + min((AHEAD + 2) * STAGING_BYTES, arrays * ranks), device.free_bytes()   # one more is let go a moment late
    if needed > free:
        raise OutOfMemory(f"the weights of {ranks} rank{'s' if ranks > 1 else ''} of {plan.tp} need {needed / 1e9:.1f} GB of GPU memory while they are loaded, "
                          f"{free / 1e9:.1f} GB are free", "cut the model over more GPUs, or free the memory")
