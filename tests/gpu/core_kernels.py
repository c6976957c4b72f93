"""Kernels around the mixing, norm and route cores, for their tests and for scripts/bench_cores.py."""
import ctypes
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from k3cuda.launch_operands import KdaMix
from k3cuda.runtime import cuda_driver, cuda_jit

try:
    import cupy as cp
except ImportError:   # the host shim puts NumPy in its place: tests/test_stage_cores_shim.py
    cp = None

BF16 = ml_dtypes.bfloat16
POISON = {np.dtype(np.float32): np.float32(np.nan), np.dtype(BF16): BF16(np.nan), np.dtype(np.int32): np.int32(-7)}
READY = "[] { grid_wait(); grid_launch_next(); }"


def struct(name, **fields):
    """A ctypes structure laid out as C++ lays out the same fields; "p" a pointer, "i" an int, "f" a float."""
    kinds = {"p": ctypes.c_void_p, "i": ctypes.c_int, "f": ctypes.c_float}
    return type(name, (ctypes.Structure,), {"_fields_": [(f, kinds[k]) for f, k in fields.items()]})


KdaWork = struct("KdaWork", rows="p", v="p", o="p")
KdaCommit = struct("KdaCommit", row_slot="p", row_accepted="p", rows="i", heads="i", slots="i", record_rows="i", qkv="p", k="p", v="p",
                   decay="p", beta="p", state="p", conv_state="p")
NormRow = struct("NormRow", row_slot="p", row_map="p", rows="i", part_rows="i", parts="p", hidden="p", hidden_out="p", snapshot="p", blocks="p",
                 num_blocks="i", score="p", weight="p", out="p", eps="f")


@dataclass(frozen=True)
class Kernel:
    """One instantiation. `source` defines extern "C" `name`; `threads` and `cluster` are its launch shape."""

    name: str
    source: str
    threads: int
    cluster: int = 1


def _kernel(name, shape, body, threads, cluster=1, args="", min_blocks=1):
    return Kernel(name, f'using {name}_S = {shape};\nextern "C" __global__ void __launch_bounds__({threads}, {min_blocks}) {name}({args}) {{\n'
                        f'  using S = {name}_S;\n  {body}\n}}\n', threads, cluster)


def kda_mix(split, cols, threads=0, min_blocks=1):
    """threads: of a block, where more than the state needs."""
    body = f"K3_DYN_SMEM(u8, raw);\n  kda_mix<S>(a, *(KdaMixSmem<S>*)raw, blockIdx.x / S::kSplit, blockIdx.x % S::kSplit, blockIdx.y, {READY});"
    return _kernel(f"kda_mix_{split}_{cols}_{threads}_{min_blocks}", f"KdaShape<128, 4, {split}, {cols}, {threads}>", body,
                   max(threads, 1024 // split // cols), split, "KdaMix a", min_blocks)


def kda_spread():
    """The middle of a step of up to 8 rows. Blocks: 4 x heads x half as many as rows, at least one."""
    body = ("K3_DYN_SMEM(u8, raw);\n  const int cluster = blockIdx.x / S::kSplit, clusters = gridDim.x / S::kSplit;\n"
            "  kda_mix_spread<S, KdaShape<128, 4, 2, 2, 512>>(a, raw, cluster % a.heads, cluster / a.heads, clusters / a.heads, " + READY + ");")
    return _kernel("kda_spread", "KdaShape<128, 4, 4, 2, 512>", body, 512, 4, "KdaMix a")


def kda_shares():
    """first [lanes][2], halves [lanes][2]: of a half of each cluster, a block each."""
    body = ("const KdaShare share(KdaRowBits(row_slot, rows).opens, blockIdx.x / 2, gridDim.x / 2, blockIdx.x % 2);\n"
            "  if (threadIdx.x == 0) first[blockIdx.x] = share.first, halves[blockIdx.x] = share.halves;")
    return _kernel("kda_shares", "int", body, 32, 1, "const int* row_slot, int rows, int* first, int* halves")


def kda_mix_shared(split):
    """Bytes of KdaMixSmem, rounded up."""
    own = 128 // split
    return 32768 + 4096 + 48 * (256 + own) + 4 * (3 * 1024 + 16 * own + 128 + own + 8 + 16 * split) + 32


def kda_wide():
    """The three kernels of a wide step's middle, in order. Blocks: (rows / 8 x heads), (heads x 16, lanes), (rows x heads / 8)."""
    gates, scan = "KdaShape<128, 4, 1, 4, 256>", "KdaScanShape<128, 4>"
    bodies = (("gates", gates, 256, "kda_gates<S>(a, w, *(KdaGatesSmem<S>*)raw, blockIdx.x % a.heads, blockIdx.x / a.heads * 8, " + READY + ");"),
              ("scan", scan, 128,
               "kda_scan<S>(a, w, *(KdaScanSmem<S, 1>*)raw, blockIdx.x / S::kSplit, blockIdx.x % S::kSplit, blockIdx.y, gridDim.y, " + READY + ");"),
              ("norm", scan, 256, "grid_wait();\n  grid_launch_next();\n  kda_norm<S>(a, w, blockIdx.x * 8 + warp_id());"))
    return [_kernel(f"kda_wide_{name}", shape, f"K3_DYN_SMEM(u8, raw);\n  {body}", threads, 1, "KdaMix a, KdaWork w") for name, shape, threads, body in bodies]


def kda_rows():
    """The middle of a step of 16 to 64 rows, in as many parts as the second argument says. Blocks: heads x parts."""
    body = ("K3_DYN_SMEM(u8, raw);\n  "
            f"kda_rows<S>(a, *(KdaRowsSmem<S>*)raw, blockIdx.x % a.heads, blockIdx.x / a.heads, parts, {READY});")
    return _kernel("kda_rows_", "KdaShape<128, 4, 1, 4, 256>", body, 256, 1, "KdaMix a, int parts")


KDA_GATES_SHARED = kda_mix_shared(1) + 2 * 8 * 3 * 384   # bytes of KdaGatesSmem
KDA_ROWS_SHARED = KDA_GATES_SHARED + 2 * 32 * 528 * 4 + 32   # of KdaRowsSmem
KDA_SCAN_SHARED = 4 * (4 * 8 * (3 * 128 + 8) + 2 * 1024) + 32   # bytes of KdaScanSmem


def kda_commit(split, cols, threads=0, min_blocks=1):
    body = ("__shared__ KdaCommitSmem<S> m;\n  grid_wait();\n  grid_launch_next();\n"
            "  kda_commit<S>(a, m, blockIdx.z, blockIdx.x / S::kSplit, blockIdx.x % S::kSplit, blockIdx.y, gridDim.y);")
    return _kernel(f"kda_commit_{split}_{cols}_{threads}_{min_blocks}", f"KdaShape<128, 4, {split}, {cols}, {threads}>", body,
                   max(threads, 1024 // split // cols), 1, "KdaCommit a", min_blocks)


def norm_row(n, leaves, parts, blocks, cluster, threads, min_blocks=1):
    """`threads` 0: the kernel of a block a row, of steps with few rows where `min_blocks` is 1."""
    if not threads:
        return _kernel(f"wide_norm_{n}_{parts}_{blocks}_{min_blocks}", f"WideNormShape<{n}, {leaves}, {parts}, {blocks}, {str(min_blocks == 1).lower()}>",
                       f"K3_DYN_SMEM(unsigned char, raw);\n  wide_norm_row<S>(a, *(WideNormSmem<S>*)raw, blockIdx.x, {READY});", leaves * 32, 1, "NormRow a",
                       min_blocks)
    body = ("K3_DYN_SMEM(unsigned char, raw);\n  norm_row<S>(a, *(NormSmem<S>*)raw, blockIdx.x / S::kCluster, blockIdx.x % S::kCluster, "
            f"{READY});")
    return _kernel(f"norm_{n}_{parts}_{blocks}_{cluster}_{threads}_{min_blocks}", f"NormShape<{n}, {leaves}, {parts}, {blocks}, {cluster}, {threads}>", body,
                   threads, cluster, "NormRow a", min_blocks)


def norm_shared(n, leaves, parts, blocks, cluster, threads, min_blocks=1):
    """Bytes of NormSmem, and at least those of WideNormSmem."""
    if not threads:
        return (228 // min_blocks - 1) * 1024
    own = n // cluster
    return 4 * (max(blocks, 2) * own + (own if blocks else 1) + leaves * 20) + 24


def route(experts, top_k, threads):
    """A block a row."""
    args = "const float* logits, const float* bias, const int* row_slot, float scale, int* ids, float* weights"
    body = ("__shared__ RouteSmem<S> m;\n  int row = blockIdx.x;\n"
            f"  route_row<S>(logits + row * S::kExperts, bias, row_slot[row] >= 0, scale, ids + row * S::kTopK, weights + row * S::kTopK, m, {READY});")
    return _kernel(f"route_{experts}_{threads}", f"RouteShape<{experts}, {top_k}, {threads}>", body, threads, 1, args)


def list_experts(experts, top_k, rows, threads):
    args = "const int* ids, const int* row_slot, int total, int* entries, int* items, u32* entry, u16* item"
    body = ("__shared__ ListSmem<S> m;\n"
            f"  list_experts<S>(ids, row_slot, total, ListOut{{entries, items, entry, item}}, m, {READY});")
    return _kernel(f"list_{experts}_{rows}_{threads}", f"ListShape<{experts}, {top_k}, {rows}, {threads}>", body, threads, 1, args)


def list_wide(experts, top_k, rows, threads, blocks, group):
    """Of all `rows` rows."""
    args = "const int* ids, const int* row_slot, int* entries, int* items, u32* entry, u16* item"
    body = ("__shared__ WideListSmem<S> m;\n"
            f"  list_wide<S>(ids, row_slot, ListOut{{entries, items, entry, item}}, m, {READY});")
    shape = f"WideListShape<{experts}, {top_k}, {rows}, {blocks}, {threads}, {group}>"
    return _kernel(f"list_wide_{experts}_{rows}_{blocks}_{group}", shape, body, threads, 1, args)


def unit(kernels) -> str:
    heads = "".join(f'#include "{h}"\n' for h in ("kda_commit.cuh", "kda_mix.cuh", "kda_rows.cuh", "norm_row.cuh", "norm_wide.cuh", "list_wide.cuh"))
    return heads + "".join(k.source for k in kernels)


class Cores:
    """Kernels compiled for this machine's GPU, launched by name of the Kernel."""

    def __init__(self, kernels):
        self.device = cuda_driver.open_device()
        self.compiled = cuda_jit.compile_cuda(unit(kernels), self.device.arch)
        spilled = [name for name, r in self.compiled.resources().items() if r.spills]
        assert not spilled, spilled
        self.module = cuda_driver.Module(self.compiled.cubin)

    def function(self, kernel, shared=0):
        f = self.module.function(kernel.name, shared)
        if kernel.cluster > 8:
            cu = cuda_driver.driver()
            cuda_driver.check(cu.cuFuncSetAttribute(f, cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1))
        return f

    def launcher(self, kernel, grid, arguments, *, shared=0, stream=0, dependent=True):
        values = [a if isinstance(a, (ctypes.Structure, ctypes._SimpleCData)) else ctypes.c_void_p(a.data.ptr) for a in arguments]
        launch = cuda_driver.Launch(self.function(kernel, shared), grid, kernel.threads, values, shared=shared, stream=stream,
                                    dependent=dependent, cluster=kernel.cluster)
        launch.kept = arguments
        return launch

    def run(self, kernel, grid, arguments, *, shared=0):
        cp.cuda.Device().synchronize()
        self.launcher(kernel, grid, arguments, shared=shared, dependent=False).launch()
        cp.cuda.Device().synchronize()


def up(x: np.ndarray):
    """To the device; BF16 travels as its bits."""
    return cp.asarray(np.ascontiguousarray(x).view(np.uint16) if x.dtype == BF16 else np.ascontiguousarray(x))


def down(x, dtype=None) -> np.ndarray:
    return cp.asnumpy(x).view(dtype) if dtype else cp.asnumpy(x)


def poisoned(shape, dtype):
    dtype = np.dtype(dtype)
    return up(np.full(shape, POISON[dtype], dtype))


def fill(structure, **values):
    """The structure with device arrays as their addresses; None is a null pointer."""
    s = structure(**{k: v.data.ptr if isinstance(v, cp.ndarray) else v for k, v in values.items()})
    s.kept = values
    return s


def relative(got, want) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))
