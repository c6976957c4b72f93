// The skinny product of a decode step: y[token, row] = sum_k w[row, k] x[token, k] for up to 64 tokens, BF16 weights.
// Weights stand on the 16-row side of the tensor product and are read once; tokens are its columns, so a token's bytes
// depend on no other token. Sums follow the canonical tree: leaves of K are MMA chains from zero, leaf sums meet as
// neighbours, first inside a warp, then across the warps of a block, then across the blocks of a cluster.
// Layout of w: [tile of 16 rows][leaf][k-step][lane] x 16 bytes (k3cuda/runtime/repack.py).
#pragma once
#include "row_weights.cuh"

// Lane 4 g + q holds of token g eight neighbouring k of every two steps, which the order of k in w answers to.
template <class S>
struct Tokens {
  const bf16* at[S::kNT];   // beyond the live rows the last one's once more: nobody looks at those columns

  K3_DEVICE Tokens(const bf16* x, int stride, int rows, int first_leaf) {
    K3_UNROLL
    for (int n = 0; n < S::kNT; ++n) {
      const int token = min_of(n * kTokenTile + lane_id() / 4, rows - 1);
      at[n] = x + size_t(token) * stride + first_leaf * S::kSteps * 16 + lane_id() % 4 * 8;
    }
  }
  // Both steps of pair `p` of leaf `leaf`; a leaf with an odd step at its end packs that one alone.
  K3_DEVICE uint4 pair(int n, int leaf, int p) const {
    const bf16* k = at[n] + leaf * S::kSteps * 16 + p * 32;
    if (S::kSteps % 2 && p == S::kSteps / 2) {
      const uint2 one = load_activations((const uint2*)(k - lane_id() % 4 * 4));
      return {one.x, one.y, 0, 0};
    }
    return load_activations((const uint4*)k);
  }
};

template <class S>
struct Accumulator {
  float c[S::kMT][S::kNT][4];
  K3_DEVICE void zero() {
    K3_UNROLL
    for (int i = 0; i < S::kMT * S::kNT * 4; ++i) (&c[0][0][0])[i] = 0.f;
  }
  K3_DEVICE void add(const Accumulator& o) {
    K3_UNROLL
    for (int m = 0; m < S::kMT; ++m)
      K3_UNROLL
      for (int n = 0; n < S::kNT; ++n)
        K3_UNROLL
        for (int i = 0; i < 4; ++i) c[m][n][i] += o.c[m][n][i];
  }
};

// Brings the block's share of x into shared memory in fragment order: [leaf][pair][token tile][lane].
template <class S>
K3_DEVICE void share_tokens(const bf16* x, int stride, int rows, uint4* shared) {
  Tokens<S> tokens(x, stride, rows, int(cluster_rank()) * S::kWK * S::kWarpLeaves);
  for (int i = warp_id(); i < S::kWK * S::kWarpLeaves * S::kPairs; i += S::kWarps)
    K3_UNROLL
    for (int n = 0; n < S::kNT; ++n) shared[(i * S::kNT + n) * kWarpSize + lane_id()] = tokens.pair(n, i / S::kPairs, i % S::kPairs);
  __syncthreads();
}

// One warp's run of leaves.
template <class S>
struct LeafRun {
  typename SourceOf<S, S::kRing>::type& source;
  Tokens<S> tokens;
  const uint4* shared;   // the warp's first leaf of x in shared memory
  uint4 held[S::kX == kXRegisters ? S::kWarpLeaves * S::kPairs : 1];

  K3_DEVICE LeafRun(typename SourceOf<S, S::kRing>::type& s, const Tokens<S>& t, const uint4* x) : source(s), tokens(t), shared(x) {
    if constexpr (S::kX == kXRegisters) {
      K3_UNROLL
      for (int i = 0; i < S::kWarpLeaves * S::kPairs; ++i) held[i] = tokens.pair(0, i / S::kPairs, i % S::kPairs);
    }
  }
  K3_DEVICE uint4 pair(int n, int leaf, int p) const {
    if constexpr (S::kX == kXRegisters) return held[leaf * S::kPairs + p];
    else if constexpr (S::kX == kXShared) return shared[((leaf * S::kPairs + p) * S::kNT + n) * kWarpSize + lane_id()];
    else return tokens.pair(n, leaf, p);
  }
  K3_DEVICE void step(Accumulator<S>& acc, const uint4 (&x)[S::kNT], int u, bool second) {
    K3_UNROLL
    for (int m = 0; m < S::kMT; ++m) {
      uint4 a = source.step(u, m);
      K3_UNROLL
      for (int n = 0; n < S::kNT; ++n) mma(acc.c[m][n], a, second ? x[n].z : x[n].x, second ? x[n].w : x[n].y);
    }
  }
  K3_DEVICE void multiply(Accumulator<S>& acc, int leaf, int first) {   // first: step of the leaf
    uint4 x[S::kNT];
    K3_UNROLL
    for (int u = 0; u < S::kChunkSteps; ++u) {
      if (u == 0 || (first + u) % 2 == 0) {
        K3_UNROLL
        for (int n = 0; n < S::kNT; ++n) x[n] = pair(n, leaf, (first + u) / 2);
      }
      step(acc, x, u, (first + u) % 2);
    }
  }
  // The products of chunk `c`. Registers need indices known at compile time: each chunk has its own; waiting and copying are those of the loop around.
  template <int kChunk = 0>
  K3_DEVICE void multiply_held(Accumulator<S>& acc, int leaf, int c) {
    if constexpr (kChunk + 1 < S::kLeafChunks)
      if (c != kChunk) return multiply_held<kChunk + 1>(acc, leaf, c);
    multiply(acc, leaf, kChunk * S::kChunkSteps);
  }
  // Not for many short chunks: to find one's products would take as long as they do.
  static constexpr bool kOneLoop = S::kX != kXRegisters || S::kLeafChunks <= 4;
  template <int kFirst, int kCount>
  K3_DEVICE void sum(Accumulator<S>& acc) {
    if constexpr (kCount > 1) {
      Accumulator<S> right;
      sum<kFirst, kCount / 2>(acc);
      sum<kFirst + kCount / 2, kCount / 2>(right);
      acc.add(right);
    } else {
      acc.zero();
      auto chunk = [&](int c) {
        source.take();
        if constexpr (kOneLoop && S::kX == kXRegisters) multiply_held(acc, kFirst, c);
        else multiply(acc, kFirst, c * S::kChunkSteps);
        source.release();
      };
      if constexpr (kOneLoop) {
        K3_ROLLED
        for (int c = 0; c < S::kLeafChunks; ++c) chunk(c);
      } else {
        K3_UNROLL
        for (int c = 0; c < S::kLeafChunks; ++c) chunk(c);
      }
    }
  }
};

// An epilogue that takes the values of kRun neighbouring rows of a token at once, or of as many as a block finishes: fewer and wider stores. Where it gets
// them one by one it takes a float.
template <int kRun, class Epilogue>
struct InRuns {
  Epilogue epilogue;
  template <class V> K3_DEVICE void operator()(int row, int token, const V& v) const { epilogue(row, token, v); }
};
template <int kRun, class E> K3_DEVICE InRuns<kRun, E> in_runs(const E& e) { return {e}; }
template <class E> struct RunOf { static constexpr int kRun = 1; };
template <int kRun_, class E> struct RunOf<InRuns<kRun_, E>> { static constexpr int kRun = kRun_; };

// Leaf sums of all warps and blocks become finished values: finish(row in tile, token, tile of the block's, values of kRun rows from that on in each of kValues
// tiles from that on). The blocks of a cluster tell each other theirs by stores that count themselves at the owner of a (row, token) pair; no block waits
// for anything else. Two inboxes in turn: who sends for a group has heard all of the one before, so none is two ahead.
template <class S, int kValues, int kRun, class Finish>
K3_DEVICE void combine_leaves(const Accumulator<S>& acc, int rows, int group, u8* smem, Finish&& finish) {
  typedef Neighbours<float, kRun> Run;
  constexpr int kTurns = S::kTiles / kValues, kOwnRows = kTileRows / S::kCS;
  static_assert(kOwnRows % kRun == 0, "a block finishes whole runs");
  float* partial = (float*)(smem + S::kPartialAt);   // [leaf warp][tile][token][row]
  float* inbox = (float*)(smem + S::kInboxAt) + group % 2 * S::kInbox;   // [source block][tile][owned pair]
  u64* heard = (u64*)(smem + S::kHeardAt) + group % 2;
  int wk = warp_id() % S::kWK, wm = warp_id() / S::kWK;
  __syncthreads();   // the group before is finished with both
  K3_UNROLL
  for (int m = 0; m < S::kMT; ++m)
    K3_UNROLL
    for (int n = 0; n < S::kNT; ++n)
      K3_UNROLL
      for (int i = 0; i < 4; ++i) {
        int token = n * kTokenTile + lane_id() % 4 * 2 + i % 2, row = lane_id() / 4 + i / 2 * 8;
        partial[wk * S::kPartial + ((wm * S::kMT + m) * S::kTokens + token) * S::kTokenStride + row] = acc.c[m][n][i];
      }
  __syncthreads();
  const int live = min_of(rows, S::kTokens);
  if constexpr (S::kCS > 1) {
    if (group == 0) cluster_wait();   // every block's inbox stands
    if (threadIdx.x == 0) inbox_expect(heard, live * kTileRows * S::kTiles * 4);
  }
  if constexpr (S::kCS == 1) {
    K3_ROLLED
    for (u32 i = threadIdx.x; i < u32(live * kTurns * (kTileRows / kRun)); i += S::kThreads) {
      const int row = i % (kTileRows / kRun) * kRun, tile = i / (kTileRows / kRun) % kTurns * kValues, token = i / (kTileRows / kRun) / kTurns;
      Run v[kValues];
      K3_UNROLL
      for (int t = 0; t < kValues; ++t)
        v[t] = tree_sums<S::kWK, kRun>(partial + ((tile + t) * S::kTokens + token) * S::kTokenStride + row, S::kPartial);
      finish(row, token, tile, v);
    }
  } else {
    K3_ROLLED
    for (u32 i = threadIdx.x; i < u32(live * S::kTiles * kTileRows); i += S::kThreads) {
      const int row = i % kTileRows, tile = i / kTileRows % S::kTiles, token = i / kTileRows / S::kTiles;
      const float v = tree_sum<S::kWK>(partial + (tile * S::kTokens + token) * S::kTokenStride + row, S::kPartial);
      // An owner has neighbouring rows, which lie side by side in memory.
      send(inbox + (cluster_rank() * S::kTiles + tile) * S::kOwned + token * kOwnRows + row % kOwnRows, row / kOwnRows, v, heard);
    }
    inbox_wait(heard, group / 2 & 1);
    K3_ROLLED
    for (u32 i = threadIdx.x; i < u32(live * kTurns * (kOwnRows / kRun)); i += S::kThreads) {
      const int row = i % (kOwnRows / kRun) * kRun, tile = i / (kOwnRows / kRun) % kTurns * kValues, token = i / (kOwnRows / kRun) / kTurns;
      Run v[kValues];
      K3_UNROLL
      for (int t = 0; t < kValues; ++t)
        v[t] = tree_sums<S::kCS, kRun>(inbox + (tile + t) * S::kOwned + token * kOwnRows + row, S::kTiles * S::kOwned);
      finish(int(cluster_rank()) * kOwnRows + row, token, tile, v);
    }
  }
}

// The whole product of one block: every group of kTiles row tiles that falls to its cluster. Any grid of whole clusters works.
//   w, tiles    packed weights and how many 16-row tiles they have
//   x, stride   tokens, row-major, `stride` elements apart; K of this rank starts at x
//   rows        live tokens; columns beyond are neither read nor written
//   smem        S::kSmem bytes of dynamic shared memory
//   others      blocks at the start of the grid that do something else: whole clusters
//   kLate       the next kernel starts when x is there, not with this one
// epilogue(row, token, value) runs once for every row and live token, or for runs of rows (InRuns); with kPair epilogue(row, token, even, odd) gets
// two neighbouring tiles at once, row counted within either half (gate and up of a GLU).
template <class S, bool kPair = false, bool kLate = false, class Epilogue>
K3_DEVICE void row_product(const uint4* w, int tiles, const bf16* x, int stride, int rows, u8* smem, const Epilogue& epilogue, int others = 0) {
  int leaf_in_block = warp_id() % S::kWK * S::kWarpLeaves;
  int first_leaf = int(cluster_rank()) * S::kWK * S::kWarpLeaves + leaf_in_block;
  Groups<S> groups(tiles, others);
  typename SourceOf<S, S::kRing>::type source(WeightStream<S>(w, groups, first_leaf, warp_id() / S::kWK * S::kMT), smem);
  if constexpr (S::kPaced && !kLate) grid_launch_next();  // a start takes its time
  source.start();
  if constexpr (S::kCS > 1) {
    static_assert(kTileRows % S::kCS == 0, "blocks own equally many pairs");
    inboxes_begin<2>((u64*)(smem + S::kHeardAt));
  }
  if constexpr (!S::kPaced && !kLate) grid_launch_next();
  grid_wait();
  if constexpr (kLate) grid_launch_next();
  uint4* shared = (uint4*)(smem + S::kXAt);
  if constexpr (S::kX == kXShared) share_tokens<S>(x, stride, rows, shared);
  LeafRun<S> run(source, Tokens<S>(x, stride, rows, first_leaf), shared + leaf_in_block * S::kPairs * S::kNT * kWarpSize);
#pragma unroll 1
  for (int g = 0; groups.has(g); ++g) {
    Accumulator<S> acc;
    run.template sum<0, S::kWarpLeaves>(acc);
    constexpr int kValues = kPair ? 2 : 1, kRun = min_of(RunOf<Epilogue>::kRun, kTileRows / S::kCS);
    static_assert(S::kTiles % kValues == 0, "a pair of tiles lies in one block");
    const int first = groups.tile(g);
    combine_leaves<S, kValues, kRun>(acc, rows, g, smem, [&](int row, int token, int tile, const Neighbours<float, kRun> (&v)[kValues]) {
      if (first + tile >= tiles) return;
      if constexpr (kPair) epilogue((first + tile) / 2 * kTileRows + row, token, v[0].v[0], v[1].v[0]);
      else if constexpr (kRun == 1) epilogue((first + tile) * kTileRows + row, token, v[0].v[0]);
      else epilogue((first + tile) * kTileRows + row, token, v[0]);
    });
  }
}
