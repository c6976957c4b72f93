"""Kernels around the cores with a plain store, for the shim and for a GPU: the same source, the same inputs."""
import numpy as np

from k3cuda.runtime import repack

# name -> (output rows, leaves, k-steps a leaf, C++ layout). Layouts of one product must give the same bytes on a GPU.
PRODUCTS = {
    "auto": (40, 16, 2, "RowAuto<3, 16, 2, {nt}>"),
    "one_leaf": (48, 1, 5, "RowAuto<3, 1, 5, {nt}>"),
    "two_leaves": (64, 2, 6, "RowAuto<4, 2, 6, {nt}>"),
    "narrow": (40, 16, 2, "RowShape<16, 2, 1, {nt}, 4, 1, 1, 4096>"),
    "direct": (40, 16, 2, "RowShape<16, 2, 2, {nt}, 8, 1, 1, 0>"),
    "streamed": (40, 16, 2, "RowShape<16, 2, 1, {nt}, 16, 1, 1, 16384, false>"),
    "many": (40, 16, 2, "ManyShape<3, 16, 2, {nt}, 1, 32>"),
    "many_turns": (330, 16, 3, "ManyShape<21, 16, 3, {nt}, 1, 8>"),     # one cluster, two turns, the inbox apart
    "many_blocks": (330, 2, 6, "ManyShape<21, 2, 6, {nt}, 1, 1, 1>"),   # no clusters; tiles of a warp in turns of two and of one
}
ON_HOST = ("one_leaf", "two_leaves", "narrow", "direct", "streamed", "many_blocks")   # no clusters


def row_source(name: str, nt: int) -> str:
    rows, _, _, layout = PRODUCTS[name]
    kernel = f"{name}_{nt}, {name}_{nt}_shape" if name.startswith("many") else f"{name}_{nt}, {repack.tiles_of(rows)}, {name}_{nt}_shape"
    return (f'#define K3_BENCH_SMS 4\n#include "bench_core.cuh"\ntypedef {layout.format(nt=nt)} {name}_{nt}_shape;\n'
            f"K3_BENCH_{'MANY' if name.startswith('many') else 'ROWS'}({kernel})\n")


def row_case(name: str, seed: int = 0):
    """(packed weights, tokens bf16 [64, k], float64 result [64, padded rows])."""
    rows, leaves, steps, _ = PRODUCTS[name]
    rng, k = np.random.default_rng(seed), leaves * steps * 16
    w, x = to_bf16(rng.standard_normal((rows, k))), to_bf16(rng.standard_normal((64, k)))
    want = np.zeros((64, repack.tiles_of(rows) * 16))
    want[:, :rows] = of_bf16(x) @ of_bf16(w).T
    return repack.pack_bf16(w, leaves), x, want


def to_bf16(a) -> np.ndarray:
    bits = np.asarray(a, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def of_bf16(bits) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


# ---- experts: a small layer with leaves of an odd and of an even number of groups ----

EXPERTS, TOP_K, LATENT, WIDTH = 12, 4, 16 * 3 * 32, 2 * 2 * 32   # 16 leaves of 3 groups up, 2 leaves of 2 groups down; small windows
MAX_ITEMS = 64 * TOP_K


def expert_source(leaves: int = 2) -> str:
    """Kernels small_up and small_down, w2 with so many leaves."""
    return (f'#define K3_BENCH_SMS 4\n#include "bench_core.cuh"\ntypedef ExpertList<{MAX_ITEMS}> list;\n'
            "typedef ExpertUpShape<16, 3, list, 8, 8, 16384> up_shape;\n"
            f"typedef ExpertDownShape<{leaves}, {WIDTH // 32 // leaves}, list, 64, {TOP_K}, 4, 2, 8192, 24> down_shape;\n"
            "K3_BENCH_EXPERTS(small, 1, 1, up_shape, down_shape)\n")


def wide_expert_source(leaves: int) -> str:
    """w2 as a step of many rows runs it, of `leaves` leaves: items, then their sums."""
    return f"""#include "expert_wide.cuh"
typedef ExpertItemsShape<{leaves}, {WIDTH // 32 // leaves}, {MAX_ITEMS}, 4> S;
extern "C" __global__ void __launch_bounds__(S::kThreads) items(const u8* w, int tiles, const bf16* x, int stride, const ExpertList<{MAX_ITEMS}>* list, float* results, int width) {{
  K3_DYN_SMEM(u8, smem);
  expert_items<S>(w, tiles, x, stride, list, results, width, smem);
}}
extern "C" __global__ void __launch_bounds__({LATENT // 4}) sums(const float* results, const int* ids, const float* weights, int width, float* y) {{
  __shared__ int order[{TOP_K}];
  __shared__ float weight[{TOP_K}];
  expert_sum<{leaves}, {MAX_ITEMS}, {TOP_K}>(results, ids, weights, blockIdx.x, threadIdx.x * 4, width, order, weight,
                                            [&](int row, int column, float v) {{ y[size_t(row) * width + column] = v; }});
}}
extern "C" __constant__ int items_launch[2] = {{S::kThreads, S::kSmem}};
"""


class ExpertCase:
    """Weights of a few experts, tokens, and a routing with one expert that every row chose."""

    def __init__(self, rows: int = 64, seed: int = 0):
        rng = np.random.default_rng(seed)

        def matrix(out, k):
            return (rng.integers(0, 256, (EXPERTS, out, k // 2), dtype=np.uint8), rng.integers(110, 130, (EXPERTS, out, k // 32), dtype=np.uint8))

        self.w1, self.w3, self.w2 = matrix(WIDTH, LATENT), matrix(WIDTH, LATENT), matrix(LATENT, WIDTH)
        packed = [repack.pack_mxfp4(*m, 16) for m in (self.w1, self.w3)]
        self.w13 = np.stack(packed, axis=2).reshape(EXPERTS, -1, *packed[0].shape[2:])
        self.w2_packed = repack.pack_mxfp4(*self.w2, 2)
        self.x = to_bf16(rng.standard_normal((rows, LATENT)))
        self.act = to_bf16(rng.standard_normal((rows * TOP_K, WIDTH)))
        self.weights = rng.random((rows, TOP_K), np.float32)
        others = [rng.permutation(np.arange(1, EXPERTS))[:TOP_K - 1] for _ in range(rows)]
        self.ids = np.stack([rng.permutation([0, *o]) for o in others]).astype(np.int32)

    def list(self, rows) -> np.ndarray:
        """The list of experts (ExpertList) for the given rows, as words."""
        items = sorted((int(self.ids[r, p]), r * TOP_K + p) for r in rows for p in range(TOP_K))
        entry, start = [], 0
        for e in sorted({e for e, _ in items}):
            count = sum(e == other for other, _ in items)
            entry += [e | first << 16 for first in range(start, start + count, 8)]
            start += count
        words = np.full(2 + MAX_ITEMS + 1 + MAX_ITEMS // 2, 0xFFFFFFFF, np.uint32)
        words[:2] = len(entry), len(items)
        words[2:3 + len(entry)] = [*entry, len(items) << 16]
        words[3 + MAX_ITEMS:].view(np.uint16)[:len(items)] = [i for _, i in items]
        return words

    def want(self):
        """float64 gate and up of every item [items, 2, WIDTH], and the weighted sum of every row [rows, LATENT]."""
        from k3cuda.reference.mxfp4 import dequantize
        w1, w3, w2 = (dequantize(*m).astype(np.float64) for m in (self.w1, self.w3, self.w2))
        x, act, ids = of_bf16(self.x), of_bf16(self.act), self.ids.reshape(-1)
        rows = np.arange(len(ids)) // TOP_K
        gate_up = np.stack([np.stack([w1[e] @ x[r], w3[e] @ x[r]]) for e, r in zip(ids, rows)])
        down = np.stack([w2[e] @ a for e, a in zip(ids, act)]) * self.weights.reshape(-1, 1)
        return gate_up, down.reshape(-1, TOP_K, LATENT).sum(1)


# ---- wide products: beside the narrow ones, for the same bytes ----

# name -> (output rows, leaves, k-steps a leaf, tokens, whether row tiles meet in pairs)
WIDE = {"wide": (40, 16, 2, 128, False), "wide_odd": (56, 2, 3, 128, False), "wide_64": (88, 4, 6, 64, False), "wide_one": (104, 1, 5, 128, False),
        "wide_long": (24, 2, 28, 128, False), "wide_64_long": (72, 16, 18, 64, False), "wide_64_short": (72, 16, 6, 64, False),
        "wide_64_one": (104, 1, 40, 64, False), "wide_16": (72, 16, 14, 16, False), "wide_32_one": (104, 1, 28, 32, False), "wide_pairs": (64, 4, 1, 128, True)}
WIDE_SMS = 5   # blocks walk over several groups of tiles


def wide_source(name: str) -> str:
    """Kernels `name` and `name`_tree: a wide product with a plain store; of a pair, half the difference."""
    rows, leaves, steps, tokens, pair = WIDE[name]
    values, stored = ("float a, float b", "0.5f * (a - b)") if pair else ("float v", "v")
    store = f"[&](int row, int token, {values}) {{ if (row < outputs) y[size_t(token) * outputs + row] = {stored}; }}"
    return f"""#include "wide_core.cuh"
typedef WideShape<{repack.tiles_of(rows)}, {leaves}, {steps}, {tokens}, {WIDE_SMS}> S;
static_assert(S::kFits, "");
extern "C" __global__ void __launch_bounds__(S::kThreads) {name}(const uint4* w, const bf16* x, int stride, f32x4* partial, float* y, int outputs) {{
  K3_DYN_SMEM(u8, smem);
  auto store = {store};
  wide_product<S>(w, x, stride, partial, smem, [&](int row, int token, float v) {{ {"" if pair else "store(row, token, v);"} }});
}}
extern "C" __global__ void __launch_bounds__(S::kSumThreads) {name}_tree(const f32x4* partial, float* y, int outputs) {{
  wide_sum<S, {str(pair).lower()}>(partial, {store});
}}
extern "C" __constant__ int {name}_launch[5] = {{S::kBlocks, S::kThreads, S::kSmem, wide_sum_blocks<S, {str(pair).lower()}>(), S::kSumThreads}};
"""


def narrow_source(name: str) -> str:
    """Kernel `narrow`: the same product for eight tokens."""
    rows, leaves, steps, _, _ = WIDE[name]
    return (f'#define K3_BENCH_SMS 4\n#include "bench_core.cuh"\ntypedef RowShape<{leaves}, {steps}, 1, 1, {min(leaves, 4)}, 1, 1, 4096> S;\n'
            f"K3_BENCH_ROWS(narrow, {repack.tiles_of(rows)}, S)\n")


def wide_case(name: str, seed: int = 0):
    """(packed weights, tokens bf16, float64 result) of a wide product."""
    rows, leaves, steps, tokens, pair = WIDE[name]
    rng, k = np.random.default_rng(seed), leaves * steps * 16
    w, x = to_bf16(rng.standard_normal((rows, k))), to_bf16(rng.standard_normal((tokens, k)))
    want = of_bf16(x) @ of_bf16(w).T
    if pair:   # tiles in turn
        tiles = want.reshape(tokens, -1, 2, 16)
        want = 0.5 * (tiles[:, :, 0] - tiles[:, :, 1]).reshape(tokens, -1)
    return repack.pack_bf16(w, leaves), x, want
