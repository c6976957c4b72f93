// The product of a step of many rows (64 to 1,024; on sm_90a also of 16 and 32: ProductStage says which): the arithmetic and the packed weights of row_core.cuh,
// laid out for many tokens. A block keeps its tokens' part of one leaf of K in shared memory and lets the leaf's weights of many row tiles pass; each warp, on sm_90a
// each four, takes tiles of its own and waits for no other. Leaf sums go to memory as fragments, where a second kernel adds them in the tree.
// A byte of the result depends on none of it: a leaf is one chain of MMAs from zero, leaves meet as neighbours.
#pragma once
#include "exchange.cuh"
#include "wide_columns.cuh"
#include "wide_tokens.cuh"

// The leaf sums of one row tile, or with one leaf the results: `partial` and `epilogue` of wide_product.
template <class S, class Epilogue>
K3_DEVICE void wide_put(const float (&c)[S::kNT][4], int tile, int group, int leaf, f32x4* partial, Epilogue&& epilogue) {
  K3_UNROLL
  for (int n = 0; n < S::kNT; ++n) {
    const int token_tile = group * S::kNT + n;
    if constexpr (S::kLeaves > 1) {
      partial[((size_t(tile) * S::kTokenTiles + token_tile) * S::kLeaves + leaf) * kWarpSize + lane_id()] = f32x4{c[n][0], c[n][1], c[n][2], c[n][3]};
    } else {
      K3_UNROLL   // each a run of eight rows of four tokens: whole sectors
      for (int i = 0; i < 4; ++i) epilogue(tile * kTileRows + lane_id() / 4 + i / 2 * 8, token_tile * kTokenTile + lane_id() % 4 * 2 + i % 2, c[n][i]);
    }
  }
}

// w: packed weights. x: tokens, `stride` elements apart. With one leaf epilogue(row, token, value) gets the results, for every token of
// kRows; with more, `partial` gets leaf sums [tile][token tile][leaf][lane] for wide_sum. S::kBlocks blocks, S::kSmem bytes. others: as in row_product.
template <class S, class Epilogue>
K3_DEVICE void wide_product(const uint4* w, const bf16* x, int stride, f32x4* partial, u8* smem, Epilogue&& epilogue, int others = 0) {
  constexpr int kShared = S::kLeaves * S::kGroups, kTogether = S::kUnit / S::kMT;   // kTogether: warps that share a unit
  const int block = int(blockIdx.x) - others, leaf = block % S::kLeaves, group = block / S::kLeaves % S::kGroups;
  // Shares take units in turn, so that the last tiles of all leaves are done last, and wide_sum, which begins with them, finds them in the L2.
  const int share = block / kShared, team = warp_id() / kTogether;   // warps beyond the teams only bring tokens
  WideRing<S> ring(w + size_t(leaf) * S::kSteps * kWarpSize, team, share, smem);
  if (warp_id() < S::kRings) ring.start(S::kAhead);
  grid_launch_next();
  grid_wait();
  x += size_t(group) * S::kNT * kTokenTile * stride + leaf * S::kSteps * 16;
  auto put = [&](const float (&c)[S::kNT][4], int tile) { wide_put<S>(c, tile, group, leaf, partial, epilogue); };
#ifdef K3_WGMMA
  column_tiles<S>(ring, x, stride, smem, team, share, put);
#else
  token_tiles<S>(ring, x, stride, smem, team, share, put);
#endif
}

// Leaves first .. first + kCount of one fragment, neighbours first.
template <int kCount>
K3_DEVICE f32x4 wide_tree(const f32x4* leaf) {
  if constexpr (kCount == 1) return *leaf;
  else {
    f32x4 a = wide_tree<kCount / 2>(leaf), b = wide_tree<kCount / 2>(leaf + kCount / 2 * kWarpSize);
    return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
  }
}

// An epilogue(row, token, value, addend) whose addend(row, token) comes from memory: the adding kernel asks for those of all its values at
// once, since no load passes the store of another value.
template <class Addend, class Epilogue>
struct Added {
  Addend addend;
  Epilogue epilogue;
  K3_DEVICE void operator()(int row, int token, float v) const { epilogue(row, token, v, addend(row, token)); }
};
template <class A, class E> K3_DEVICE Added<A, E> added(const A& a, const E& e) { return {a, e}; }
template <class E> K3_DEVICE float addend_of(const E&, int, int) { return 0; }
template <class A, class E> K3_DEVICE float addend_of(const Added<A, E>& e, int row, int token) { return e.addend(row, token); }
template <class E> K3_DEVICE void finish(const E& e, int row, int token, float v, float) { e(row, token, v); }
template <class A, class E> K3_DEVICE void finish(const Added<A, E>& e, int row, int token, float v, float addend) { e.epilogue(row, token, v, addend); }

// What neighbouring lanes have of the same four values, added: neighbours first, each lane keeps its part. Four lanes: one value a lane, two: two.
template <int kLanes>
K3_DEVICE void meet_lanes(float (&v)[4]) {
  K3_UNROLL
  for (int d = 1, keep = 2; d < kLanes; d *= 2, keep /= 2) {
    const bool upper = lane_id() & d;
    K3_UNROLL
    for (int i = 0; i < keep; ++i) {
      const float mine = upper ? v[keep + i] : v[i], other = upper ? v[i] : v[keep + i];
      v[i] = mine + __shfl_xor_sync(kFullWarp, other, d);
    }
  }
}

// Adds leaf sums and finishes; epilogue as in row_product. wide_sum_blocks blocks of S::kSumThreads threads. A thread adds a few leaves of a lane of a fragment and
// finishes one value (few leaves: some), so that the code, which comes from the L2, is short, and the stores of a warp are rows side by side.
template <class S, bool kPair, class Epilogue>
K3_DEVICE void wide_sum(const f32x4* partial, Epilogue&& epilogue) {
  constexpr int kTiles = kPair ? 2 : 1, kLanes = S::kSumLanes, kOwn = S::kLeaves / kLanes, kValues = 4 / kLanes, kStride = kTileRows + 1;
  __shared__ float sums[kTiles][S::kSumFragments * kTokenTile * kStride];
  grid_launch_next();
  grid_wait();
  const int first = (int(gridDim.x) - 1 - int(blockIdx.x)) * S::kSumFragments;
  auto tile_of = [&](int fragment) { return (first + fragment) / S::kTokenTiles * kTiles; };
  // This thread's values: fragment, token and row in it.
  auto place = [&](int i, auto&& use) {
    const int at = threadIdx.x + i * S::kSumThreads, fragment = at / (kTileRows * kTokenTile), token = at / kTileRows % kTokenTile, row = at % kTileRows;
    if (tile_of(fragment) < S::kTotal)
      use(tile_of(fragment) / kTiles * kTileRows + row, (first + fragment) % S::kTokenTiles * kTokenTile + token, (at / kTileRows) * kStride + row);
  };
  float addend[kValues];
  K3_UNROLL
  for (int i = 0; i < kValues; ++i) place(i, [&](int row, int token, int) { addend[i] = addend_of(epilogue, row, token); });
  const int part = threadIdx.x % kLanes, lane = threadIdx.x / kLanes % kWarpSize, fragment = threadIdx.x / (kLanes * kWarpSize);
  f32x4 v[kTiles];
  K3_UNROLL
  for (int t = 0; t < kTiles; ++t) {   // an odd last tile has no neighbour, and beyond the last fragment is none: their places are not used
    const int tile = min_of(tile_of(fragment) + t, S::kTotal - 1), token_tile = (first + fragment) % S::kTokenTiles;
    v[t] = wide_tree<kOwn>(partial + ((size_t(tile) * S::kTokenTiles + token_tile) * S::kLeaves + part * kOwn) * kWarpSize + lane);
  }
  K3_UNROLL
  for (int t = 0; t < kTiles; ++t) {
    float sum[4] = {v[t].x, v[t].y, v[t].z, v[t].w};
    meet_lanes<kLanes>(sum);
    K3_UNROLL
    for (int j = 0; j < kValues; ++j) {
      const int i = kLanes == 4 ? part % 2 * 2 + part / 2 : kLanes == 2 ? part * 2 + j : j;   // of the fragment's four values at its lane
      sums[t][(fragment * kTokenTile + lane % 4 * 2 + i % 2) * kStride + lane / 4 + i / 2 * 8] = sum[j];
    }
  }
  __syncthreads();
  K3_UNROLL
  for (int i = 0; i < kValues; ++i)
    place(i, [&](int row, int token, int at) {
      if constexpr (kPair) epilogue(row, token, sums[0][at], sums[1][at]);
      else finish(epilogue, row, token, sums[0][at], addend[i]);
    });
}
