"""A step's emitted kernels under g++ and the memory of a rank on the host."""
import ctypes
from math import prod

import ml_dtypes
import numpy as np
from models import headdims, op_arrays
from shim import host

from k3cuda.buffers import buffer_shape
from k3cuda.emit import arena_offsets, build_files, launches_of, ops_of
from k3cuda.plan import build_plan
from k3cuda.runtime.cuda_memory import VIEW_DTYPES, OpStruct, step_type
from k3cuda.runtime.step_room import mla_partials, mla_work_bytes
from k3cuda.tables import tables_of

SLOTS = 12


class Kernels:
    """Those of one bucket that run `stages`.

    Args:
        stages: name -> kernels that are left out.
        folder: a new one.
        first_blocks: kernel -> how many of its blocks run, the first ones; they may be of a kernel that is a cluster, if they use none.
        plan: other than that of a small target; then `ops` are all of its operations. before: a source in front of the emitted one.
    """

    def __init__(self, rows: int, tp: int, ride: bool, stages: dict, folder, first_blocks: dict[str, int] | None = None, plan=None, before: str = ""):
        self.first_blocks = first_blocks or {}
        self.source = headdims()
        self.plan = plan or build_plan(self.source.cfg, tp)
        self.rows, self.ride, self.stages = rows, ride, stages
        files = build_files(self.plan, rows, "bf16", sms=5, ride=ride)   # few blocks, so that they walk
        self.ops = ops_of(self.plan, rows)
        wanted = {k for op in self.ops if op.stage.name in stages for k, _ in self.launches(op)}
        text = files.pop("kernels.cu").split("\n")
        names = [line.split("int k_")[1].split("_launch")[0] for line in text if "_launch[" in line]
        others = [n for n in names if n not in wanted]
        text = [line for line in text if not any(f"k_{n}_launch[" in line or f" k_{n}(" in line or f"of {n} does" in line for n in others)]
        folder.mkdir()
        self.library = host.build(before + "inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }\n" + "\n".join(text),
                                  [f"k_{n}" for n in names if n in wanted], folder, files)

    def launches(self, op):
        return [(k, first) for k, first in launches_of(op.stage, self.plan, self.rows, self.ride) if k not in self.stages[op.stage.name]]

    def last(self, stage: str):
        """The operation of the latest layer that has the stage."""
        return [op for op in self.ops if op.stage.name == stage][-1]

    def run(self, op, memory) -> None:
        args = OpStruct(layer=-1 if op.layer is None else op.layer, kind_index=op.kind_index, num_blocks=op.num_blocks, kv_scale=1.0,
                        opens_block=int(op.stage.name == "attn_mix" and self.plan.cfg.opens_res_block(op.layer)))
        for i, array in enumerate(memory.weights_of(op)):
            args.w[i] = array.ctypes.data
        for kernel, first in self.launches(op):
            args.first_row = first
            self.run_kernel(kernel, memory.step, args)

    def run_kernel(self, kernel: str, step, args) -> None:
        x, y, z, threads, cluster, shared = host.constants(self.library, f"k_{kernel}_launch", 6)
        x = self.first_blocks.get(kernel, x)
        cooperative = cluster if cluster > 1 and kernel not in self.first_blocks else 0
        if x:
            pointers, three = (ctypes.c_void_p * 2)(ctypes.addressof(step), ctypes.addressof(args)), ctypes.c_uint * 3
            getattr(self.library, f"k3_shim_k_{kernel}")(three(x, y, z), three(threads, 1, 1), ctypes.c_size_t(shared), cooperative, ctypes.c_uint(1), pointers)


class Memory:
    """Of one rank; `peers` are those of all, once they exist. `read(weight name, layer)`: the rank's slice, other than that of `source`."""

    def __init__(self, plan, source, rank: int = 0, slot_pages: int = 1, read=None):
        self.plan, self.rank, self._weights = plan, rank, {}
        self._read = read or (lambda name, layer: source.rank_slices(name, layer, plan.tp, rank))
        self.tables = tables_of(plan, SLOTS, SLOTS * slot_pages, slot_pages)
        self.offsets, size = arena_offsets(plan)
        self.arena, self.dims = _aligned(size), self.tables.dims
        self.session = {n: _aligned(prod(self._shape(n)) * self._dtype(n).itemsize) for n in self.tables.session}
        self.step = step_type(self.tables.session)(arena=self.arena.ctypes.data, rank=rank, **{n: self.dims[n] for n in ("slots", "pages", "slot_pages")})
        for name, array in self.session.items():
            setattr(self.step, f"{name}_base", array.ctypes.data)
        if "mla_cache" in self.session:
            self.mla_work = _aligned(mla_work_bytes(plan, slot_pages))
            self.step.mla_work, self.step.mla_partials = self.mla_work.ctypes.data, mla_partials(plan, slot_pages)
        self.meet([self] * plan.tp)

    def meet(self, ranks) -> None:
        for i, other in enumerate(ranks):
            self.step.peers[i] = other.arena.ctypes.data

    def poison(self) -> None:
        """NaN in all of the arena, but where kernels count from 0."""
        self.arena[:] = 0xFF
        if "mla_next" in self.offsets:
            self.arena[self.offsets["mla_next"]:][:4] = 0

    def _shape(self, name):
        return buffer_shape(self.tables.buffers[name], self.dims)

    def _dtype(self, name):
        return np.dtype(VIEW_DTYPES[self.tables.buffers[name].dtype])

    def buffer(self, name):
        shape, dtype = self._shape(name), self._dtype(name)
        if name in self.session:
            return self.session[name].view(dtype).reshape(shape)
        start = self.offsets[name]
        return self.arena[start:start + prod(shape) * dtype.itemsize].view(dtype).reshape(shape)

    def weights_of(self, op):
        if op not in self._weights:
            read = lambda name: np.ascontiguousarray(self._read(name, op.layer))  # noqa: E731
            arrays = op_arrays(op, self.plan.cfg, self.plan.tp, read, self.tables.packed, self.tables.weights)
            self._weights[op] = [_copied(a) for a in arrays]
        return self._weights[op]


def held(memory, name):
    """A buffer as its numbers are held."""
    raw = memory.buffer(name)
    return raw.view(ml_dtypes.bfloat16) if memory.tables.buffers[name].dtype == "bf16" else raw


def _aligned(size: int) -> np.ndarray:
    whole = np.zeros(size + 256, np.uint8)
    start = -whole.ctypes.data % 256
    return whole[start:start + size]


def _copied(array) -> np.ndarray:
    raw = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
    out = _aligned(raw.nbytes)
    out[:] = raw
    return out
