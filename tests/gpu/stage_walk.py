"""A step taken apart on the device: one operation at a time against the reference function of its stage.

Before an operation everything that it does not declare as an input is filled with 0xFF, which is NaN in every floating-point
format of a buffer; afterwards every byte outside its outputs must be what it was. Buffers that the host writes are exempt from
the poison: no wait is derived from them. Collectives are looped back, so their targets are known to the byte.
"""
import cupy as cp

from k3cuda.buffers import BUFFERS
from k3cuda.plan import instance
from k3cuda.runtime.cuda_backend import inputs_of
from k3cuda.runtime.cuda_compare import Compare, Found, launch_groups
from k3cuda.runtime.cuda_kernels import bucket_of
from k3cuda.tables import tables_of

INPUTS = tuple(b.name for b in BUFFERS if b.life == "input")


def write_rows(be, rows) -> None:
    """Everything of `CudaBackend.step` but the launches."""
    be._check.step(rows)
    be.write(**inputs_of(rows))


class Walk(Compare):
    """Runs steps of a CudaBackend with one rank in memory, looped back, and compares every operation."""

    def __init__(self, be):
        super().__init__(be)
        self.blocks = {"": self.memory.arena, **self.memory.session}

    def step(self, rows) -> dict[str, Found]:
        """Stage -> what was found at any of its layers; outputs stay as the kernels left them."""
        write_rows(self.be, rows)
        return self._run("step", len(rows))

    def commit(self, accepted) -> dict[str, Found]:
        self.be._check.commit(accepted)
        self.be.write(row_accepted=accepted)
        return self._run("commit", len(accepted))

    def _run(self, what, rows):
        found = {}
        for ops, launches in launch_groups(self.be, what, bucket_of(rows)):
            self._group(ops, launches, rows, found)
        return found

    def _group(self, ops, launches, rows, all_found):
        stage = ops[0].stage
        found = all_found.setdefault(stage.name, Found())
        self.be.stream.synchronize()
        bound = [self.bind(op, rows) for op in ops]
        exempt = [self._work(name) for name in tables_of(self.be.plan).work]
        inputs = [self._extent(self.summed(rows)[name].source if name in self.summed(rows) else name, op)
                  for op in ops for name in (*stage.inputs, *INPUTS)] + exempt
        outputs = [self._extent(self.stored(name, rows), op) for op in ops for name in self.outputs(stage, rows)] + exempt
        saved = {key: block.copy() for key, block in self.blocks.items()}
        for key, block in self.blocks.items():
            block.fill(0xFF)
            _copy(block, saved[key], inputs, key)
        image = {key: block.copy() for key, block in self.blocks.items()}
        cp.cuda.Device().synchronize()
        for launch in launches:
            launch.launch()
        self.be.stream.synchronize()
        for key, block in self.blocks.items():
            _copy(image[key], block, outputs, key)
            for at in cp.flatnonzero(block != image[key])[:1].get():
                found.problems.append(f"{ops[0]} writes {self._owner(key, int(at))}, which it does not declare")
            _copy(saved[key], block, outputs, key)
            block[...] = saved[key]
        for op, b in zip(ops, bound):
            self.compare(op, b, rows, all_found)

    # ---- memory ----

    def _extent(self, name, op):
        """(block, first byte, byte behind the last) of what an operation touches under this name."""
        array = self.memory.buffer(name)
        array = array[op.kind_index] if len(instance(name, op)) > 1 else array
        key = name if name in self.memory.session else ""
        start = array.data.ptr - self.blocks[key].data.ptr
        return key, start, start + array.nbytes

    def _work(self, name):
        """What passes between kernels and is no buffer of the tables."""
        start = self.memory.offsets[name]
        return "", start, start + tables_of(self.be.plan).work[name][1]

    def _owner(self, key, at):
        if key:
            return f"byte {at} of {key}"
        name = max((n for n, start in self.memory.offsets.items() if start <= at), key=self.memory.offsets.get)
        return f"byte {at - self.memory.offsets[name]} of {name}"


def _copy(to, source, extents, key):
    for k, start, stop in extents:
        if k == key:
            to[start:stop] = source[start:stop]
