// w2 of the routed experts in steps of many rows. So many rows' sums fit no block, so every item's result goes to memory, weight-major, a run of columns
// after the other. Who brings the last result of a row in a run adds them while they lie in the L2: in rising expert id inside a leaf, then the tree
// over leaves, as expert_down_product does.
#pragma once
#include "expert_core.cuh"

//   kLeaves, kGroups  of this rank
//   kTopK             items of a row
//   kRun              tiles of a unit: a run of 16-row tiles, an entry, a leaf. A warp takes units in turn, each its own
//   kPair             tiles of one copy: neighbours lie side by side where there is one leaf
//   kTokens           items of an entry, at most: whole tiles of tokens
template <int kLeaves_, int kGroups_, int kMaxItems_, int kTopK_, int kRun_ = 8, int kTokens_ = kEntryTokens>
struct ExpertItemsShape {
  static constexpr int kLeaves = kLeaves_, kGroups = kGroups_, kMaxItems = kMaxItems_, kTopK = kTopK_, kRun = kRun_, kColumns = kRun * kTileRows;
  static constexpr int kTokens = kTokens_, kTokenTiles = kTokens / kTokenTile;
  static constexpr int kRing = 220 * 1024, kLeafBytes = mxfp4_leaf_bytes(kGroups), kPair = kLeaves == 1 && 2 * 16 * 2 * kLeafBytes <= kRing - 1024 ? 2 : 1;
  static constexpr int kChunk = kPair * kLeafBytes, kCopies = kRun / kPair;
  // Fewer where leaves are long, or registers hold the tokens of several tiles.
  static constexpr int kWarps = min_of(kTokenTiles > 1 ? 8 : 16, kRing / (2 * (kChunk + 8))), kThreads = kWarps * kWarpSize;
  static constexpr int kSlots = min_of(8, kRing / (kWarps * (kChunk + 8)));
  static constexpr int kBarrierAt = kWarps * kSlots * kChunk, kSmem = kBarrierAt + kWarps * kSlots * 8;
  static_assert(kSlots >= 2 && kRun % kPair == 0, "one chunk comes while another is multiplied");
  static_assert(kTopK <= kWarpSize && kColumns <= 4 * kWarpSize && kTokens < kWarpSize, "a lane for each");
};

struct ItemSums {
  const int* ids;        // [row][place]
  const float* weights;  // [row][place]
  float* results;        // [run][leaf][item][columns of a run]
  u32* arrived;          // [run][row]: results so far, 0 between kernels
  int width;             // columns of all
};

// Adds a row's results in a run of columns; a warp, four columns a lane. epilogue(column, sum).
template <class S, class Epilogue>
K3_DEVICE void add_items(const ItemSums& a, int run, int row, Epilogue&& epilogue) {
  const int lane = lane_id(), at = row * S::kTopK + min_of(lane, S::kTopK - 1), id = a.ids[at], column = run * S::kColumns + lane * 4;
  const float weight = a.weights[at];
  int rank = 0, place = 0;   // place: of the expert that has `lane` smaller ones
  K3_UNROLL
  for (int p = 0; p < S::kTopK; ++p) rank += __shfl_sync(kFullWarp, id, p) < id;
  K3_UNROLL
  for (int p = 0; p < S::kTopK; ++p)
    if (__shfl_sync(kFullWarp, rank, p) == lane) place = p;
  const float ordered = __shfl_sync(kFullWarp, weight, place);
  const bool inside = lane * 4 < S::kColumns && column < a.width;
  f32x4 leaf[S::kLeaves];
  K3_UNROLL
  for (int l = 0; l < S::kLeaves; ++l) {
    const float* from = a.results + ((size_t(run) * S::kLeaves + l) * S::kMaxItems + row * S::kTopK) * S::kColumns + lane * 4;
    f32x4 v[S::kTopK];
    K3_UNROLL
    for (int r = 0; r < S::kTopK; ++r) {
      const int p = __shfl_sync(kFullWarp, place, r);
      v[r] = inside ? load4_of_kernel(from + p * S::kColumns) : f32x4{0.f, 0.f, 0.f, 0.f};
    }
    f32x4 sum = {0.f, 0.f, 0.f, 0.f};
    K3_UNROLL
    for (int r = 0; r < S::kTopK; ++r) {
      const float f = __shfl_sync(kFullWarp, ordered, r);
      sum = {fmaf(f, v[r].x, sum.x), fmaf(f, v[r].y, sum.y), fmaf(f, v[r].z, sum.z), fmaf(f, v[r].w, sum.w)};
    }
    leaf[l] = sum;
  }
  if (!inside) return;
  K3_UNROLL
  for (int i = 0; i < 4; ++i) epilogue(column + i, tree_sum<S::kLeaves>(&leaf[0].x + i, 4));
}

// w: [expert][tile][leaf]. x: activations [item][stride]. Any number of blocks. epilogue(row, column, sum).
template <class S, class Epilogue>
K3_DEVICE void expert_items(const u8* w, int tiles, const bf16* x, int stride, const ExpertList<S::kMaxItems>* list, const ItemSums& sums, u8* smem,
                            Epilogue&& epilogue) {
  u8* slots = smem + warp_id() * S::kSlots * S::kChunk;
  u64* full = (u64*)(smem + S::kBarrierAt) + warp_id() * S::kSlots;
  if (lane_id() == 0) {
    for (int i = 0; i < S::kSlots; ++i) barrier_init(full + i, 1);
    barrier_fence_init();
  }
  __syncwarp();
  grid_wait();
  grid_launch_next();
  const int each = list->entries * S::kLeaves, units = groups_of(tiles, S::kRun) * each;   // each: of a run
  const int warps = int(gridDim.x) * S::kWarps, own = warp_id() * int(gridDim.x) + int(blockIdx.x);
  const int count = own < units ? (units - own + warps - 1) / warps : 0;     // units of this warp
  // Lane i keeps what is known of the warp's units i, i + 32, ...: the list's entry, how many items it has, and run times leaves plus leaf.
  u32 known = 0;
  int has = 0, part_of = 0;
  auto learn = [&](int first) {
    const int unit = own + (first + lane_id()) * warps, entry = unit % each / S::kLeaves;
    if (first + lane_id() < count) {
      known = ((volatile const u32*)list->entry)[entry];
      has = entry_first(((volatile const u32*)list->entry)[entry + 1]) - entry_first(known);
      part_of = unit / each * S::kLeaves + unit % S::kLeaves;
    }
  };
  learn(0);
  u32 next_known = known;                                                     // of the copies' units, which run ahead
  int next_part = part_of;
  int copied = 0, copy_unit = 0;
  auto issue = [&](int to) {                                                  // all lanes
    if (copied >= count * S::kCopies) return;
    const int u = copied / S::kCopies, part = copied % S::kCopies, at = __shfl_sync(kFullWarp, next_part, u % kWarpSize);
    const u32 entry = __shfl_sync(kFullWarp, next_known, u % kWarpSize);
    const int leaf = at % S::kLeaves, tile = at / S::kLeaves * S::kRun + part * S::kPair;
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
      const int next = own + (copy_unit + lane_id()) * warps;
      if (copy_unit + lane_id() < count) {
        next_known = ((volatile const u32*)list->entry)[next % each / S::kLeaves];
        next_part = next / each * S::kLeaves + next % S::kLeaves;
      }
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
  auto load_x = [&](uint4 (&to)[S::kTokenTiles][S::kGroups], const Items& item, int leaf) {
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
  int at = __shfl_sync(kFullWarp, part_of, 0), next_at = __shfl_sync(kFullWarp, part_of, 1);   // run times leaves plus leaf
  u32 parity = 0;
  uint4 next[S::kTokenTiles][S::kGroups];
  load_x(next, item, at % S::kLeaves);
#pragma unroll 1
  for (int u = 0; u < count; ++u) {
    uint4 held[S::kTokenTiles][S::kGroups];
    K3_UNROLL
    for (int i = 0; i < S::kTokenTiles * S::kGroups; ++i) (&held[0][0])[i] = scale_tokens((&next[0][0])[i]);
    load_x(next, next_item, next_at % S::kLeaves);
    const int run = at / S::kLeaves, leaf = at % S::kLeaves;
    float* results = sums.results + size_t(run * S::kLeaves + leaf) * S::kMaxItems * S::kColumns;
    int token_tiles = 1;                                                      // with tokens
    K3_UNROLL
    for (int t = 1; t < S::kTokenTiles; ++t) token_tiles += __shfl_sync(kFullWarp, item[t], 0) >= 0;
    int out[S::kTokenTiles][2];                                               // items of the columns that this lane has results of; -1: none
    K3_UNROLL
    for (int t = 0; t < S::kTokenTiles; ++t)
      K3_UNROLL
      for (int i = 0; i < 2; ++i) out[t][i] = __shfl_sync(kFullWarp, item[t], (lane_id() % 4 * 2 + i) * 4);
    int mine = -1;                                                            // item of the token that this lane counts
    K3_UNROLL
    for (int t = 0; t < S::kTokenTiles; ++t) {
      const int of = __shfl_sync(kFullWarp, item[t], lane_id() % kTokenTile * 4);
      if (lane_id() / kTokenTile == t) mine = of;
    }
    K3_UNROLL
    for (int t = 0; t < S::kTokenTiles; ++t) item[t] = next_item[t];
    at = next_at;
    if ((u + 2) % kWarpSize == 0) learn(u + 2);
    items_of(next_item, u + 2);
    next_at = __shfl_sync(kFullWarp, part_of, (u + 2) % kWarpSize);
#pragma unroll 1
    for (int part = 0; part < S::kCopies; ++part) {
      barrier_wait(full + slot, parity);
      auto one_tile = [&](int t) {
        const u8* weights = slots + slot * S::kChunk + t * S::kLeafBytes;
        float sum[S::kTokenTiles][4];
        if constexpr (S::kTokenTiles == 1) mxfp4_leaf<S::kGroups>(sum[0], weights, held[0]);
        else mxfp4_of_tiles<S::kGroups, 0>(sum, weights, held, token_tiles);
        const int in_run = part * S::kPair + t, tile = run * S::kRun + in_run;
        K3_UNROLL
        for (int n = 0; n < S::kTokenTiles; ++n)
          K3_UNROLL
          for (int i = 0; i < 4; ++i) {
            const int row = i / 2 * 8 + lane_id() / 4, to = out[n][i % 2];
            if (to >= 0 && tile < tiles && tile * kTileRows + row < sums.width) results[size_t(to) * S::kColumns + in_run * kTileRows + row] = sum[n][i];
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
    // Behind the issue's __syncwarp: all lanes have stored.
    const bool last = mine >= 0 && arrives_last(sums.arrived + run * (S::kMaxItems / S::kTopK) + mine / S::kTopK, S::kTopK * S::kLeaves);
    const u32 whole = __ballot_sync(kFullWarp, last);
    __syncwarp();
#pragma unroll 1
    for (int token = 0; whole >> token; ++token) {
      if (!(whole >> token & 1)) continue;
      const int row = __shfl_sync(kFullWarp, mine, token) / S::kTopK;
      add_items<S>(sums, run, row, [&](int column, float v) { epilogue(row, column, v); });
    }
  }
}
