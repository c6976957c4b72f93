// Routed experts, weight-major: every expert that any row chose is read once, for all rows that chose it.
// A list names them: entries in rising expert id, each with at most eight (row, place) items; an expert with more has several
// entries side by side, which share its bytes through the L2.
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

// A warp's slots for bulk copies whose addresses are known only one at a time. Copy k of the warp goes to slot k % kSlots.
template <int kSlots, int kBytes>
struct CopyRing {
  u8* slots;
  u64* full;
  K3_DEVICE CopyRing(u8* s, u64* bars) : slots(s + warp_id() * kSlots * kBytes), full(bars + warp_id() * kSlots) {
    if (lane_id() < kSlots) {
      barrier_init(full + lane_id(), 1);
      barrier_fence_init();
    }
    __syncwarp();
  }
  K3_DEVICE void expect(int k) { barrier_expect(full + k % kSlots, kBytes); }
  K3_DEVICE void copy(int k, int at, const u8* source, int bytes) { bulk_copy(slots + k % kSlots * kBytes + at, source, bytes, full + k % kSlots); }
  // One thread; from null it does nothing.
  K3_DEVICE void fill(int k, const u8* source) {
    if (!source) return;
    expect(k);
    copy(k, 0, source, kBytes);
  }
  K3_DEVICE const u8* take(int k) {
    barrier_wait(full + k % kSlots, k / kSlots & 1);
    return slots + k % kSlots * kBytes;
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
  static constexpr int kSlots = max_of(1, min_of(kWarpSize, kRing_ / (kWK * kChunk)));
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
  CopyRing<S::kSlots, S::kChunk> ring(smem, (u64*)(smem + S::kBarrierAt));
  u64 *stored = (u64*)(smem + S::kStoredAt), *taken = stored + S::kBuffers;   // leaf sums of a buffer: all there, and added
  float* partials = (float*)(smem + S::kPartialAt);                           // [buffer][gate, up][leaf warp][token][row]
  auto& list = *(typename S::List*)(smem + S::kListAt);
  if (threadIdx.x < S::kBuffers) {
    barrier_init(stored + threadIdx.x, S::kWK * kWarpArrivals);
    barrier_init(taken + threadIdx.x, S::kWK * kWarpArrivals);
  }
  make_list(list, smem + S::kPartialAt);
  const UnitRun run = unit_run(list.entries * tile_pairs, blocks);
  const int begin = run.begin, end = run.end;
  auto source = [&](int k) -> const u8* {   // of a tile of this block, counted from its first; null: there is none
    int at = begin * 2 + k;
    if (at >= end * 2) return nullptr;
    int entry = at / (2 * tile_pairs), tile = at - entry * 2 * tile_pairs;
    return w + size_t((entry_expert(list.entry[entry - list.from]) * 2 * tile_pairs + tile) * S::kWK + warp_id()) * S::kChunk;
  };
  if (lane_id() < S::kSlots) ring.fill(lane_id(), source(lane_id()));
  __syncwarp();
  uint4 held[S::kTokenTiles][S::kWarpLeaves * S::kGroups];
#pragma unroll 1
  for (int turn = 0; begin + turn < end; ++turn) {
    const int entry = (begin + turn) / tile_pairs, pair = begin + turn - entry * tile_pairs, at = entry - list.from;
    const int first = entry_first(list.entry[at]), count = entry_first(list.entry[at + 1]) - first;
    if (turn == 0 || pair == 0) {   // another entry
      // Columns beyond the entry's items are the last item's once more: nobody looks at them.
      K3_UNROLL
      for (int n = 0; n < S::kTokenTiles; ++n) {
        const u32 row = list.item[first + min_of(n * kTokenTile + lane_id() / 4, count - 1)] / top_k;
        const uint4* mine = (const uint4*)x + (row * u32(stride) + warp_id() * S::kWarpLeaves * S::kGroups * 32) / 8 + lane_id() % 4;
        K3_UNROLL
        for (int i = 0; i < S::kWarpLeaves * S::kGroups; ++i) held[n][i] = load_activations(mine + i * 4);
      }
      K3_UNROLL
      for (int n = 0; n < S::kTokenTiles; ++n)
        K3_UNROLL
        for (int i = 0; i < S::kWarpLeaves * S::kGroups; ++i) held[n][i] = scale_tokens(held[n][i]);
    }
    const int buffer = turn % S::kBuffers;
    const u32 parity = turn / S::kBuffers & 1;
    float* partial = partials + buffer * 2 * S::kWK * S::kPartial;
#pragma unroll 1
    for (int t = 0; t < 2; ++t) {   // not unrolled: x and one tile fill the registers
      float sum[S::kTokenTiles][4];
      const int k = 2 * turn + t;
      const u8* next = source(k + S::kSlots);
      const u8* weights = ring.take(k);
      float* to = partial + (t * S::kWK + warp_id()) * S::kPartial + lane_id() / 4;
      auto put = [&](bool add) {
        K3_UNROLL
        for (int n = 0; n < S::kTokenTiles; ++n) {
          if (n && count <= n * kTokenTile) break;
          K3_UNROLL
          for (int i = 0; i < 4; ++i) {
            const int token = n * kTokenTile + lane_id() % 4 * 2 + i % 2;
            float& at = to[token * S::kTokenStride + i / 2 * 8];
            if (token < S::kTokens) at = add ? at + sum[n][i] : sum[n][i];
          }
        }
      };
      if constexpr (S::kTokenTiles == 1) {
        mxfp4_leaves<S::kGroups, 0, S::kWarpLeaves>(sum[0], weights, held[0]);
        __syncwarp();
        if (lane_id() == 0) ring.fill(k + S::kSlots, next);
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
        if (lane_id() == 0) ring.fill(k + S::kSlots, next);
      }
    }
    __syncwarp();
    warp_arrive(stored + buffer);
    const int i = (warp_id() + turn) % S::kWK * kWarpSize + lane_id();   // of the unit's values, this thread's first
    if (i - lane_id() < count * kTileRows) {
      barrier_wait(stored + buffer, parity);
#pragma unroll 1
      for (int v = i; v < count * kTileRows; v += S::kThreads) {
        const float* p = partial + v / kTileRows * S::kTokenStride + v % kTileRows;
        const float gate = tree_sum<S::kWK>(p, S::kPartial);
        if (S::kTokenTiles > 1) asm volatile("" ::: "memory");   // x fills the registers: not the loads of both at once
        epilogue(list.item[first + v / kTileRows], pair * kTileRows + v % kTileRows, gate, tree_sum<S::kWK>(p + S::kWK * S::kPartial, S::kPartial));
      }
      __syncwarp();
    }
    warp_arrive(taken + buffer);
  }
}

// ---- w2: a row's experts summed in rising id inside a leaf, then the tree over leaves ----
//   kLeaves, kGroups  of this rank
//   kRows, kTopK      rows of a step at most, experts of each
//   kTiles            16-row tiles of a block: neighbours, which share the loads of x and lie in one copy where there is one leaf
//   kWindow           items whose results are kept before they are added
//   kScratch          bytes of shared memory that making the list takes
template <int kLeaves_, int kGroups_, class List_, int kRows_, int kTopK_, int kWarps_ = 16, int kTiles_ = 2, int kRing_ = 106 * 1024, int kWindow_ = 512, int kScratch_ = 0>
struct ExpertDownShape {
  typedef List_ List;
  static constexpr int kLeaves = kLeaves_, kGroups = kGroups_, kRows = kRows_, kTopK = kTopK_, kWarps = kWarps_, kTiles = kTiles_;
  static constexpr int kMaxItems = List::kMaxItems, kThreads = kWarps * kWarpSize, kLeafBytes = mxfp4_leaf_bytes(kGroups), kChunk = kTiles * kLeafBytes;
  static constexpr int kSlots = max_of(1, min_of(kWarpSize, kRing_ / (kWarps * kChunk))), kRowsOut = kTiles * kTileRows, kWindow = min_of(kMaxItems, kWindow_);
  static constexpr bool kOnce = kLeaves == 1 && kWindow == kMaxItems;   // results are added once, and finished at the same time
  static constexpr int kBarrierAt = kWarps * kSlots * kChunk;
  static constexpr int kResultAt = aligned16(kBarrierAt + kWarps * kSlots * 8);
  static constexpr int kSumAt = kResultAt + aligned16(max_of(kWindow * kRowsOut * 4, kScratch_));
  static constexpr int kWeightAt = kSumAt + (kOnce ? 0 : kLeaves * kRows * kRowsOut * 4);
  static constexpr int kListAt = kWeightAt + kMaxItems * 4;
  static constexpr int kPlaceAt = kListAt + (sizeof(List) + 3) / 4 * 4;
  static constexpr int kSmem = kPlaceAt + 2 * kMaxItems * 2;
  static_assert(kMaxItems == kRows * kTopK && kMaxItems < 0xffff && (kWindow == kMaxItems || kWindow > kEntryTokens), "a window holds an entry");
};

// Blocks of kTiles row tiles; those past the last tile do nothing. w: [expert][tile][leaf]. x: activations [item][stride].
// weights: of every item. epilogue(row, token, value) runs for every token below `rows`; one without experts gets zero.
// make_list(list, scratch) makes the list and ends with the block in step; list and weights must not depend on the kernel before: x is
// read only behind ready(), when the ring is filling and everything else is prepared.
// Warps take entries in turn and leave each item's result in shared memory; no barrier until a window of entries is done. Then every
// token adds its own items of the window in rising expert id.
template <class S, class MakeList, class Ready, class Epilogue>
K3_DEVICE void expert_down_product(const u8* w, int tiles, const bf16* x, int stride, const float* weights, int rows, u8* smem,
                                   MakeList&& make_list, Ready&& ready, Epilogue&& epilogue) {
  constexpr u16 kNone = 0xffff;
  CopyRing<S::kSlots, S::kChunk> ring(smem, (u64*)(smem + S::kBarrierAt));
  float* results = (float*)(smem + S::kResultAt);    // [position in the list, from the window's first][row of the tiles]
  float* sums = (float*)(smem + S::kSumAt);          // [leaf][row of the step][row of the tiles]
  float* weight = (float*)(smem + S::kWeightAt);     // [row][rank]
  auto& list = *(typename S::List*)(smem + S::kListAt);
  u16* place = (u16*)(smem + S::kPlaceAt);           // [item] -> position; kNone: the row is not live
  u16* order = place + S::kMaxItems;                 // [row][rank] -> position
  const int items = rows * S::kTopK, tile = int(blockIdx.x) * S::kTiles;
  if (tile >= tiles) return;
  for (int i = threadIdx.x; i < items; i += S::kThreads) place[i] = order[i] = kNone;
  make_list(list, smem + S::kResultAt);
  // This warp's turns: its entries leaf by leaf.
  const int entries = list.entries, own = entries > warp_id() ? (entries - warp_id() + S::kWarps - 1) / S::kWarps : 0, turns = own * S::kLeaves;
  auto leaf_of = [&](int turn) { return S::kLeaves == 1 ? 0 : turn / own; };
  auto entry_of = [&](int turn) { return warp_id() + (turn - leaf_of(turn) * own) * S::kWarps; };
  auto issue = [&](int turn) {
    if (turn >= turns) return;
    const u8* source = w + (size_t(entry_expert(list.entry[entry_of(turn)])) * tiles * S::kLeaves + leaf_of(turn)) * S::kLeafBytes;
    ring.expect(turn);
    if (S::kLeaves == 1 && tile + S::kTiles <= tiles) ring.copy(turn, 0, source + size_t(tile) * S::kLeafBytes, S::kChunk);
    else
      for (int t = 0; t < S::kTiles; ++t)
        ring.copy(turn, t * S::kLeafBytes, source + size_t(min_of(tile + t, tiles - 1)) * S::kLeaves * S::kLeafBytes, S::kLeafBytes);
  };
  auto load_x = [&](uint4 (&to)[S::kGroups], int turn) {
    if (turn >= turns) return;
    // Columns beyond the entry's items are the last item's once more: nobody looks at them.
    const int entry = entry_of(turn), first = entry_first(list.entry[entry]), last = entry_first(list.entry[entry + 1]) - 1;
    const uint4* mine = (const uint4*)x + (u32(list.item[min_of(first + lane_id() / 4, last)]) * u32(stride) + leaf_of(turn) * S::kGroups * 32) / 8 + lane_id() % 4;
    K3_UNROLL
    for (int i = 0; i < S::kGroups; ++i) to[i] = load_activations(mine + i * 4);
  };
  if (lane_id() < S::kSlots) issue(lane_id());
  __syncwarp();
  for (int i = threadIdx.x; i < list.items; i += S::kThreads) place[list.item[i]] = u16(i);
  __syncthreads();
  // Positions rise with the expert, so an item's rank is how many items of its row come before it.
  for (int i = threadIdx.x; i < items; i += S::kThreads) {
    if (place[i] == kNone) continue;
    int row = i / S::kTopK, rank = 0;
    K3_UNROLL
    for (int p = 0; p < S::kTopK; ++p) rank += place[row * S::kTopK + p] < place[i];
    order[row * S::kTopK + rank] = place[i];
    weight[row * S::kTopK + rank] = *(volatile const float*)(weights + i);
  }
  ready();
  uint4 next[S::kGroups];
  int turn = 0;
  load_x(next, turn);
#pragma unroll 1
  for (int leaf = 0; leaf < S::kLeaves; ++leaf) {
    int entry = warp_id();
#pragma unroll 1
    for (int begin = 0, end; begin < entries || begin == 0; begin = end) {
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
        load_x(next, turn + 1);
        float sum[S::kTiles][4];
        const u8* chunk = ring.take(turn);
        K3_UNROLL
        for (int t = 0; t < S::kTiles; ++t) mxfp4_leaf<S::kGroups>(sum[t], chunk + t * S::kLeafBytes, held);
        __syncwarp();
        if (lane_id() == 0) issue(turn + S::kSlots);
        ++turn;
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
      const int after = entry_first(list.entry[end]);
      for (int i = threadIdx.x; i < rows * S::kRowsOut; i += S::kThreads) {
        const int token = i / S::kRowsOut, column = not_before_here(i % S::kRowsOut);
        float* kept = sums + leaf * S::kRows * S::kRowsOut + i;
        float sum = begin ? *kept : 0.f, factor[S::kTopK], result[S::kTopK];
        bool in[S::kTopK];
        K3_UNROLL
        for (int rank = 0; rank < S::kTopK; ++rank) {   // all loads first: only the sum itself is one behind the other
          int at = order[token * S::kTopK + rank];
          in[rank] = at >= base && at < after;
          factor[rank] = weight[token * S::kTopK + rank];
          result[rank] = results[(in[rank] ? at - base : 0) * S::kRowsOut + column];
        }
        K3_UNROLL
        for (int rank = 0; rank < S::kTopK; ++rank)
          if (in[rank]) sum = fmaf(factor[rank], result[rank], sum);
        if constexpr (!S::kOnce) *kept = sum;
        else if (tile * kTileRows + column < tiles * kTileRows) epilogue(tile * kTileRows + column, token, sum);
      }
      if constexpr (!S::kOnce) __syncthreads();
      if (end == 0) break;   // no row is live
    }
  }
  if constexpr (!S::kOnce)
    for (int i = threadIdx.x; i < rows * S::kRowsOut; i += S::kThreads) {
      int row = tile * kTileRows + i % S::kRowsOut;
      if (row < tiles * kTileRows) epilogue(row, i / S::kRowsOut, tree_sum<S::kLeaves>(sums + i, S::kRows * S::kRowsOut));
    }
}
