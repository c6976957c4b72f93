// w2 of the routed experts in steps of few rows: a row's experts summed in rising id inside a leaf, then the tree over leaves.
#pragma once
#include "expert_core.cuh"

// A warp's slots, used in turn.
template <int kSlots>
struct RingTurn {
  int slot = 0;
  u32 parity = 0;
  K3_DEVICE void pass() {
    if (++slot == kSlots) slot = 0, parity ^= 1;
  }
};

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
  CopyRing<S::kSlots, S::kChunk> ring(smem, smem + S::kBarrierAt);
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
  // This warp's turns: its entries leaf by leaf. What every turn needs again is kept: made anew it was a fifth of a turn's instructions.
  const int warp = kept(warp_id()), entries = list.entries, own = entries > warp ? (entries - warp + S::kWarps - 1) / S::kWarps : 0, turns = own * S::kLeaves;
  const u8 *own_w = kept(w + size_t(tile) * S::kLeaves * S::kLeafBytes), *own_x = kept((const u8*)x + lane_id() % 4 * 16);
  const int token = kept(lane_id() / 4);
  const LeafLane here = LeafLane::here(), at = {kept(here.words_at), here.odd_at, kept(here.scales_at)};
  auto leaf_of = [&](int turn) { return S::kLeaves == 1 ? 0 : turn / own; };
  auto entry_of = [&](int turn) { return warp + (turn - leaf_of(turn) * own) * S::kWarps; };
  auto issue = [&](int slot, int turn) {
    if (turn >= turns) return;
    const u8* source = own_w + u64(entry_expert(list.entry[entry_of(turn)])) * u32(tiles * S::kLeaves * S::kLeafBytes) + leaf_of(turn) * S::kLeafBytes;
    ring.expect(slot);
    if (S::kLeaves == 1 && tile + S::kTiles <= tiles) ring.copy(slot, 0, source, S::kChunk);
    else
      for (int t = 0; t < S::kTiles; ++t)   // past the last tile that one again
        ring.copy(slot, t * S::kLeafBytes, source + min_of(t, tiles - 1 - tile) * S::kLeaves * S::kLeafBytes, S::kLeafBytes);
  };
  struct Inputs { uint4 x[S::kGroups]; int first, last; };   // of a turn: values, and its items
  auto load = [&](Inputs& to, int turn) {
    if (turn >= turns) return;
    const int entry = entry_of(turn);
    to.first = entry_first(list.entry[entry]), to.last = entry_first(list.entry[entry + 1]) - 1;
    // Columns beyond the entry's items are the last item's once more.
    const u8* mine = own_x + u64(list.item[min_of(to.first + token, to.last)]) * u32(stride * 2) + leaf_of(turn) * S::kGroups * 64;
    K3_UNROLL
    for (int i = 0; i < S::kGroups; ++i) to.x[i] = load_activations((const uint4*)mine + i * 4);
  };
  if (lane_id() < S::kSlots) issue(lane_id(), lane_id());
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
  Inputs next;
  RingTurn<S::kSlots> in_ring;
  int turn = 0;
  load(next, turn);
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
        for (int i = 0; i < S::kGroups; ++i) held[i] = scale_tokens(next.x[i]);
        const int first = next.first, last = next.last;
        load(next, turn + 1);
        float sum[S::kTiles][4];
        const u8* chunk = ring.take(in_ring.slot, in_ring.parity);
        K3_UNROLL
        for (int t = 0; t < S::kTiles; ++t) mxfp4_leaf<S::kGroups>(sum[t], chunk + t * S::kLeafBytes, held, at);
        __syncwarp();
        if (elected()) issue(in_ring.slot, turn + S::kSlots);
        in_ring.pass();
        ++turn;
        // Columns beyond the items have the last one's bytes: they store them once more.
        K3_UNROLL
        for (int i = 0; i < 2; ++i) {
          if (i && first == last) break;
          float* to = results + (min_of(first + lane_id() % 4 * 2 + i, last) - base) * S::kRowsOut + token;
          K3_UNROLL
          for (int t = 0; t < S::kTiles; ++t) to[t * kTileRows] = sum[t][i], to[t * kTileRows + 8] = sum[t][i + 2];
        }
      }
      __syncthreads();
      const int after = entry_first(list.entry[end]);
      for (int i = threadIdx.x; i < rows * S::kRowsOut; i += S::kThreads) {
        const int row = i / S::kRowsOut, column = not_before_here(i % S::kRowsOut);
        const u16* positions = order + row * S::kTopK;   // rising, so a window has neighbours of them: few at a time where there are several windows
        const float* factors = weight + row * S::kTopK;
        float* before = sums + leaf * S::kRows * S::kRowsOut + i;
        float sum = !S::kOnce && begin ? *before : 0.f;
        constexpr int kRun = S::kOnce ? S::kTopK : min_of(S::kTopK, 4);
        K3_UNROLL
        for (int run = 0; run < S::kTopK; run += kRun) {
          const int count = min_of(kRun, S::kTopK - run);
          if (!S::kOnce && (positions[run] >= after || positions[run + count - 1] < base)) continue;
          float factor[kRun], result[kRun];
          bool in[kRun];
          K3_UNROLL
          for (int k = 0; k < count; ++k) {   // all loads first: only the sum itself is one behind the other
            const int at = positions[run + k];
            in[k] = at >= base && at < after;
            factor[k] = factors[run + k];
            result[k] = results[(in[k] ? at - base : 0) * S::kRowsOut + column];
          }
          K3_UNROLL
          for (int k = 0; k < count; ++k)
            if (in[k]) sum = fmaf(factor[k], result[k], sum);
        }
        if (!S::kOnce && (S::kLeaves > 1 || end < entries)) *before = sum;
        else if (tile * kTileRows + column < tiles * kTileRows) epilogue(tile * kTileRows + column, row, sum);
      }
      if constexpr (!S::kOnce) __syncthreads();
      if (end == 0) break;   // no row is live
    }
  }
  if constexpr (S::kLeaves > 1)
    for (int i = threadIdx.x; i < rows * S::kRowsOut; i += S::kThreads) {
      int row = tile * kTileRows + i % S::kRowsOut;
      if (row < tiles * kTileRows) epilogue(row, i / S::kRowsOut, tree_sum<S::kLeaves>(sums + i, S::kRows * S::kRowsOut));
    }
}
