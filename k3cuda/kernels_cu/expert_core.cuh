// Routed experts, weight-major: every expert that any row chose is read once, for all rows that chose it.
// A list names them: entries in rising expert id, each with at most eight (row, place) items, in wide steps more; an expert with more has
// several entries side by side, which share its bytes through the L2.
#pragma once
#include "mxfp4.cuh"

constexpr int kEntryTokens = kTokenTile;

// entry[i] = expert | first item << 16, entry[entries] = items << 16; item = row * top_k + place.
template <int kMaxItems_>
struct ExpertList {
  static constexpr int kMaxItems = kMaxItems_, from = 0;
  int entries, items;
  u32 entry[kMaxItems + 1];
  u16 item[kMaxItems];
};

K3_DEVICE int entry_expert(u32 e) { return e & 0xffff; }
K3_DEVICE int entry_first(u32 e) { return e >> 16; }

// Every thread of the block copies all of a list, whatever it holds, so that no load waits for another; ends with the block in step.
template <class List>
K3_DEVICE void load_list(List& to, const List* from) {
  static_assert(sizeof(List) % 4 == 0, "copied in words");
  for (int i = threadIdx.x; i < int(sizeof(List) / 4); i += blockDim.x) ((u32*)&to)[i] = ((volatile const u32*)from)[i];
  __syncthreads();
}

// A list's units that a block works on: `blocks`, all of the grid, take equal runs.
struct UnitRun { int begin, end; };
K3_DEVICE UnitRun unit_run(int units, int blocks) {
  const int per = units / blocks, more = units % blocks, begin = int(blockIdx.x) * per + min_of(blockIdx.x, more);
  return {begin, begin + per + (int(blockIdx.x) < more)};
}

constexpr int aligned16(int n) { return (n + 15) / 16 * 16; }

// A warp's slots for bulk copies whose addresses are known only one at a time: from `smem` on, their barriers from `barriers` on. kKept: registers are
// there for where they begin.
template <int kSlots, int kBytes, bool kKept = true>
struct CopyRing {
  u8 *slots, *full;
  K3_DEVICE CopyRing(u8* smem, u8* barriers) : slots(smem + at<kSlots * kBytes>()), full(barriers + at<kSlots * 8>()) {
    if (lane_id() < kSlots) {
      barrier_init(barrier(lane_id()), 1);
      barrier_fence_init();
    }
    __syncwarp();
  }
  template <int kOwn> static K3_DEVICE int at() { return kKept ? kept(warp_id() * kOwn) : warp_id() * kOwn; }
  K3_DEVICE u64* barrier(int slot) const { return (u64*)(full + slot * 8); }
  K3_DEVICE void expect(int slot) { barrier_expect(barrier(slot), kBytes); }
  K3_DEVICE void copy(int slot, int at, const u8* source, int bytes) { bulk_copy(slots + slot * kBytes + at, source, bytes, barrier(slot)); }
  K3_DEVICE void fill(int slot, const u8* source) {   // one thread
    expect(slot);
    copy(slot, 0, source, kBytes);
  }
  K3_DEVICE const u8* take(int slot, u32 parity) const {
    barrier_wait(barrier(slot), parity);
    return slots + slot * kBytes;
  }
};

// ---- w1 and w3: rows of the latent in, gate and up out ----
//   kLeaves, kGroups  leaves of K, and 32-groups in each
//   kTokens           items of an entry, at most
//   kWK               warps of a block, along leaves
//   kScratch          bytes of shared memory that making the list takes
template <int kLeaves_, int kGroups_, class List_, int kTokens_ = kEntryTokens, int kWK_ = 8, int kRing_ = 64 * 1024, int kScratch_ = 0>
struct ExpertUpShape {
  typedef List_ List;
  static constexpr int kLeaves = kLeaves_, kGroups = kGroups_, kTokens = kTokens_, kWK = kWK_, kThreads = kWK * kWarpSize;
  static constexpr int kWarpLeaves = kLeaves / kWK, kLeafBytes = mxfp4_leaf_bytes(kGroups), kChunk = kWarpLeaves * kLeafBytes;
  static constexpr int kTokenTiles = (kTokens + kTokenTile - 1) / kTokenTile;   // they share the expansion of a weight
  static constexpr int kUnits = max_of(1, min_of(kWarpSize / 2, kRing_ / (2 * kWK * kChunk))), kSlots = 2 * kUnits;   // on their way
  static constexpr int kTokenStride = kTileRows + 4, kPartial = kTokens * kTokenStride;   // floats
  static constexpr int kBuffers = 2;                                                      // units whose leaf sums are on their way
  static constexpr int kBarrierAt = kWK * kSlots * kChunk, kStoredAt = kBarrierAt + kWK * kSlots * 8;
  static constexpr int kPartialAt = aligned16(kStoredAt + 2 * kBuffers * 8);
  static constexpr int kListAt = kPartialAt + aligned16(max_of(kBuffers * 2 * kWK * kPartial * 4, kScratch_));
  static constexpr int kSmem = kListAt + sizeof(List);
  static_assert(kWarpLeaves * kWK == kLeaves, "warps take equal runs of leaves");
  static_assert(kTokenTiles == 1 || kWarpLeaves <= 2, "two leaves are one sum");
};

// w: [expert][gate tile 0, up tile 0, gate tile 1, ...][leaf]. epilogue(item, row, gate, up): row of the expert's gate or up.
// x: moe latent [row][stride]; top_k turns an item into its row. make_list(list, scratch) waits for what this kernel needs, makes the
// list, and ends with the block in step.
// A unit is a pair of tiles of an entry; `blocks`, all of the grid, take equal runs of units. Warps never wait for one another but through
// two buffers of leaf sums: of every unit other warps add them and finish.
template <class S, class MakeList, class Epilogue>
K3_DEVICE void expert_up_product(const u8* w, int tile_pairs, const bf16* x, int stride, int top_k, int blocks, u8* smem, MakeList&& make_list,
                                 Epilogue&& epilogue) {
  constexpr int kTileBytes = S::kWK * S::kChunk;
  CopyRing<S::kSlots, S::kChunk, S::kTokenTiles == 1> ring(smem, smem + S::kBarrierAt);
  u64 *stored = (u64*)(smem + S::kStoredAt), *taken = stored + S::kBuffers;   // leaf sums of a buffer: all there, and added
  u8* partials = smem + S::kPartialAt;                                        // [buffer][gate, up][leaf warp][token][row]
  auto& list = *(typename S::List*)(smem + S::kListAt);
  if (threadIdx.x < S::kBuffers) {
    barrier_init(stored + threadIdx.x, S::kWK * kWarpArrivals);
    barrier_init(taken + threadIdx.x, S::kWK * kWarpArrivals);
  }
  make_list(list, smem + S::kPartialAt);
  const UnitRun run = unit_run(list.entries * tile_pairs, blocks);
  const int begin = run.begin, end = run.end;
  auto source = [&](int unit) -> const u8* {   // of its gate tile
    const int entry = unit / tile_pairs;
    return w + size_t((entry_expert(list.entry[entry - list.from]) * tile_pairs + unit - entry * tile_pairs) * 2 * S::kWK + warp_id()) * S::kChunk;
  };
  // One or two rows: a block has a unit or two, so its first inputs are not to stand behind all of its copies. Of more rows it makes nothing faster.
  constexpr int kAtOnce = S::kTokens <= 2 ? 1 : S::kSlots;
  auto start = [&](int from, int to) {
    const int slot = lane_id();
    if (slot >= from && slot < to && begin + slot / 2 < end) ring.fill(slot, source(begin + slot / 2) + slot % 2 * kTileBytes);
    __syncwarp();
  };
  start(0, kAtOnce);
  // What every tile needs again is kept where registers hold it: made anew it was a sixth of a tile's instructions.
  auto keep = [](int v) { return S::kTokenTiles == 1 ? kept(v) : v; };
  auto put_at = [] { return (warp_id() * S::kPartial + lane_id() % 4 * 2 * S::kTokenStride + lane_id() / 4) * 4; };
  const int kept_put = keep(put_at());
  const LeafLane here = LeafLane::here(), at = {keep(here.words_at), keep(here.odd_at), keep(here.scales_at)};
  uint4 held[S::kTokenTiles][S::kWarpLeaves * S::kGroups];
#pragma unroll 1
  for (int turn = 0; begin + turn < end; ++turn) {
    const int entry = (begin + turn) / tile_pairs, pair = begin + turn - entry * tile_pairs;
    const u32* own = list.entry + entry - list.from;
    const int first = entry_first(own[0]), count = entry_first(own[1]) - first;
    if (turn == 0 || pair == 0) {   // another entry
      // Columns beyond the entry's items are the last item's once more: nobody looks at them.
      K3_UNROLL
      for (int n = 0; n < S::kTokenTiles; ++n) {
        const u32 row = list.item[first + min_of(n * kTokenTile + lane_id() / 4, count - 1)] / top_k;
        const uint4* mine = (const uint4*)x + (row * u32(stride) + warp_id() * S::kWarpLeaves * S::kGroups * 32) / 8 + lane_id() % 4;
        K3_UNROLL
        for (int i = 0; i < S::kWarpLeaves * S::kGroups; ++i) held[n][i] = load_activations(mine + i * 4);
      }
      if (kAtOnce < S::kSlots && turn == 0) start(kAtOnce, S::kSlots);
      K3_UNROLL
      for (int n = 0; n < S::kTokenTiles; ++n)
        K3_UNROLL
        for (int i = 0; i < S::kWarpLeaves * S::kGroups; ++i) held[n][i] = scale_tokens(held[n][i]);
    }
    const int buffer = turn % S::kBuffers;
    const u32 parity = turn / S::kBuffers & 1;
    auto ahead = [&] { return begin + turn + S::kUnits < end ? source(begin + turn + S::kUnits) : nullptr; };
    const u8* next = S::kTokenTiles == 1 ? ahead() : nullptr;
#pragma unroll 1
    for (int t = 0; t < 2; ++t) {   // not unrolled: x and one tile fill the registers
      float sum[S::kTokenTiles][4];
      const int slot = turn % S::kUnits * 2 + t;
      const u8* weights = ring.take(slot, turn / S::kUnits & 1);
      auto put = [&](bool add) {
        u8* to = partials + (S::kTokenTiles == 1 ? kept_put : put_at()) + (buffer * 2 + t) * (S::kWK * S::kPartial * 4);
        K3_UNROLL
        for (int n = 0; n < S::kTokenTiles; ++n) {
          if (n && count <= n * kTokenTile) break;
          K3_UNROLL
          for (int i = 0; i < 4; ++i) {
            const int token = n * kTokenTile + i % 2;   // of this lane's first column
            float& at = ((float*)to)[token * S::kTokenStride + i / 2 * 8];
            if (token + lane_id() % 4 * 2 < S::kTokens) at = add ? at + sum[n][i] : sum[n][i];
          }
        }
      };
      if constexpr (S::kTokenTiles == 1) {
        mxfp4_leaves<S::kGroups, 0, S::kWarpLeaves>(sum[0], weights, held[0], at);
        __syncwarp();
        if (elected() && next) ring.fill(slot, next + t * kTileBytes);
        if (t == 0 && turn >= S::kBuffers) barrier_wait(taken + buffer, parity ^ 1);
        put(false);
      } else {   // x fills the registers: the first leaf's sums wait for the second's in shared memory
        const int tiles = (count + kTokenTile - 1) / kTokenTile;
        mxfp4_of_tiles<S::kGroups, 0>(sum, weights, held, tiles);
        if (t == 0 && turn >= S::kBuffers) barrier_wait(taken + buffer, parity ^ 1);
        put(false);
        if constexpr (S::kWarpLeaves > 1) {
          mxfp4_of_tiles<S::kGroups, 1>(sum, weights, held, tiles);
          put(true);
        }
        __syncwarp();
        if (elected() && (next = ahead())) ring.fill(slot, next + t * kTileBytes);
      }
    }
    __syncwarp();
    warp_arrive(stored + buffer, lane_id());
    const int i = (warp_id() + turn) % S::kWK * kWarpSize + lane_id();   // of the unit's values, this thread's first
    if (i - lane_id() < count * kTileRows) {
      barrier_wait(stored + buffer, parity);
#pragma unroll 1
      for (int v = i; v < count * kTileRows; v += S::kThreads) {
        const float* p = (const float*)partials + buffer * 2 * S::kWK * S::kPartial + v / kTileRows * S::kTokenStride + v % kTileRows;
        const float gate = tree_sum<S::kWK>(p, S::kPartial);
        if (S::kTokenTiles > 1) asm volatile("" ::: "memory");   // x fills the registers: not the loads of both at once
        epilogue(list.item[first + v / kTileRows], pair * kTileRows + v % kTileRows, gate, tree_sum<S::kWK>(p + S::kWK * S::kPartial, S::kPartial));
      }
      __syncwarp();
    }
    warp_arrive(taken + buffer, lane_id());
  }
}
