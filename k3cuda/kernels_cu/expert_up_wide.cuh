// The routed experts in steps of many rows: what both their kernels rest on, and w1 and w3. An entry has up to sixteen items, two token tiles that
// share the expansion of their weights, which is what bounds these kernels. Bytes are those of small steps.
#pragma once
#include "expert_core.cuh"

constexpr int kWideTiles = 2, kWideEntry = kWideTiles * kTokenTile;   // token tiles and items of an entry

// One tile's leaf, in shared memory, against the first kTiles token tiles. As mxfp4_leaf.
template <int kGroups, int kTiles>
K3_DEVICE void mxfp4_leaf_tiles(float (&sum)[kWideTiles][4], const u8* leaf, const uint4 (&x)[kWideTiles][kGroups]) {
  const uint4* words = (const uint4*)leaf + lane_id();
  const uint2* scales = (const uint2*)(leaf + kGroups * 256) + lane_id() / 4;
  uint2 exponents;
  auto group = [&](int g, u32 first, u32 second) {
    const uint4 a = expand_mxfp4(first), b = expand_mxfp4(second);
    const float low = scale_factor(exponents.x, g % 4), high = scale_factor(exponents.y, g % 4);   // rows g and g + 8
    K3_UNROLL
    for (int t = 0; t < kTiles; ++t) {
      float c[4] = {0.f, 0.f, 0.f, 0.f};
      mma(c, a, x[t][g].x, x[t][g].y);
      mma(c, b, x[t][g].z, x[t][g].w);
      sum[t][0] = fmaf(c[0], low, sum[t][0]);
      sum[t][1] = fmaf(c[1], low, sum[t][1]);
      sum[t][2] = fmaf(c[2], high, sum[t][2]);
      sum[t][3] = fmaf(c[3], high, sum[t][3]);
    }
  };
  K3_UNROLL
  for (int t = 0; t < kTiles; ++t) sum[t][0] = sum[t][1] = sum[t][2] = sum[t][3] = 0.f;
  K3_UNROLL
  for (int g = 0; g < kGroups; g += 2) {
    if (g % 4 == 0) exponents = scales[g / 4 * 8];
    if (g + 1 < kGroups) {
      uint4 w = words[g / 2 * kWarpSize];
      group(g, w.x, w.y);
      group(g + 1, w.z, w.w);
    } else {
      uint2 w = ((const uint2*)(leaf + g * 256))[lane_id()];
      group(g, w.x, w.y);
    }
  }
}
template <int kGroups>
K3_DEVICE void mxfp4_leaf_tiles(bool both, float (&sum)[kWideTiles][4], const u8* leaf, const uint4 (&x)[kWideTiles][kGroups]) {
  if (both) mxfp4_leaf_tiles<kGroups, kWideTiles>(sum, leaf, x);
  else mxfp4_leaf_tiles<kGroups, 1>(sum, leaf, x);
}

// ---- w1 and w3: as expert_up_product, a warp a leaf ----
template <int kLeaves_, int kGroups_, class List_, int kShared_>
struct ExpertUpWideShape {
  typedef List_ List;
  static constexpr int kLeaves = kLeaves_, kGroups = kGroups_, kThreads = kLeaves * kWarpSize, kChunk = mxfp4_leaf_bytes(kGroups);
  static constexpr int kTokenStride = kTileRows + 4, kPartial = kWideEntry * kTokenStride;   // floats
  static constexpr int kBuffers = 2, kRest = kBuffers * (2 * kLeaves * kPartial * 4 + 16) + 64 + sizeof(List);
  static constexpr int kSlots = max_of(1, min_of(kWarpSize, (kShared_ - kRest) / (kLeaves * (kChunk + 8))));
  static constexpr int kBarrierAt = kLeaves * kSlots * kChunk, kStoredAt = kBarrierAt + kLeaves * kSlots * 8;
  static constexpr int kPartialAt = aligned16(kStoredAt + 2 * kBuffers * 8), kListAt = kPartialAt + kBuffers * 2 * kLeaves * kPartial * 4;
  static constexpr int kSmem = kListAt + sizeof(List);
};

// Arguments as of expert_up_product; `ready` comes before anything is read.
template <class S, class Ready, class Epilogue>
K3_DEVICE void expert_up_wide(const u8* w, int tile_pairs, const bf16* x, int stride, int top_k, int blocks, const typename S::List* from, u8* smem,
                              Ready&& ready, Epilogue&& epilogue) {
  CopyRing<S::kSlots, S::kChunk> ring(smem, (u64*)(smem + S::kBarrierAt));
  u64 *stored = (u64*)(smem + S::kStoredAt), *taken = stored + S::kBuffers;   // leaf sums of a buffer: all there, and added
  float* partials = (float*)(smem + S::kPartialAt);                           // [buffer][gate, up][leaf][token][row]
  auto& list = *(typename S::List*)(smem + S::kListAt);
  if (threadIdx.x < S::kBuffers) {
    barrier_init(stored + threadIdx.x, S::kLeaves * kWarpArrivals);
    barrier_init(taken + threadIdx.x, S::kLeaves * kWarpArrivals);
  }
  ready();
  load_list(list, from);
  const int units = list.entries * tile_pairs, per = units / blocks, more = units % blocks;
  const int begin = int(blockIdx.x) * per + min_of(blockIdx.x, more), end = begin + per + (int(blockIdx.x) < more);
  auto source = [&](int k) -> const u8* {   // of a tile of this block, counted from its first; null: there is none
    const int at = begin * 2 + k;
    if (at >= end * 2) return nullptr;
    const int entry = at / (2 * tile_pairs), tile = at - entry * 2 * tile_pairs;
    return w + (size_t(entry_expert(list.entry[entry]) * 2 * tile_pairs + tile) * S::kLeaves + warp_id()) * S::kChunk;
  };
  if (lane_id() < S::kSlots) ring.fill(lane_id(), source(lane_id()));
  __syncwarp();
  uint4 held[kWideTiles][S::kGroups];
#pragma unroll 1
  for (int turn = 0; begin + turn < end; ++turn) {
    const int entry = (begin + turn) / tile_pairs, pair = begin + turn - entry * tile_pairs;
    const int first = entry_first(list.entry[entry]), count = entry_first(list.entry[entry + 1]) - first;
    const bool both = count > kTokenTile;
    if (turn == 0 || pair == 0) {   // another entry
      K3_UNROLL
      for (int t = 0; t < kWideTiles; ++t) {
        if (t && !both) break;
        // Columns beyond the entry's items are the last item's once more: nobody looks at them.
        const u32 row = list.item[first + min_of(t * kTokenTile + lane_id() / 4, count - 1)] / top_k;
        const uint4* mine = (const uint4*)x + (row * u32(stride) + warp_id() * S::kGroups * 32) / 8 + lane_id() % 4;
        K3_UNROLL
        for (int i = 0; i < S::kGroups; ++i) held[t][i] = load_activations(mine + i * 4);
      }
      K3_UNROLL
      for (int i = 0; i < kWideTiles * S::kGroups; ++i) (&held[0][0])[i] = scale_tokens((&held[0][0])[i]);
    }
    const int buffer = turn % S::kBuffers;
    const u32 parity = turn / S::kBuffers & 1;
    float* partial = partials + buffer * 2 * S::kLeaves * S::kPartial;
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {   // gate, up
      float sum[kWideTiles][4];
      const int k = 2 * turn + half;
      mxfp4_leaf_tiles<S::kGroups>(both, sum, ring.take(k), held);
      __syncwarp();
      if (lane_id() == 0) ring.fill(k + S::kSlots, source(k + S::kSlots));
      if (half == 0 && turn >= S::kBuffers) barrier_wait(taken + buffer, parity ^ 1);
      float* to = partial + (half * S::kLeaves + warp_id()) * S::kPartial + lane_id() % 4 * 2 * S::kTokenStride + lane_id() / 4;
      K3_UNROLL
      for (int t = 0; t < kWideTiles; ++t) {
        if (t && !both) break;
        K3_UNROLL
        for (int i = 0; i < 4; ++i) to[(t * kTokenTile + i % 2) * S::kTokenStride + i / 2 * 8] = sum[t][i];
      }
    }
    __syncwarp();
    warp_arrive(stored + buffer);
    const int i = (warp_id() + turn) % S::kLeaves * kWarpSize + lane_id();   // of the unit's values, this thread's first
    if (i - lane_id() < count * kTileRows) {
      barrier_wait(stored + buffer, parity);
#pragma unroll 1
      for (int v = not_before_here(i); v < count * kTileRows; v += S::kThreads) {
        const float* p = partial + v / kTileRows * S::kTokenStride + v % kTileRows;
        epilogue(list.item[first + v / kTileRows], pair * kTileRows + v % kTileRows,
                 tree_sum<S::kLeaves>(p, S::kPartial), tree_sum<S::kLeaves>(p + S::kLeaves * S::kPartial, S::kPartial));
      }
      __syncwarp();
    }
    warp_arrive(taken + buffer);
  }
}
