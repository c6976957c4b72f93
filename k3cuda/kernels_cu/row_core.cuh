// The skinny product of a decode step: y[token, row] = sum_k w[row, k] x[token, k] for up to 64 tokens, BF16 weights.
// Weights stand on the 16-row side of the tensor product and are read once; tokens are its columns, so a token's bytes
// depend on no other token. Sums follow the canonical tree: leaves of K are MMA chains from zero, leaf sums meet as
// neighbours, first inside a warp, then across the warps of a block, then across the blocks of a cluster.
// Layout of w: [tile of 16 rows][leaf][k-step][lane] x 16 bytes (k3cuda/runtime/repack.py).
#pragma once
#include "exchange.cuh"
#include "row_shape.cuh"

// The row tiles of one block: `first`, then every `stride` groups of kTiles until `tiles`. Blocks before `others` do something else.
template <class S>
struct Groups {
  int tiles, first, stride;
  K3_DEVICE Groups(int n, int others) : tiles(n), first((int(blockIdx.x) - others) / S::kCS), stride((int(gridDim.x) - others) / S::kCS) {}
  K3_DEVICE int tile(int i) const { return (first + i * stride) * S::kTiles; }
  K3_DEVICE bool has(int i) const { return tile(i) < tiles; }
};

// ---- where weights come from: one interface, two bodies. start() touches nothing but weights, so it runs before grid_wait ----

// What a warp reads: of every group of the block its tiles' run of leaves, chunk by chunk.
template <class S>
struct WeightStream {
  const uint4* w;
  Groups<S> groups;
  int first_leaf, warp_tile;

  // A group that reaches past the end reads the last tile again and drops it.
  K3_DEVICE const uint4* at(int group, int chunk, int m) const {
    int tile = min_of(groups.tile(group) + warp_tile + m, groups.tiles - 1);
    return w + ((size_t(tile) * S::kLeaves + first_leaf) * S::kSteps + chunk * S::kChunkSteps) * kWarpSize;
  }
};

// Each warp fills its own slots by bulk copies, over the ends of groups; no other warp waits for it.
template <class S>
struct RingSource {
  WeightStream<S> stream;
  u8* slots;
  u64* full;
  int slot = 0, next_group = 0, next_chunk = 0;   // the slot in use; what the next copy brings
  u32 parity = 0;

  K3_DEVICE RingSource(const WeightStream<S>& s, u8* smem) : stream(s) {
    slots = smem + warp_id() * S::kSlots * S::kChunkBytes;
    full = (u64*)(smem + S::kBarrierAt) + warp_id() * S::kSlots;
  }
  K3_DEVICE void issue(int to) {
    if (!stream.groups.has(next_group)) return;
    barrier_expect(full + to, S::kChunkBytes);
    K3_UNROLL
    for (int m = 0; m < S::kMT; ++m)
      bulk_copy(slots + to * S::kChunkBytes + m * S::kTileChunk, stream.at(next_group, next_chunk, m), S::kTileChunk, full + to);
    if (++next_chunk == S::kGroupChunks) next_chunk = 0, ++next_group;
  }
  K3_DEVICE void start() {
    if (lane_id() == 0) {
      for (int s = 0; s < S::kSlots; ++s) barrier_init(full + s, 1);
      barrier_fence_init();
      for (int s = 0; s < S::kSlots && stream.groups.has(next_group); ++s) {
        if (S::kPaced && s > 0) barrier_wait(full + s - 1, 0);
        issue(s);
      }
    }
    __syncwarp();
  }
  K3_DEVICE void take() { barrier_wait(full + slot, parity); }
  K3_DEVICE uint4 step(int u, int m) const {
    return ((const uint4*)(slots + slot * S::kChunkBytes + m * S::kTileChunk))[u * kWarpSize + lane_id()];
  }
  K3_DEVICE void release() {
    __syncwarp();
    if (lane_id() == 0) issue(slot);
    if (++slot == S::kSlots) slot = 0, parity ^= 1;
  }
};

// Each lane loads its fragments itself, one chunk ahead.
template <class S>
struct DirectSource {
  WeightStream<S> stream;
  uint4 ahead[S::kChunkSteps][S::kMT];
  int next_group = 0, next_chunk = 0;

  K3_DEVICE DirectSource(const WeightStream<S>& s, u8*) : stream(s) {}
  K3_DEVICE void fetch(int u, int m) {
    if (stream.groups.has(next_group)) ahead[u][m] = load_weights(stream.at(next_group, next_chunk, m) + u * kWarpSize + lane_id());
  }
  K3_DEVICE void advance() {
    if (++next_chunk == S::kGroupChunks) next_chunk = 0, ++next_group;
  }
  K3_DEVICE void start() {
    K3_UNROLL
    for (int u = 0; u < S::kChunkSteps; ++u)
      K3_UNROLL
      for (int m = 0; m < S::kMT; ++m) fetch(u, m);
    advance();
  }
  K3_DEVICE void take() {}
  K3_DEVICE uint4 step(int u, int m) {
    uint4 v = ahead[u][m];
    fetch(u, m);
    return v;
  }
  K3_DEVICE void release() { advance(); }
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
  K3_DEVICE void chunk(Accumulator<S>& acc, int leaf, int first) {   // first: step of the leaf
    source.take();
    uint4 x[S::kNT];
    K3_UNROLL
    for (int u = 0; u < S::kChunkSteps; ++u) {
      if (u == 0 || (first + u) % 2 == 0) {
        K3_UNROLL
        for (int n = 0; n < S::kNT; ++n) x[n] = pair(n, leaf, (first + u) / 2);
      }
      step(acc, x, u, (first + u) % 2);
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
      if constexpr (S::kX == kXRegisters) {   // registers need indices known at compile time
        K3_UNROLL
        for (int c = 0; c < S::kLeafChunks; ++c) chunk(acc, kFirst, c * S::kChunkSteps);
      } else {
#pragma unroll 1
        for (int c = 0; c < S::kLeafChunks; ++c) chunk(acc, kFirst, c * S::kChunkSteps);
      }
    }
  }
};

// Leaf sums of all warps and blocks become finished values. finish(row in tile, token, values of the block's tiles).
// The blocks of a cluster tell each other theirs by stores that count themselves at the owner of a (row, token) pair; no block waits
// for anything else. Two inboxes in turn: who sends for a group has heard all of the one before, so none is two ahead.
template <class S, class Finish>
K3_DEVICE void combine_leaves(const Accumulator<S>& acc, int rows, int group, u8* smem, Finish&& finish) {
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
  int live = min_of(rows, S::kTokens) * kTileRows;
  if constexpr (S::kCS > 1) {
    if (group == 0) cluster_wait();   // every block's inbox stands
    if (threadIdx.x == 0) inbox_expect(heard, live * S::kTiles * 4);
  }
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
        send(inbox + (cluster_rank() * S::kTiles + t) * S::kOwned + i / S::kCS, i % S::kCS, v[t], heard);
    }
  }
  if constexpr (S::kCS > 1) {
    inbox_wait(heard, group / 2 & 1);
    for (int j = threadIdx.x; j * S::kCS + int(cluster_rank()) < live; j += S::kThreads) {
      int i = j * S::kCS + cluster_rank();
      float v[S::kTiles];
      K3_UNROLL
      for (int t = 0; t < S::kTiles; ++t) v[t] = tree_sum<S::kCS>(inbox + t * S::kOwned + j, S::kTiles * S::kOwned);
      finish(i % kTileRows, i / kTileRows, v);
    }
  }
}

// The whole product of one block: every group of kTiles row tiles that falls to its cluster. Any grid of whole clusters works.
//   w, tiles    packed weights and how many 16-row tiles they have
//   x, stride   tokens, row-major, `stride` elements apart; K of this rank starts at x
//   rows        live tokens; columns beyond are neither read nor written
//   smem        S::kSmem bytes of dynamic shared memory
//   others      blocks at the start of the grid that do something else: whole clusters
// epilogue(row, token, value) runs once for every row and live token; with kPair epilogue(row, token, even, odd) gets two
// neighbouring tiles at once, row counted within either half (gate and up of a GLU).
template <class S, bool kPair = false, class Epilogue>
K3_DEVICE void row_product(const uint4* w, int tiles, const bf16* x, int stride, int rows, u8* smem, Epilogue&& epilogue, int others = 0) {
  int leaf_in_block = warp_id() % S::kWK * S::kWarpLeaves;
  int first_leaf = int(cluster_rank()) * S::kWK * S::kWarpLeaves + leaf_in_block;
  Groups<S> groups(tiles, others);
  typename SourceOf<S, S::kRing>::type source(WeightStream<S>{w, groups, first_leaf, warp_id() / S::kWK * S::kMT}, smem);
  if constexpr (S::kPaced) grid_launch_next();  // a start takes its time
  source.start();
  if constexpr (S::kCS > 1) {
    static_assert(kTileRows % S::kCS == 0, "blocks own equally many pairs");
    if (threadIdx.x == 0) {
      for (int i = 0; i < 2; ++i) barrier_init((u64*)(smem + S::kHeardAt) + i, 1);
      barrier_fence_init();
    }
    __syncthreads();
    cluster_begin();
  }
  if constexpr (!S::kPaced) grid_launch_next();
  grid_wait();
  uint4* shared = (uint4*)(smem + S::kXAt);
  if constexpr (S::kX == kXShared) share_tokens<S>(x, stride, rows, shared);
  LeafRun<S> run(source, Tokens<S>(x, stride, rows, first_leaf), shared + leaf_in_block * S::kPairs * S::kNT * kWarpSize);
#pragma unroll 1
  for (int g = 0; groups.has(g); ++g) {
    Accumulator<S> acc;
    run.template sum<0, S::kWarpLeaves>(acc);
    int block_tile = groups.tile(g);
    combine_leaves<S>(acc, rows, g, smem, [&](int row, int token, const float (&v)[S::kTiles]) {
      static_assert(!kPair || S::kTiles % 2 == 0, "a pair of tiles lies in one block");
      K3_UNROLL
      for (int t = 0; t < S::kTiles; t += kPair ? 2 : 1) {
        if (block_tile + t >= tiles) continue;
        if constexpr (kPair) epilogue((block_tile + t) / 2 * kTileRows + row, token, v[t], v[t + 1]);
        else epilogue((block_tile + t) * kTileRows + row, token, v[t]);
      }
    });
  }
}
