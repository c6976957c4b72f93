// Routed experts, weight-major: every expert that any row chose is read once, for all rows that chose it.
// A list names them: entries in rising expert id, each with at most eight (row, place) items; an expert with more has several
// entries side by side, which share its bytes through the L2.
#pragma once
#include "mxfp4.cuh"

constexpr int kEntryTokens = kTokenTile;

// Written by the route stage. entry[i] = expert | first item << 16, entry[entries] = items << 16; item = row * top_k + place.
template <int kMaxItems>
struct ExpertList {
  int entries, items;
  u32 entry[kMaxItems + 1];
  u16 item[kMaxItems];
};

K3_DEVICE int entry_expert(u32 e) { return e & 0xffff; }
K3_DEVICE int entry_first(u32 e) { return e >> 16; }

// Every thread of the block copies all of it, whatever it holds, so that no load waits for another; ends with a barrier.
template <int kMaxItems>
K3_DEVICE void load_list(ExpertList<kMaxItems>& to, const ExpertList<kMaxItems>* from, int threads) {
  static_assert(sizeof(ExpertList<kMaxItems>) % 4 == 0, "copied in words");
  for (int i = threadIdx.x; i < int(sizeof(ExpertList<kMaxItems>) / 4); i += threads) ((u32*)&to)[i] = ((volatile const u32*)from)[i];
  __syncthreads();
}

// A warp's slots for bulk copies whose addresses are known only one at a time.
template <int kSlots, int kBytes>
struct CopyRing {
  u8* slots;
  u64* full;
  int slot = 0;
  u32 parity = 0;
  K3_DEVICE CopyRing(u8* s, u64* bars) : slots(s + warp_id() * kSlots * kBytes), full(bars + warp_id() * kSlots) {
    if (lane_id() == 0) {
      for (int i = 0; i < kSlots; ++i) barrier_init(full + i, 1);
      barrier_fence_init();
    }
    __syncwarp();
  }
  K3_DEVICE void issue(int to, const u8* source) {   // lane 0
    barrier_expect(full + to, kBytes);
    bulk_copy(slots + to * kBytes, source, kBytes, full + to);
  }
  K3_DEVICE const u8* take() {
    barrier_wait(full + slot, parity);
    return slots + slot * kBytes;
  }
  K3_DEVICE void next() {
    if (++slot == kSlots) slot = 0, parity ^= 1;
  }
};

// ---- w1 and w3: rows of the latent in, gate and up out ----
//   kLeaves, kGroups  leaves of K, and 32-groups in each
//   kWK               warps of a block, along leaves
template <int kLeaves_, int kGroups_, int kMaxItems_, int kWK_ = 8, int kRing_ = 64 * 1024>
struct ExpertUpShape {
  static constexpr int kLeaves = kLeaves_, kGroups = kGroups_, kMaxItems = kMaxItems_, kWK = kWK_, kThreads = kWK * kWarpSize;
  static constexpr int kWarpLeaves = kLeaves / kWK, kLeafBytes = mxfp4_leaf_bytes(kGroups), kChunk = kWarpLeaves * kLeafBytes;
  static constexpr int kSlots = max_of(1, kRing_ / (kWK * kChunk));
  static constexpr int kTokenStride = kTileRows + 4, kPartial = kEntryTokens * kTokenStride;   // floats
  static constexpr int kBarrierAt = kWK * kSlots * kChunk;
  static constexpr int kPartialAt = (kBarrierAt + kWK * kSlots * 8 + 15) / 16 * 16;
  static constexpr int kListAt = kPartialAt + 2 * 2 * kWK * kPartial * 4;
  static constexpr int kSmem = kListAt + sizeof(ExpertList<kMaxItems>);
  static_assert(kWarpLeaves * kWK == kLeaves, "warps take equal runs of leaves");
};

K3_DEVICE void store_partial(float* partial, int token_stride, const float (&sum)[4]) {
  K3_UNROLL
  for (int i = 0; i < 4; ++i) partial[(lane_id() % 4 * 2 + i % 2) * token_stride + lane_id() / 4 + i / 2 * 8] = sum[i];
}

// w: [expert][gate tile 0, up tile 0, gate tile 1, ...][leaf]. epilogue(item, row, gate, up): row of the expert's gate or up.
// x: moe latent [row][stride]; top_k turns an item into its row.
template <class S, class Epilogue>
K3_DEVICE void expert_up_product(const u8* w, int tile_pairs, const bf16* x, int stride, int top_k,
                                 const ExpertList<S::kMaxItems>* from, u8* smem, Epilogue&& epilogue) {
  CopyRing<S::kSlots, S::kChunk> ring(smem, (u64*)(smem + S::kBarrierAt));
  float* partials = (float*)(smem + S::kPartialAt);   // [parity][gate, up][leaf warp][token][row]
  auto& list = *(ExpertList<S::kMaxItems>*)(smem + S::kListAt);
  grid_wait();
  grid_launch_next();
  load_list(list, from, S::kThreads);
  int units = list.entries * tile_pairs;   // a unit: a pair of tiles of an entry
  int unit = int((long long)units * blockIdx.x / gridDim.x), end = int((long long)units * (blockIdx.x + 1) / gridDim.x);
  int first_leaf = warp_id() * S::kWarpLeaves;
  int ahead = unit * 2, last = end * 2;    // next tile to copy
  auto issue = [&](int to) {
    if (ahead >= last) return;
    int entry = ahead / (2 * tile_pairs), tile = ahead - entry * 2 * tile_pairs;
    size_t at = (size_t(entry_expert(list.entry[entry])) * 2 * tile_pairs + tile) * S::kLeaves + first_leaf;
    ring.issue(to, w + at * S::kLeafBytes);
    ++ahead;
  };
  if (lane_id() == 0)
    for (int s = 0; s < S::kSlots; ++s) issue(s);
  uint4 held[S::kWarpLeaves * S::kGroups];
  int entry = -1, first = 0, count = 0;
#pragma unroll 1
  for (; unit < end; ++unit) {
    if (entry != unit / tile_pairs) {
      entry = unit / tile_pairs;
      first = entry_first(list.entry[entry]), count = entry_first(list.entry[entry + 1]) - first;
      int token = lane_id() / 4;
      const uint4* mine = (const uint4*)(x + size_t(token < count ? list.item[first + token] / top_k : 0) * stride + first_leaf * S::kGroups * 32) + lane_id() % 4;
      K3_UNROLL
      for (int i = 0; i < S::kWarpLeaves * S::kGroups; ++i) held[i] = token < count ? load_activations(mine + i * 4) : uint4{0, 0, 0, 0};
      K3_UNROLL
      for (int i = 0; i < S::kWarpLeaves * S::kGroups; ++i) held[i] = scale_tokens(held[i]);
    }
    float sum[2][4];
    K3_UNROLL
    for (int t = 0; t < 2; ++t) {
      mxfp4_leaves<S::kGroups, 0, S::kWarpLeaves>(sum[t], ring.take(), held);
      __syncwarp();
      if (lane_id() == 0) issue(ring.slot);
      ring.next();
    }
    float* partial = partials + unit % 2 * 2 * S::kWK * S::kPartial;
    K3_UNROLL
    for (int t = 0; t < 2; ++t) store_partial(partial + (t * S::kWK + warp_id()) * S::kPartial, S::kTokenStride, sum[t]);
    __syncthreads();   // whoever finished the unit before the last is here, so one barrier serves two buffers
    // Other warps finish each time, so that none falls behind.
    for (int i = (int(threadIdx.x) + unit * kWarpSize) % S::kThreads; i < count * kTileRows; i += S::kThreads) {
      const float* p = partial + i / kTileRows * S::kTokenStride + i % kTileRows;
      epilogue(list.item[first + i / kTileRows], (unit - entry * tile_pairs) * kTileRows + i % kTileRows,
               tree_sum<S::kWK>(p, S::kPartial), tree_sum<S::kWK>(p + S::kWK * S::kPartial, S::kPartial));
    }
  }
}

// ---- w2: a row's experts summed in rising id inside a leaf, then the tree over leaves ----
//   kLeaves, kGroups  of this rank
//   kRows             rows of a step at most
//   kTiles            16-row tiles of a block: neighbours, which share the loads of x and lie in one copy where there is one leaf
//   kWindow           items whose results are kept before they are added
template <int kLeaves_, int kGroups_, int kMaxItems_, int kRows_, int kWarps_ = 16, int kTiles_ = 2, int kRing_ = 106 * 1024, int kWindow_ = 512>
struct ExpertDownShape {
  static constexpr int kLeaves = kLeaves_, kGroups = kGroups_, kMaxItems = kMaxItems_, kRows = kRows_, kWarps = kWarps_, kTiles = kTiles_;
  static constexpr int kThreads = kWarps * kWarpSize, kLeafBytes = mxfp4_leaf_bytes(kGroups), kChunk = kTiles * kLeafBytes;
  static constexpr int kSlots = max_of(1, kRing_ / (kWarps * kChunk)), kRowsOut = kTiles * kTileRows, kWindow = min_of(kMaxItems, kWindow_);
  static constexpr int kBarrierAt = kWarps * kSlots * kChunk;
  static constexpr int kResultAt = (kBarrierAt + kWarps * kSlots * 8 + 15) / 16 * 16;
  static constexpr int kSumAt = kResultAt + kWindow * kRowsOut * 4;
  static constexpr int kWeightAt = kSumAt + kLeaves * kRows * kRowsOut * 4;
  static constexpr int kListAt = kWeightAt + kMaxItems * 4;
  static constexpr int kPlaceAt = kListAt + (sizeof(ExpertList<kMaxItems>) + 3) / 4 * 4;
  static constexpr int kSmem = kPlaceAt + 2 * kMaxItems * 2;
  static_assert(kMaxItems < 0xffff && (kWindow == kMaxItems || kWindow > kEntryTokens), "a window holds an entry");
};

// Blocks of kTiles row tiles; those past the last tile do nothing. w: [expert][tile][leaf]. x: activations [item][stride].
// weights: of every item. epilogue(row, token, value) runs for every token below `rows`; one without experts gets zero.
// Warps take entries in turn and leave each item's result in shared memory; no barrier until a window of entries is done. Then every
// token adds its own items of the window in rising expert id.
template <class S, class Epilogue>
K3_DEVICE void expert_down_product(const u8* w, int tiles, const bf16* x, int stride, const float* weights, int top_k, int rows,
                                   const ExpertList<S::kMaxItems>* from, u8* smem, Epilogue&& epilogue) {
  constexpr u16 kNone = 0xffff;
  CopyRing<S::kSlots, S::kChunk> ring(smem, (u64*)(smem + S::kBarrierAt));
  float* results = (float*)(smem + S::kResultAt);    // [position in the list, from the window's first][row of the tiles]
  float* sums = (float*)(smem + S::kSumAt);          // [leaf][row of the step][row of the tiles]
  float* weight = (float*)(smem + S::kWeightAt);     // [position]
  auto& list = *(ExpertList<S::kMaxItems>*)(smem + S::kListAt);
  u16* place = (u16*)(smem + S::kPlaceAt);           // [item] -> position; kNone: the row is not live
  u16* order = place + S::kMaxItems;                 // [row][rank] -> position
  const int items = rows * top_k, tile = int(blockIdx.x) * S::kTiles;
  if (tile >= tiles) return;
  for (int i = threadIdx.x; i < items; i += S::kThreads) place[i] = order[i] = kNone;
  for (int i = threadIdx.x; i < S::kLeaves * S::kRows * S::kRowsOut; i += S::kThreads) sums[i] = 0.f;
  grid_wait();
  grid_launch_next();
  load_list(list, from, S::kThreads);
  const int entries = list.entries;
  struct Turn { int entry, leaf; } now{warp_id(), 0}, ahead{warp_id(), 0};   // of this warp; leaf == kLeaves: done
  auto settle = [&](Turn& t) { if (t.entry >= entries) t.entry = warp_id(), ++t.leaf; };
  auto issue = [&](int to) {
    if (ahead.leaf >= S::kLeaves) return;
    const u8* source = w + (size_t(entry_expert(list.entry[ahead.entry])) * tiles * S::kLeaves + ahead.leaf) * S::kLeafBytes;
    barrier_expect(ring.full + to, S::kChunk);
    if (S::kLeaves == 1 && tile + S::kTiles <= tiles) bulk_copy(ring.slots + to * S::kChunk, source + size_t(tile) * S::kLeafBytes, S::kChunk, ring.full + to);
    else
      for (int t = 0; t < S::kTiles; ++t)
        bulk_copy(ring.slots + to * S::kChunk + t * S::kLeafBytes, source + size_t(min_of(tile + t, tiles - 1)) * S::kLeaves * S::kLeafBytes,
                  S::kLeafBytes, ring.full + to);
    ahead.entry += S::kWarps;
    settle(ahead);
  };
  auto load_x = [&](uint4 (&to)[S::kGroups], const Turn& t) {
    int token = lane_id() / 4, first = 0, count = 0;
    if (t.leaf < S::kLeaves) first = entry_first(list.entry[t.entry]), count = entry_first(list.entry[t.entry + 1]) - first;
    const uint4* mine = (const uint4*)(x + size_t(token < count ? list.item[first + token] : 0) * stride + t.leaf * S::kGroups * 32) + lane_id() % 4;
    K3_UNROLL
    for (int i = 0; i < S::kGroups; ++i) to[i] = token < count ? load_activations(mine + i * 4) : uint4{0, 0, 0, 0};
  };
  if (warp_id() >= entries) now.leaf = ahead.leaf = S::kLeaves;
  if (lane_id() == 0)
    for (int s = 0; s < S::kSlots; ++s) issue(s);
  uint4 next[S::kGroups];
  load_x(next, now);
  for (int i = threadIdx.x; i < list.items; i += S::kThreads) {
    place[list.item[i]] = u16(i);
    weight[i] = *(volatile const float*)(weights + list.item[i]);
  }
  __syncthreads();
  // Positions rise with the expert, so an item's rank is how many items of its row come before it.
  for (int i = threadIdx.x; i < items; i += S::kThreads) {
    int row = i / top_k, rank = 0;
    for (int p = 0; p < top_k; ++p) rank += place[row * top_k + p] < place[i];
    if (place[i] != kNone) order[row * top_k + rank] = place[i];
  }
#pragma unroll 1
  for (int leaf = 0; leaf < S::kLeaves; ++leaf) {
    int entry = warp_id();
#pragma unroll 1
    for (int begin = 0, end; begin < entries; begin = end) {
      int base = entry_first(list.entry[begin]);
      end = entries;
      if (S::kWindow < S::kMaxItems && list.items - base > S::kWindow) {   // the last entry that ends inside the window
        int low = begin + 1;
        while (low < end) {
          int middle = (low + end + 1) / 2;
          if (entry_first(list.entry[middle]) - base <= S::kWindow) low = middle;
          else end = middle - 1;
        }
      }
#pragma unroll 1
      for (; entry < end; entry += S::kWarps) {
        uint4 held[S::kGroups];
        K3_UNROLL
        for (int i = 0; i < S::kGroups; ++i) held[i] = scale_tokens(next[i]);
        now.entry += S::kWarps;
        settle(now);
        load_x(next, now);
        float sum[S::kTiles][4];
        const u8* chunk = ring.take();
        K3_UNROLL
        for (int t = 0; t < S::kTiles; ++t) mxfp4_leaf<S::kGroups>(sum[t], chunk + t * S::kLeafBytes, held);
        __syncwarp();
        if (lane_id() == 0) issue(ring.slot);
        ring.next();
        int first = entry_first(list.entry[entry]), count = entry_first(list.entry[entry + 1]) - first;
        K3_UNROLL
        for (int i = 0; i < 2; ++i) {
          int token = lane_id() % 4 * 2 + i;
          if (token >= count) continue;
          float* to = results + (first + token - base) * S::kRowsOut + lane_id() / 4;
          K3_UNROLL
          for (int t = 0; t < S::kTiles; ++t) to[t * kTileRows] = sum[t][i], to[t * kTileRows + 8] = sum[t][i + 2];
        }
      }
      __syncthreads();
      int after = entry_first(list.entry[end]);
      for (int i = threadIdx.x; i < rows * S::kRowsOut; i += S::kThreads) {
        int token = i / S::kRowsOut;
        float sum = sums[leaf * S::kRows * S::kRowsOut + i];
        for (int rank = 0; rank < top_k; ++rank) {
          int at = order[token * top_k + rank];
          if (at >= after) break;
          if (at >= base) sum = fmaf(weight[at], results[(at - base) * S::kRowsOut + i % S::kRowsOut], sum);
        }
        sums[leaf * S::kRows * S::kRowsOut + i] = sum;
      }
      __syncthreads();
    }
  }
  for (int i = threadIdx.x; i < rows * S::kRowsOut; i += S::kThreads) {
    int row = tile * kTileRows + i % S::kRowsOut;
    if (row < tiles * kTileRows) epilogue(row, i / S::kRowsOut, tree_sum<S::kLeaves>(sums + i, S::kRows * S::kRowsOut));
  }
}
