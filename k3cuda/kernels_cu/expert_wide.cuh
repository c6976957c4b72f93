// w2 of the routed experts in steps of many rows. So many rows' sums fit no block, so every item's result goes to memory, weight-major,
// and a second kernel adds a row's own: in rising expert id inside a leaf, then the tree over leaves, as expert_down_product does.
#pragma once
#include "expert_core.cuh"

//   kLeaves, kGroups  of this rank
//   kRun              tiles of a unit: an entry, a leaf, a run of 16-row tiles. A warp takes units in turn, each its own
//   kPair             tiles of one copy: neighbours lie side by side where there is one leaf
//   kTokens           items of an entry, at most: whole tiles of tokens
template <int kLeaves_, int kGroups_, int kMaxItems_, int kRun_ = 8, int kTokens_ = kEntryTokens>
struct ExpertItemsShape {
  static constexpr int kLeaves = kLeaves_, kGroups = kGroups_, kMaxItems = kMaxItems_, kRun = kRun_, kTokens = kTokens_, kTokenTiles = kTokens / kTokenTile;
  static constexpr int kRing = 220 * 1024, kLeafBytes = mxfp4_leaf_bytes(kGroups), kPair = kLeaves == 1 && 2 * 16 * 2 * kLeafBytes <= kRing - 1024 ? 2 : 1;
  static constexpr int kChunk = kPair * kLeafBytes, kCopies = kRun / kPair;
  // Fewer where leaves are long, or registers hold the tokens of several tiles.
  static constexpr int kWarps = min_of(kTokenTiles > 1 ? 8 : 16, kRing / (2 * (kChunk + 8))), kThreads = kWarps * kWarpSize;
  static constexpr int kSlots = min_of(8, kRing / (kWarps * (kChunk + 8)));
  static constexpr int kBarrierAt = kWarps * kSlots * kChunk, kSmem = kBarrierAt + kWarps * kSlots * 8;
  static_assert(kSlots >= 2 && kRun % kPair == 0, "one chunk comes while another is multiplied");
};

// w: [expert][tile][leaf]. x: activations [item][stride]. results: [leaf][item][width]. Any number of blocks.
template <class S>
K3_DEVICE void expert_items(const u8* w, int tiles, const bf16* x, int stride, const ExpertList<S::kMaxItems>* list, float* results, int width, u8* smem) {
  u8* slots = smem + warp_id() * S::kSlots * S::kChunk;
  u64* full = (u64*)(smem + S::kBarrierAt) + warp_id() * S::kSlots;
  if (lane_id() == 0) {
    for (int i = 0; i < S::kSlots; ++i) barrier_init(full + i, 1);
    barrier_fence_init();
  }
  __syncwarp();
  grid_wait();
  grid_launch_next();
  const int runs = groups_of(tiles, S::kRun), each = S::kLeaves * runs, units = list->entries * each;
  const int warps = int(gridDim.x) * S::kWarps, own = warp_id() * int(gridDim.x) + int(blockIdx.x);
  const int count = own < units ? (units - own + warps - 1) / warps : 0;     // units of this warp
  // Lane i keeps what is known of the warp's units i, i + 32, ...: the list's entry and how many items it has.
  u32 known = 0;
  int has = 0;
  auto learn = [&](int first) {
    int unit = own + (first + lane_id()) * warps;
    if (first + lane_id() < count) {
      known = ((volatile const u32*)list->entry)[unit / each];
      has = entry_first(((volatile const u32*)list->entry)[unit / each + 1]) - entry_first(known);
    }
  };
  learn(0);
  u32 next_known = known;                                                     // of the copies' units, which run ahead
  int copied = 0, copy_unit = 0;
  auto issue = [&](int to) {                                                  // all lanes
    if (copied >= count * S::kCopies) return;
    const int u = copied / S::kCopies, part = copied % S::kCopies, unit = own + u * warps, at = unit % each;
    const u32 entry = __shfl_sync(kFullWarp, next_known, u % kWarpSize);
    const int leaf = at / runs, tile = at % runs * S::kRun + part * S::kPair;
    if (lane_id() == 0) {
      const u8* from = w + (size_t(entry_expert(entry)) * tiles * S::kLeaves + leaf) * S::kLeafBytes;
      // A run that reaches past the end reads the last tile again; it is dropped.
      if (tile + S::kPair <= tiles && S::kLeaves == 1) {
        barrier_expect(full + to, S::kChunk);
        bulk_copy(slots + to * S::kChunk, from + size_t(tile) * S::kLeafBytes, S::kChunk, full + to);
      } else {
        barrier_expect(full + to, S::kChunk);
        for (int t = 0; t < S::kPair; ++t)
          bulk_copy(slots + to * S::kChunk + t * S::kLeafBytes, from + size_t(min_of(tile + t, tiles - 1)) * S::kLeaves * S::kLeafBytes, S::kLeafBytes, full + to);
      }
    }
    if (++copied % S::kCopies == 0 && ++copy_unit % kWarpSize == 0 && copy_unit < count) {
      int next = own + (copy_unit + lane_id()) * warps;
      if (copy_unit + lane_id() < count) next_known = ((volatile const u32*)list->entry)[next / each];
    }
  };
  for (int s = 0; s < S::kSlots; ++s) issue(s);
  typedef int Items[S::kTokenTiles];
  auto items_of = [&](Items& to, int u) {                                     // of this lane's tokens; -1: none. A unit's facts are known by then
    const u32 entry = __shfl_sync(kFullWarp, known, u % kWarpSize);
    const int n = __shfl_sync(kFullWarp, has, u % kWarpSize);
    K3_UNROLL
    for (int t = 0; t < S::kTokenTiles; ++t) {
      const int token = t * kTokenTile + lane_id() / 4;
      to[t] = u < count && token < n ? int(((volatile const u16*)list->item)[entry_first(entry) + token]) : -1;
    }
  };
  auto load_x = [&](uint4 (&to)[S::kTokenTiles][S::kGroups], const Items& item, int u) {
    const int leaf = (own + u * warps) % each / runs;
    K3_UNROLL
    for (int t = 0; t < S::kTokenTiles; ++t) {
      const uint4* mine = (const uint4*)(x + size_t(item[t] < 0 ? 0 : item[t]) * stride + leaf * S::kGroups * 32) + lane_id() % 4;
      K3_UNROLL
      for (int i = 0; i < S::kGroups; ++i) to[t][i] = item[t] < 0 ? uint4{0, 0, 0, 0} : load_activations(mine + i * 4);
    }
  };
  int slot = 0;
  Items item, next_item;
  items_of(item, 0);
  items_of(next_item, 1);
  u32 parity = 0;
  uint4 next[S::kTokenTiles][S::kGroups];
  load_x(next, item, 0);
#pragma unroll 1
  for (int u = 0; u < count; ++u) {
    uint4 held[S::kTokenTiles][S::kGroups];
    K3_UNROLL
    for (int i = 0; i < S::kTokenTiles * S::kGroups; ++i) (&held[0][0])[i] = scale_tokens((&next[0][0])[i]);
    load_x(next, next_item, u + 1);
    const int leaf = (own + u * warps) % each / runs, first = (own + u * warps) % runs * S::kRun;
    int token_tiles = 1;                                                      // with tokens
    K3_UNROLL
    for (int t = 1; t < S::kTokenTiles; ++t) token_tiles += __shfl_sync(kFullWarp, item[t], 0) >= 0;
    int out[S::kTokenTiles][2];                                               // items of the columns that this lane has results of; -1: none
    K3_UNROLL
    for (int t = 0; t < S::kTokenTiles; ++t)
      K3_UNROLL
      for (int i = 0; i < 2; ++i) out[t][i] = __shfl_sync(kFullWarp, item[t], (lane_id() % 4 * 2 + i) * 4);
    K3_UNROLL
    for (int t = 0; t < S::kTokenTiles; ++t) item[t] = next_item[t];
    if ((u + 2) % kWarpSize == 0) learn(u + 2);
    items_of(next_item, u + 2);
#pragma unroll 1
    for (int part = 0; part < S::kCopies; ++part) {
      barrier_wait(full + slot, parity);
      auto one_tile = [&](int t) {
        const u8* weights = slots + slot * S::kChunk + t * S::kLeafBytes;
        float sum[S::kTokenTiles][4];
        if constexpr (S::kTokenTiles == 1) mxfp4_leaf<S::kGroups>(sum[0], weights, held[0]);
        else mxfp4_of_tiles<S::kGroups, 0>(sum, weights, held, token_tiles);
        const int tile = first + part * S::kPair + t;
        K3_UNROLL
        for (int n = 0; n < S::kTokenTiles; ++n)
          K3_UNROLL
          for (int i = 0; i < 4; ++i) {
            const int row = tile * kTileRows + i / 2 * 8 + lane_id() / 4, to = out[n][i % 2];
            if (to >= 0 && tile < tiles && row < width) results[(size_t(leaf) * S::kMaxItems + to) * width + row] = sum[n][i];
          }
      };
      if constexpr (S::kTokenTiles == 1) {
        K3_UNROLL
        for (int t = 0; t < S::kPair; ++t) one_tile(t);
      } else {
#pragma unroll 1
        for (int t = 0; t < S::kPair; ++t) one_tile(t);                       // one after the other: x fills the registers
      }
      __syncwarp();
      issue(slot);
      if (++slot == S::kSlots) slot = 0, parity ^= 1;
    }
  }
}

// Four columns of one row a thread: block (row, run of columns). order and weight: kTopK places each, in shared memory.
template <int kLeaves, int kMaxItems, int kTopK, class Epilogue>
K3_DEVICE void expert_sum(const float* results, const int* ids, const float* weights, int row, int column, int width, int* order, float* weight,
                          Epilogue&& epilogue) {
  if (threadIdx.x < kTopK) {
    const int id = ids[row * kTopK + threadIdx.x];
    int rank = 0;
    for (int p = 0; p < kTopK; ++p) rank += ids[row * kTopK + p] < id;
    order[rank] = row * kTopK + threadIdx.x;
    weight[rank] = weights[row * kTopK + threadIdx.x];
  }
  __syncthreads();
  if (column >= width) return;
  f32x4 leaf[kLeaves];
  K3_UNROLL
  for (int l = 0; l < kLeaves; ++l) {
    f32x4 sum = {0.f, 0.f, 0.f, 0.f};
    K3_UNROLL
    for (int r = 0; r < kTopK; ++r) {
      const f32x4 v = load4(results + (size_t(l) * kMaxItems + order[r]) * width + column);
      sum = {fmaf(weight[r], v.x, sum.x), fmaf(weight[r], v.y, sum.y), fmaf(weight[r], v.z, sum.z), fmaf(weight[r], v.w, sum.w)};
    }
    leaf[l] = sum;
  }
  K3_UNROLL
  for (int i = 0; i < 4; ++i) epilogue(row, column + i, tree_sum<kLeaves>(&leaf[0].x + i, 4));
}
