// The skinny product of a decode step: y[token, row] = sum_k w[row, k] x[token, k] for up to 64 tokens, BF16 weights.
// Weights stand on the 16-row side of the tensor product and are read once; tokens are its columns, so a token's bytes
// depend on no other token. Sums follow the canonical tree: leaves of K are MMA chains from zero, leaf sums meet as
// neighbours, first inside a warp, then across the warps of a block, then across the blocks of a cluster.
// Layout of w: [tile of 16 rows][leaf][k-step][lane] x 16 bytes (k3cuda/runtime/repack.py).
#pragma once
#include "prims.cuh"

constexpr int kTileRows = 16, kTokenTile = 8;
constexpr int kStepBytes = kWarpSize * 16;   // one 16 x 16 tile of BF16

constexpr int min_of(int a, int b) { return a < b ? a : b; }
constexpr int max_of(int a, int b) { return a > b ? a : b; }

// The most steps of a leaf that divide it and fit `most`; even, so that two steps share one load of x, or the whole leaf.
constexpr int chunk_steps(int steps, int most) {
  for (int n = min_of(steps, most); n > 1; --n)
    if (steps % n == 0 && (n % 2 == 0 || n == steps)) return n;
  return steps;
}

// How one product is laid over the machine. Nothing here changes a byte of the result.
//   kLeaves_, kSteps_  leaves of K that this rank holds, and k-steps (of 16) in each
//   kMT_, kNT_         16-row tiles and 8-token tiles of a warp
//   kWK_, kWM_         warps of a block along leaves and along row tiles
//   kCS_               blocks of a cluster, along leaves
//   kRing_             bytes of shared memory that a block fills ahead; 0: weights go straight to registers
template <int kLeaves_, int kSteps_, int kMT_, int kNT_, int kWK_, int kWM_, int kCS_, int kRing_ = 64 * 1024, int kChunk_ = 4096>
struct RowShape {
  static constexpr int kLeaves = kLeaves_, kSteps = kSteps_, kMT = kMT_, kNT = kNT_, kWK = kWK_, kWM = kWM_, kCS = kCS_;
  static constexpr int kWarps = kWK * kWM, kThreads = kWarps * kWarpSize;
  static constexpr int kWarpLeaves = kLeaves / (kWK * kCS);
  static constexpr int kTiles = kMT * kWM;                     // of a block
  static constexpr int kTokens = kNT * kTokenTile;
  static constexpr bool kRing = kRing_ > 0;
  static constexpr bool kHoldX = kNT == 1 && kWarpLeaves * kSteps <= 48;   // a warp's share of x stays in registers
  static constexpr int kChunkSteps = chunk_steps(kSteps, kRing ? max_of(kChunk_ / kStepBytes, 2) : 4);
  static constexpr int kTileChunk = kChunkSteps * kStepBytes;  // bytes
  static constexpr int kChunkBytes = kTileChunk * kMT;
  static constexpr int kChunks = kWarpLeaves * kSteps / kChunkSteps;
  static constexpr int kSlots = kRing ? max_of(1, min_of(kChunks, kRing_ / (kWarps * kChunkBytes))) : 0;
  static constexpr int kTokenStride = kTileRows + 4;           // floats; 4 more keep a warp's stores off each other's banks
  static constexpr int kPartial = kTiles * kTokens * kTokenStride;              // floats of one warp row of leaf sums
  static constexpr int kOwned = (kTileRows * kTokens + kCS - 1) / kCS;          // (row, token) pairs a block of a cluster finishes
  static constexpr int kRingBytes = kWarps * kSlots * kChunkBytes;
  static constexpr int kBarrierAt = max_of(kRingBytes, kWK * kPartial * 4);     // leaf sums reuse the drained ring
  static constexpr int kInboxAt = (kBarrierAt + kWarps * kSlots * 8 + 15) / 16 * 16;
  static constexpr int kSmem = kInboxAt + (kCS > 1 ? kCS * kTiles * kOwned * 4 : 0);
  static_assert(kLeaves % (kWK * kCS) == 0 && kWarpLeaves * kWK * kCS == kLeaves, "warps and blocks take equal runs of leaves");
};

// ---- where weights come from: one interface, two bodies. start() touches nothing but weights, so it runs before grid_wait ----

// Each warp fills its own slots by bulk copies; no other warp waits for it.
template <class S>
struct RingSource {
  const u8* source[S::kMT];
  u8* slots;
  u64* full;
  int chunk = 0;

  K3_DEVICE RingSource(const uint4* const (&w)[S::kMT], u8* smem) {
    K3_UNROLL
    for (int m = 0; m < S::kMT; ++m) source[m] = (const u8*)w[m];
    slots = smem + warp_id() * S::kSlots * S::kChunkBytes;
    full = (u64*)(smem + S::kBarrierAt) + warp_id() * S::kSlots;
  }
  K3_DEVICE void issue(int c) {
    u64* bar = full + c % S::kSlots;
    u8* slot = slots + c % S::kSlots * S::kChunkBytes;
    barrier_expect(bar, S::kChunkBytes);
    K3_UNROLL
    for (int m = 0; m < S::kMT; ++m) bulk_copy(slot + m * S::kTileChunk, source[m] + size_t(c) * S::kTileChunk, S::kTileChunk, bar);
  }
  K3_DEVICE void start() {
    if (lane_id() == 0) {
      for (int s = 0; s < S::kSlots; ++s) barrier_init(full + s, 1);
      barrier_fence_init();
      for (int s = 0; s < S::kSlots; ++s) issue(s);
    }
    __syncwarp();
  }
  K3_DEVICE void take() { barrier_wait(full + chunk % S::kSlots, chunk / S::kSlots & 1); }
  K3_DEVICE uint4 step(int u, int m) const {
    return ((const uint4*)(slots + chunk % S::kSlots * S::kChunkBytes + m * S::kTileChunk))[u * kWarpSize + lane_id()];
  }
  K3_DEVICE void release() {
    if constexpr (S::kSlots < S::kChunks) {
      __syncwarp();
      if (lane_id() == 0 && chunk + S::kSlots < S::kChunks) issue(chunk + S::kSlots);
    }
    ++chunk;
  }
};

// Each lane loads its fragments itself, one chunk ahead.
template <class S>
struct DirectSource {
  const uint4* source[S::kMT];
  uint4 ahead[S::kChunkSteps][S::kMT];
  int chunk = 0;

  K3_DEVICE DirectSource(const uint4* const (&w)[S::kMT], u8*) {
    K3_UNROLL
    for (int m = 0; m < S::kMT; ++m) source[m] = w[m] + lane_id();
  }
  K3_DEVICE void fetch(int c, int u) {
    K3_UNROLL
    for (int m = 0; m < S::kMT; ++m) ahead[u][m] = load_weights(source[m] + size_t(c * S::kChunkSteps + u) * kWarpSize);
  }
  K3_DEVICE void start() {
    K3_UNROLL
    for (int u = 0; u < S::kChunkSteps; ++u) fetch(0, u);
  }
  K3_DEVICE void take() {}
  K3_DEVICE uint4 step(int u, int m) {
    uint4 v = ahead[u][m];
    if (m == S::kMT - 1 && chunk + 1 < S::kChunks) fetch(chunk + 1, u);
    return v;
  }
  K3_DEVICE void release() { ++chunk; }
};

template <class S, bool kRing> struct SourceOf { typedef RingSource<S> type; };
template <class S> struct SourceOf<S, false> { typedef DirectSource<S> type; };

// ---- tokens: lane 4 g + q holds of token g eight neighbouring k of every two steps, which the order of k in w answers to ----
template <class S>
struct Tokens {
  const bf16* at[S::kNT];   // null beyond the live rows: those columns are zero

  K3_DEVICE Tokens(const bf16* x, int stride, int rows, int first_leaf) {
    K3_UNROLL
    for (int n = 0; n < S::kNT; ++n) {
      int token = n * kTokenTile + lane_id() / 4;
      at[n] = token < rows ? x + size_t(token) * stride + first_leaf * S::kSteps * 16 : nullptr;
    }
  }
  // Both steps of pair `p` of leaf `leaf`; a leaf with an odd step at its end packs that one alone.
  K3_DEVICE uint4 pair(int n, int leaf, int p) const {
    uint4 v = {0, 0, 0, 0};
    if (!at[n]) return v;
    const bf16* k = at[n] + leaf * S::kSteps * 16 + p * 32;
    if (S::kSteps % 2 && p == S::kSteps / 2) {
      uint2 one = load_activations((const uint2*)k + lane_id() % 4);
      v.x = one.x, v.y = one.y;
      return v;
    }
    return load_activations((const uint4*)k + lane_id() % 4);
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

// One warp's run of leaves.
template <class S>
struct LeafRun {
  static constexpr int kPairs = (S::kSteps + 1) / 2;
  typename SourceOf<S, S::kRing>::type& source;
  Tokens<S> tokens;
  uint4 held[S::kHoldX ? S::kWarpLeaves * kPairs : 1];

  K3_DEVICE LeafRun(typename SourceOf<S, S::kRing>::type& s, const Tokens<S>& t) : source(s), tokens(t) {
    if constexpr (S::kHoldX) {
      K3_UNROLL
      for (int i = 0; i < S::kWarpLeaves * kPairs; ++i) held[i] = tokens.pair(0, i / kPairs, i % kPairs);
    }
  }
  K3_DEVICE void step(Accumulator<S>& acc, const uint4 (&x)[S::kNT], int u, bool second) {
    K3_UNROLL
    for (int m = 0; m < S::kMT; ++m) {
      uint4 a = source.step(u, m);
      K3_UNROLL
      for (int n = 0; n < S::kNT; ++n) mma(acc.c[m][n], a, second ? x[n].z : x[n].x, second ? x[n].w : x[n].y);
    }
  }
  K3_DEVICE void chunk(Accumulator<S>& acc, int leaf, int first_pair) {
    source.take();
    K3_UNROLL
    for (int u = 0; u < S::kChunkSteps; u += 2) {
      uint4 x[S::kNT];
      K3_UNROLL
      for (int n = 0; n < S::kNT; ++n) x[n] = S::kHoldX ? held[leaf * kPairs + first_pair + u / 2] : tokens.pair(n, leaf, first_pair + u / 2);
      step(acc, x, u, false);
      if (u + 1 < S::kChunkSteps) step(acc, x, u + 1, true);
    }
    source.release();
  }
  template <int kFirst, int kCount>
  K3_DEVICE void sum(Accumulator<S>& acc) {
    if constexpr (kCount > 1) {
      Accumulator<S> right;
      sum<kFirst, kCount / 2>(acc);
      sum<kFirst + kCount / 2, kCount / 2>(right);
      acc.add(right);
    } else {
      acc.zero();
      if constexpr (S::kHoldX) {   // registers need indices known at compile time
        K3_UNROLL
        for (int c = 0; c < S::kSteps / S::kChunkSteps; ++c) chunk(acc, kFirst, c * S::kChunkSteps / 2);
      } else {
#pragma unroll 1
        for (int c = 0; c < S::kSteps / S::kChunkSteps; ++c) chunk(acc, kFirst, c * S::kChunkSteps / 2);
      }
    }
  }
};

// Leaf sums of all warps and blocks become finished values. finish(row in tile, token, values of the block's tiles).
template <class S, class Finish>
K3_DEVICE void combine_leaves(const Accumulator<S>& acc, int rows, u8* smem, Finish&& finish) {
  float* partial = (float*)smem;   // [leaf warp][tile][token][row]
  float* inbox = (float*)(smem + S::kInboxAt);   // [source block][tile][owned pair]
  int wk = warp_id() % S::kWK, wm = warp_id() / S::kWK;
  __syncthreads();   // the ring is drained
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
  int live = min_of(rows, S::kTokens) * kTileRows;
  if constexpr (S::kCS > 1) cluster_wait();   // every block of the cluster has begun, so its inbox exists
  for (int i = threadIdx.x; i < live; i += S::kThreads) {
    int token = i / kTileRows, row = i % kTileRows;
    float v[S::kTiles];
    K3_UNROLL
    for (int t = 0; t < S::kTiles; ++t)
      v[t] = tree_sum<S::kWK>(partial + (t * S::kTokens + token) * S::kTokenStride + row, S::kPartial);
    if constexpr (S::kCS == 1) finish(row, token, v);
    else {
      K3_UNROLL
      for (int t = 0; t < S::kTiles; ++t)
        store_remote(inbox + (cluster_rank() * S::kTiles + t) * S::kOwned + i / S::kCS, i % S::kCS, v[t]);
    }
  }
  if constexpr (S::kCS > 1) {
    cluster_arrive();
    cluster_wait();
    for (int j = threadIdx.x; j * S::kCS + int(cluster_rank()) < live; j += S::kThreads) {
      int i = j * S::kCS + cluster_rank();
      float v[S::kTiles];
      K3_UNROLL
      for (int t = 0; t < S::kTiles; ++t) v[t] = tree_sum<S::kCS>(inbox + t * S::kOwned + j, S::kTiles * S::kOwned);
      finish(i % kTileRows, i / kTileRows, v);
    }
  }
}

// The whole product of one block: row tiles (blockIdx.x / kCS) kTiles onward.
//   w, tiles    packed weights and how many 16-row tiles they have
//   x, stride   tokens, row-major, `stride` elements apart; K of this rank starts at x
//   rows        live tokens; columns beyond are neither read nor written
//   smem        S::kSmem bytes of dynamic shared memory
// epilogue(row, token, value) runs once for every row and live token; with kPair epilogue(row, token, even, odd) gets two
// neighbouring tiles at once, row counted within either half (gate and up of a GLU).
template <class S, bool kPair = false, class Epilogue>
K3_DEVICE void row_product(const uint4* w, int tiles, const bf16* x, int stride, int rows, u8* smem, Epilogue&& epilogue) {
  int first_leaf = (int(cluster_rank()) * S::kWK + warp_id() % S::kWK) * S::kWarpLeaves;
  int block_tile = int(blockIdx.x) / S::kCS * S::kTiles, first_tile = block_tile + warp_id() / S::kWK * S::kMT;
  const uint4* mine[S::kMT];
  K3_UNROLL
  for (int m = 0; m < S::kMT; ++m)   // a block that reaches past the end reads the last tile again and drops it
    mine[m] = w + (size_t(min_of(first_tile + m, tiles - 1)) * S::kLeaves + first_leaf) * S::kSteps * kWarpSize;
  typename SourceOf<S, S::kRing>::type source(mine, smem);
  source.start();
  if constexpr (S::kCS > 1) cluster_arrive();
  grid_launch_next();
  grid_wait();
  LeafRun<S> run(source, Tokens<S>(x, stride, rows, first_leaf));
  Accumulator<S> acc;
  run.template sum<0, S::kWarpLeaves>(acc);
  combine_leaves<S>(acc, rows, smem, [&](int row, int token, const float (&v)[S::kTiles]) {
    if constexpr (kPair) {
      static_assert(!kPair || S::kTiles % 2 == 0, "a pair of tiles lies in one block");
      K3_UNROLL
      for (int t = 0; t < S::kTiles; t += 2)
        if (block_tile + t < tiles) epilogue((block_tile + t) / 2 * kTileRows + row, token, v[t], v[t + 1]);
    } else {
      K3_UNROLL
      for (int t = 0; t < S::kTiles; ++t)
        if (block_tile + t < tiles) epilogue((block_tile + t) * kTileRows + row, token, v[t]);
    }
  });
}
