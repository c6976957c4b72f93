"""Device memory of one rank: arena, session buffers, weights; and the structures that kernels get. CuPy owns all of it."""
import ctypes
import functools
from math import prod

import cupy
import numpy as np

from ..buffers import buffer_shape
from ..emit import arena_offsets
from ..draft_plan import DraftPlan
from ..errors import OutOfMemory, PlanError
from ..packing import MAX_PACKED
from ..plan import Op, Plan
from ..tables import tables_of
from ..weights import LEGAL_TP
from .cuda_driver import check, driver
from .step_room import KERNEL_BYTES, longest_fit, mla_partials, mla_work_bytes, rank_room, session_bytes

VIEW_DTYPES = {"f32": np.float32, "bf16": np.uint16, "i32": np.int32, "u8": np.uint8, "kv": np.uint16}


@functools.cache
def step_type(session: tuple[str, ...]) -> type[ctypes.Structure]:
    """`struct Step` of emit.py where `session` come as pointers; a test compares sizes and offsets with the compiled ones."""
    fields = [("arena", ctypes.c_void_p), *((f"{n}_base", ctypes.c_void_p) for n in session), ("peers", ctypes.c_void_p * LEGAL_TP[-1]),
              ("mla_work", ctypes.c_void_p), ("trace", ctypes.c_void_p),
              *((n, ctypes.c_int) for n in ("slots", "pages", "slot_pages", "rank", "loopback", "mla_partials"))]
    return type("StepStruct", (ctypes.Structure,), {"_fields_": fields})


class OpStruct(ctypes.Structure):
    """`struct OpArgs` of emit.py."""

    _fields_ = [("w", ctypes.c_void_p * MAX_PACKED), ("layer", ctypes.c_int), ("kind_index", ctypes.c_int), ("num_blocks", ctypes.c_int),
                ("opens_block", ctypes.c_int), ("launch", ctypes.c_int), ("first_row", ctypes.c_int), ("advances", ctypes.c_int), ("kv_scale", ctypes.c_float)]


def fitting_length(plan: Plan, slots: int, kv_cache_dtype: str, asked: int | None, ranks: int, utilization: float, limit: int | None,
                   draft: DraftPlan | None = None) -> int:
    """Tokens a slot can hold: `asked`, or where that is None what fits beside the weights that are there already, for `ranks` ranks on this GPU.

    Args:
        utilization: part of the device's memory that may be used. limit: bytes that CuPy's pool may hold, weights included; None: no other limit.
        draft: of a draft model beside it, whose weights are there too.
    Raises OutOfMemory, with the longest that would fit.
    """
    free, total = cupy.cuda.runtime.memGetInfo()
    room = free - int(total * (1 - utilization))
    if limit is not None:
        room = min(room, limit - cupy.get_default_memory_pool().used_bytes())
    room = (room - KERNEL_BYTES) // ranks
    fits = longest_fit(plan, room, slots, kv_cache_dtype, draft)
    asked = fits if asked is None else asked
    if 1 <= asked <= fits:
        return asked
    need = rank_room(plan, slots, max(asked, 1), kv_cache_dtype, draft)
    raise OutOfMemory(f"{slots} sequences of {max(asked, 1)} tokens need {need / 1e9:.2f} GB a rank{' with the draft model' if draft else ''}, "
                      f"weights leave {max(room, 0) / 1e9:.2f} GB",
                      f"use a max_model_len of at most {fits}, or a smaller max_batch" if fits else "use a smaller max_batch, more ranks, or a GPU with more memory")


class RankMemory:
    """All device memory of one rank.

    Args:
        plan: of the step, or of a draft.
        slots, pages, slot_pages: as buffers.py names them.
        kv_cache_dtype: "bf16" or "fp8_e4m3".
        lent: arrays of the target's memory that a draft reads, by name (`Tables.lent`).
    """

    def __init__(self, plan: Plan | DraftPlan, slots: int, pages: int, slot_pages: int, kv_cache_dtype: str, lent: dict[str, cupy.ndarray] | None = None):
        self.plan, self.tables = plan, tables_of(plan, slots, pages, slot_pages)
        self.dims, self.kv_cache_dtype = self.tables.dims, kv_cache_dtype
        self.offsets, size = arena_offsets(plan)
        self.arena = cupy.zeros(size, cupy.uint8)
        self.session = {n: cupy.zeros(nbytes, cupy.uint8) for n, nbytes in session_bytes(plan, slots, pages, slot_pages, kv_cache_dtype).items()}
        self.session |= {n: array.view(cupy.uint8).reshape(-1) for n, array in (lent or {}).items()}
        if missing := [n for n in self.tables.session if n not in self.session]:
            raise PlanError(f"memory of a draft lacks {', '.join(missing)}, which its target lends")
        self.mla_partials, self.mla_work = 0, None
        if "mla_cache" in self.session:
            self.mla_partials = mla_partials(plan, slot_pages)
            self.mla_work = cupy.zeros(mla_work_bytes(plan, slot_pages), cupy.uint8)
        self.weights: dict[tuple[int | None, str], list] = {}

    def buffer(self, name: str) -> cupy.ndarray:
        """A buffer as an array that shares its memory. BF16 comes as uint16 bits, FP8 as uint8."""
        b = self.tables.buffers[name]
        dtype = np.dtype(np.uint8 if b.dtype == "kv" and self.kv_cache_dtype == "fp8_e4m3" else VIEW_DTYPES[b.dtype])
        shape = buffer_shape(b, self.dims)
        if name in self.session:
            return self.session[name].view(dtype).reshape(shape)
        start = self.offsets[name]
        return self.arena[start:start + prod(shape) * dtype.itemsize].view(dtype).reshape(shape)

    def clear_slot(self, slot: int, stream: cupy.cuda.Stream) -> None:
        """Zeroes the states of a slot (KDA state, conv window), in all layers and in the order of `stream`."""
        for name in self._counted("slots"):
            array, size, pitch = self._columns(name)
            check(driver().cuMemsetD2D8Async(array.data.ptr + slot * size, pitch, 0, size, len(array), stream.ptr))

    def copy_slot(self, source: int, target: int, pages: list[tuple[int, int]], stream: cupy.cuda.Stream) -> None:
        """Copies the states of a slot, and pages of the cache (from, to), in all layers and in the order of `stream`."""
        runtime = cupy.cuda.runtime
        for name in self._counted("slots"):
            array, size, pitch = self._columns(name)
            runtime.memcpy2DAsync(array.data.ptr + target * size, pitch, array.data.ptr + source * size, pitch, size, len(array),
                                  runtime.memcpyDeviceToDevice, stream.ptr)
        name, = self._counted("pages")
        cache, size, pitch = self._columns(name)   # a pitch beyond 2 GiB is no 2D copy
        for start in range(cache.data.ptr, cache.data.ptr + cache.nbytes, pitch):
            for old, new in pages:
                runtime.memcpyAsync(start + new * size, start + old * size, size, runtime.memcpyDeviceToDevice, stream.ptr)

    def _counted(self, what: str) -> list[str]:
        """Buffers that have a part for each layer, and in it one for each of `what`."""
        return [n for n in self.tables.session if self.tables.buffers[n].shape[1] == what]

    def _columns(self, name: str) -> tuple[cupy.ndarray, int, int]:
        """A buffer [layer, slot or page, ..], the bytes of one slot or page in a layer, and those from layer to layer."""
        array = self.buffer(name)
        pitch = array.nbytes // array.shape[0]
        return array, pitch // array.shape[1], pitch

    def step_struct(self, rank: int, peers: list["RankMemory"], loopback: bool) -> ctypes.Structure:
        """Where not all ranks are `peers`, this one stands in every place; with `loopback` it does so for the kernels, too."""
        s = step_type(self.tables.session)(arena=self.arena.data.ptr, rank=rank, loopback=loopback, mla_partials=self.mla_partials,
                                           **{n: self.dims[n] for n in ("slots", "pages", "slot_pages")})
        if self.mla_work is not None:
            s.mla_work = self.mla_work.data.ptr
        for name, array in self.session.items():
            setattr(s, f"{name}_base", array.data.ptr)
        for i in range(self.plan.tp):
            s.peers[i] = (peers[i] if len(peers) == self.plan.tp else self).arena.data.ptr
        return s

    def op_struct(self, op: Op, first_row: int = 0) -> OpStruct:
        o = OpStruct(layer=-1 if op.layer is None else op.layer, kind_index=op.kind_index, num_blocks=op.num_blocks,
                     opens_block=self._opens_block(op), kv_scale=1.0, first_row=first_row)
        for i, array in enumerate(self.weights.get((op.layer, op.stage.name), ())):
            o.w[i] = array.data.ptr
        return o

    def _opens_block(self, op: Op) -> bool:
        return op.layer is not None and isinstance(self.plan, Plan) and self.plan.cfg.opens_res_block(op.layer)


class PageTables:
    """Which pages every slot has, on the host and on every rank's GPU; setting one slot's waits for nothing but its own last copy."""

    def __init__(self, memories: list[RankMemory]):
        self._targets = [m.buffer("page_table") for m in memories]
        pinned = cupy.cuda.alloc_pinned_memory(self._targets[0].nbytes)
        self._host = np.frombuffer(pinned, np.int32, self._targets[0].size).reshape(self._targets[0].shape)
        self._host[:] = -1
        self._copied: dict[int, cupy.cuda.Event] = {}

    def set(self, slot: int, pages, stream: cupy.cuda.Stream) -> None:
        """In the order of `stream`."""
        copied = self._copied.setdefault(slot, cupy.cuda.Event(disable_timing=True))
        copied.synchronize()
        row = self._host[slot]
        row[:len(pages)], row[len(pages):] = pages, -1
        for target in self._targets:
            target[slot].data.copy_from_host_async(row.ctypes.data, row.nbytes, stream)
        copied.record(stream)

    def pages(self, slot: int, count: int) -> list[int]:
        return self._host[slot, :count].tolist()
