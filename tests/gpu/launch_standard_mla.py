"""What the standard path's kernels make of the phases of latent attention in a single launch (launch_standard.py), and the layers that both work on."""
import core_kernels as ck
import numpy as np

from k3cuda.config import MLA_NORM_EPS
from k3cuda.launch_mla import CACHES, MlaAttend, MlaCombine, MlaNorm, NormedProduct
from k3cuda.launch_operands import LaunchMla
from k3cuda.launch_operands import MlaAttend as Attend
from k3cuda.launch_operands import MlaWrite as Write
from k3cuda.weights import tree_leaves

IN_MEMORY = (MlaNorm, MlaAttend, MlaCombine)   # kinds whose weights are a LaunchMla
PAGE, WRITE_THREADS = 64, 512
ROWS = {"row_slot": "p", "row_position": "p", "page_table": "p", "slot_pages": "i", "rows": "i"}
Combine = ck.struct("MlaCombine", **ROWS, partial="p", top_sum="p", cache_scale="f", next="p", out="p")


class MlaLayer:
    """Random norms and cache of a rank's latent attention layer, the rows of a step, and room for partial results; arrays are NumPy's.

    `cache` [pages, 64, dim] is as it was before the step, without anything where rows have yet to be stored; pages are in no order.
    """

    def __init__(self, kinds, rows, context, seed):
        """`context`: positions that each sequence has at least."""
        g = np.random.default_rng(seed)
        attend, mla_q = (next(k for k in kinds if isinstance(k, kind)) for kind in (MlaAttend, NormedProduct))
        self.attend, self.dim, self.bytes = attend, attend.latent + attend.rope, attend.cache
        slots = np.sort(g.integers(0, max(rows // 2, 1), rows)).astype(np.int32)[::-1].copy()   # neighbours are of one sequence
        count, first = int(slots.max()) + 1, context + g.integers(0, 40, int(slots.max()) + 1)
        at = [first[s] + (slots[:i] == s).sum() for i, s in enumerate(slots)]
        pages = -(-(context + 40 + rows) // PAGE)
        self.tables = {"row_slot": slots, "row_position": np.array(at, np.int32), "page_table": g.permutation(count * pages).astype(np.int32).reshape(count, pages)}
        bits, exponent = (np.uint8, (0x87, 3, 4)) if self.bytes == 1 else (np.uint16, (0x807f, 7, 124))
        r = g.integers(0, np.iinfo(bits).max + 1, (count * pages, PAGE, self.dim), bits)
        self.cache = (r & exponent[0]) | (((r >> exponent[1]) % 5 + exponent[2]) << exponent[1]).astype(bits)   # of magnitude 1/8 to 4
        for slot, position in zip(slots, at):
            self.cache[self.tables["page_table"][slot, position // PAGE], position % PAGE] = np.iinfo(bits).max   # NaN
        norm = lambda n: bf16(1 + 0.3 * g.standard_normal(n))
        self.query_norm, self.latent_norm = norm(mla_q.inputs), norm(attend.latent)
        partials = sum(mla_chunks(int(p) + 1) for p in at) * attend.heads + rows * attend.heads
        self.room = {"partial": np.zeros((partials, attend.latent), np.float32), "top_sum": np.zeros((partials, 2), np.float32)}
        self.scale, self.score_scale = np.float32(1.25), np.float32(1.5 * self.dim ** -0.5)

    @property
    def nbytes(self) -> int:
        """Of the positions that the step sees."""
        last = dict(zip(self.tables["row_slot"].tolist(), self.tables["row_position"].tolist()))
        return sum(position + 1 for position in last.values()) * self.dim * self.bytes

    def rows_of(self, arrays):
        return {**{n: arrays[n] for n in self.tables}, "slot_pages": self.tables["page_table"].shape[1], "rows": len(self.tables["row_slot"])}

    def attending(self, arrays):
        """Of a MlaAttend, but queries and results. `arrays`: the tables, room and cache where the launch is to find them."""
        return {**self.rows_of(arrays), "cache": arrays["cache"], "score_scale": self.score_scale, "cache_scale": self.scale, **{n: arrays[n] for n in self.room}}

    def writing(self, arrays):
        return {**self.rows_of(arrays), **{n: arrays[n] for n in ("query_norm", "latent_norm", "cache")}, "cache_scale": self.scale, "eps": np.float32(MLA_NORM_EPS)}

    def weights(self, arrays, address) -> np.ndarray:
        """LaunchMla, bytes. address(array)."""
        values = lambda fields: {n: v if isinstance(v, (int, np.float32)) else address(v) for n, v in fields.items()}
        return np.frombuffer(LaunchMla(Attend(**values(self.attending(arrays))), Write(**values(self.writing(arrays)))), np.uint8)

    def arrays(self):
        return {**self.tables, **self.room, "query_norm": self.query_norm, "latent_norm": self.latent_norm, "cache": self.cache.copy()}


def mla_chunks(length: int) -> int:
    """As in mla_work.cuh."""
    return -(-length // 256) if length <= 8192 else 32 + -(-(length - 8192) // 512) if length <= 65536 else 32 + 112 + -(-(length - 65536) // 1024)


def bf16(values):
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def source(kinds, tiles: int, shared: int) -> tuple[str, list[str]]:
    """C++ of the standard path's kernels, and their names. tiles: of eight queries of a group; shared: bytes of shared memory of a block."""
    attend = next((k for k in kinds if isinstance(k, MlaAttend)), None)
    if attend is None:
        return "", []
    query = next(k for k in kinds if isinstance(k, NormedProduct)).inputs
    cache, stored = CACHES[attend.cache]
    return f"""#include "bench_mla.cuh"
K3_BENCH_MLA(rows_mla, {cache}, {stored}, {attend.heads}, {attend.latent}, {attend.rope}, {query}, {tiles}, {shared})
extern "C" __constant__ int rows_mla_attend_launch[4] = {{0, rows_mla_shape::kThreads, sizeof(MlaSmem<rows_mla_shape>), 1}};
extern "C" __global__ void __launch_bounds__({WRITE_THREADS}) mla_new_rows(const __grid_constant__ MlaWrite a) {{
  __shared__ float leaf[2][16];
  mla_write<{stored}, {query}, {tree_leaves(query)}, {attend.latent}, {tree_leaves(attend.latent)}, {attend.rope}>(a, leaf, blockIdx.x, [] {{}});
}}
""", ["rows_mla_attend", "rows_mla_combine_1", "mla_new_rows"]


class StandardMla:
    """Phases of latent attention by the kernels of a Standard, `of`."""

    def __init__(self, of):
        self.of = of

    def phase(self, at, k, layer, weights, struct):
        """As Standard._phase; None for what is compared further on. struct: launch_standard.Struct."""
        of, rows, mla = self.of, self.of.program.rows, self.of.mlas.get(layer)
        if isinstance(k, NormedProduct):
            query = self._new_rows(mla, of.read(at, 0), np.zeros((rows, mla.dim), np.float32), mla.cache.copy(), struct)
            return of.product(k, weights, query, at)
        if isinstance(k, MlaNorm):
            want = mla.cache.copy()
            self._new_rows(mla, np.zeros((rows, len(mla.query_norm)), np.float32), of.read(at, 0), want, struct)
            return [np.zeros((rows, 4), np.uint32), want]
        if isinstance(k, MlaAttend):
            self.queries = of.read(at, 0)
            return None
        if isinstance(k, MlaCombine):
            out, count = np.zeros((rows, mla.attend.heads, mla.attend.latent), np.uint16), np.zeros(1, np.int32)
            arrays = {**mla.arrays(), "cache": mla.after}
            fields = {**mla.attending(arrays), "query": self.queries, "next": count, "out": out}
            of.run("rows_mla_attend", of.sms, None, [struct(Attend, fields)])
            fields = {n: fields[n] for n, _ in Combine._fields_}
            of.run("rows_mla_combine_1", of.sms, 256, [struct(Combine, fields)])
            return [positive_zero(out.reshape(rows, -1))]
        per, x = k.outputs // k.heads, of.read(at, 0).reshape(rows, k.heads, -1)
        y = np.concatenate([of.multiplied(k, self._head(weights, k, head), np.ascontiguousarray(x[:, head, :k.inputs]), per) for head in range(k.heads)], 1)
        if k.gated:
            gate, sigmoid = of.read(at, 1), np.zeros((rows, k.outputs), np.float32)
            for row in range(rows):
                of.run("sigmoids", 1, k.outputs, [gate[row].copy(), part := np.zeros(k.outputs, np.float32)])
                sigmoid[row] = part
            y = y * sigmoid
        y = positive_zero(bf16(y)).reshape(rows, k.heads, per)
        return [np.concatenate([y, x[:, :, k.inputs:]], 2).reshape(rows, -1)]

    @staticmethod
    def _head(weights, k, head):
        flat = weights.reshape(-1).view(np.uint8)
        size = len(flat) // k.heads
        return flat[head * size:(head + 1) * size]

    def _new_rows(self, mla, query, latent, cache, struct):
        """The standard path's new cache rows, into `cache`; returns the normed queries."""
        out = np.zeros(query.shape, np.uint16)
        fields = {**mla.writing({**mla.arrays(), "cache": cache}), "query": query, "latent": latent, "query_out": out}
        self.of.run("mla_new_rows", len(query), WRITE_THREADS, [struct(Write, fields)])
        return out


def positive_zero(bits):
    bits[bits == 0x8000] = 0
    return bits
