// The product of a step of 128 rows and more: the arithmetic and the packed weights of row_core.cuh, laid out for many tokens.
// A block keeps its tokens' part of one leaf of K in shared memory and lets the leaf's weights of many row tiles pass; each warp takes
// tiles of its own, so no warp waits for another. Leaf sums go to memory as fragments, where a second kernel adds them in the tree.
// A byte of the result depends on none of it: a leaf is one chain of MMAs from zero, leaves meet as neighbours.
#pragma once
#include "exchange.cuh"
#include "row_core.cuh"

constexpr int kWideShared = 227 * 1024, kWideTokens = 118 * 1024;   // bytes of shared memory: of a block, of its tokens at most

//   kTotal, kLeaves, kSteps  16-row tiles of the product; leaves of K that this rank holds, and k-steps in each
//   kRows                    tokens, whole groups of 64
template <int kTotal_, int kLeaves_, int kSteps_, int kRows_>
struct WideShape {
  static constexpr int kTotal = kTotal_, kLeaves = kLeaves_, kSteps = kSteps_, kRows = kRows_;
  static constexpr int kPairs = (kSteps + 1) / 2, kTileX = kPairs * kStepBytes;          // bytes of eight tokens' part of a leaf
  // Token tiles of a block. Short products have few weights to read twice.
  static constexpr int kNT = kLeaves > 1 && kRows % 128 == 0 && 16 * kTileX <= kWideTokens ? 16 : 8;
  static constexpr int kMT = kLeaves == 1 ? 2 : 32 / kNT, kWarps = 8, kThreads = kWarps * kWarpSize;   // row tiles of a warp; 128 sums a thread at most
  static constexpr int kTokenTiles = kRows / kTokenTile, kGroups = kTokenTiles / kNT, kX = kNT * kTileX;
  static constexpr int kChunkSteps = chunk_steps(kSteps, 4, false), kLeafChunks = kSteps / kChunkSteps;
  static constexpr int kTileChunk = kChunkSteps * kStepBytes, kChunkBytes = kMT * kTileChunk;
  static constexpr int kSlots = min_of(6, (kWideShared - kX) / (kWarps * (kChunkBytes + 8)));
  static constexpr int kRingAt = kX, kBarrierAt = kRingAt + kWarps * kSlots * kChunkBytes;
  static constexpr int kSmem = kBarrierAt + kWarps * kSlots * 8;
  static constexpr bool kFits = kX <= kWideTokens && kSlots >= 2;
};

// Blocks of the product: of every leaf and group of tokens as many as the machine holds side by side.
template <class S>
constexpr int wide_blocks(int sms) {
  return S::kLeaves * S::kGroups * max_of(1, min_of(sms / (S::kLeaves * S::kGroups), groups_of(S::kTotal, S::kWarps)));
}
template <class S, bool kPair>
constexpr int wide_sum_blocks() {
  return S::kLeaves == 1 ? 0 : groups_of(groups_of(S::kTotal, kPair ? 2 : 1) * S::kTokenTiles, S::kWarps);
}

// Chunks of weights through slots of a warp's own. Ring: gives `issue(slot)`, lane 0's next copy, if there is one.
template <class S, class Ring>
struct WarpRing {
  u8* slots;
  u64* full;
  int slot = 0;          // in use
  u32 parity = 0;

  K3_DEVICE WarpRing(u8* smem) : slots(smem + S::kRingAt + warp_id() * S::kSlots * S::kChunkBytes), full((u64*)(smem + S::kBarrierAt) + warp_id() * S::kSlots) {}
  K3_DEVICE void start() {
    if (lane_id() == 0) {
      for (int s = 0; s < S::kSlots; ++s) barrier_init(full + s, 1);
      barrier_fence_init();
      for (int s = 0; s < S::kSlots; ++s) ((Ring*)this)->issue(s);
    }
    __syncwarp();
  }
  K3_DEVICE const uint4* take() {
    barrier_wait(full + slot, parity);
    return (const uint4*)(slots + slot * S::kChunkBytes) + lane_id();
  }
  K3_DEVICE void release() {
    __syncwarp();
    if (lane_id() == 0) ((Ring*)this)->issue(slot);
    if (++slot == S::kSlots) slot = 0, parity ^= 1;
  }
};

// A warp's tiles, `count` of them at a time, chunk by chunk.
template <class S>
struct WideRing : WarpRing<S, WideRing<S>> {
  using WarpRing<S, WideRing>::slots, WarpRing<S, WideRing>::full;
  const uint4* w;        // of the leaf, tile 0
  int tile, end, chunk = 0;   // of the next copy

  K3_DEVICE WideRing(const uint4* w, int first, int end, u8* smem) : WarpRing<S, WideRing>(smem), w(w), tile(first), end(end) {}
  K3_DEVICE void issue(int to) {   // lane 0
    if (tile >= end) return;
    int count = min_of(S::kMT, end - tile);
    barrier_expect(full + to, count * S::kTileChunk);
    for (int m = 0; m < count; ++m)
      bulk_copy(slots + to * S::kChunkBytes + m * S::kTileChunk,
                w + (size_t(tile + m) * S::kLeaves * S::kSteps + chunk * S::kChunkSteps) * kWarpSize, S::kTileChunk, full + to);
    if (++chunk == S::kLeafChunks) chunk = 0, tile += S::kMT;
  }
};

// Tokens in fragment order: [pair of steps][token tile][lane]. x: at the leaf, the block's first token.
template <class S>
K3_DEVICE void wide_tokens(const bf16* x, int stride, uint4* shared) {
  for (int i = warp_id(); i < S::kPairs * S::kNT; i += S::kWarps) {
    int p = i / S::kNT, token = i % S::kNT * kTokenTile + lane_id() / 4;
    const bf16* from = x + size_t(token) * stride + p * 32;
    uint4* to = shared + i * kWarpSize + lane_id();
    if (S::kSteps % 2 && p == S::kSteps / 2) copy_async<8>(to, from + lane_id() % 4 * 4);
    else copy_async<16>(to, from + lane_id() % 4 * 8);
  }
  copy_wait();
  __syncthreads();
}

// One leaf of `count` tiles against every token of the block. kAll: of S::kMT, without branches, so that tokens are loaded under the products before.
template <class S, bool kAll, class Ring>
K3_DEVICE void wide_leaf(float (&c)[S::kMT][S::kNT][4], Ring& ring, const uint4* x, int count) {
  constexpr int kBatch = min_of(8, S::kNT);   // token tiles whose loads are on their way together; more would not fit the registers
  K3_UNROLL
  for (int i = 0; i < S::kMT * S::kNT * 4; ++i) (&c[0][0][0])[i] = 0.f;
#pragma unroll 1
  for (int chunk = 0; chunk < S::kLeafChunks; ++chunk) {
    const uint4* w = ring.take();
    K3_UNROLL
    for (int u = 0; u < S::kChunkSteps; u += 2) {
      const bool second = u + 1 < S::kChunkSteps;
      const uint4* pair = x + ((chunk * S::kChunkSteps + u) / 2 * S::kNT) * kWarpSize + lane_id();
      uint4 a[2][S::kMT];
      K3_UNROLL
      for (int m = 0; m < S::kMT; ++m) {
        a[0][m] = w[(m * S::kChunkSteps + u) * kWarpSize];
        if (second) a[1][m] = w[(m * S::kChunkSteps + u + 1) * kWarpSize];
      }
      K3_UNROLL
      for (int first = 0; first < S::kNT; first += kBatch) {
        uint4 b[kBatch];
        K3_UNROLL
        for (int n = 0; n < kBatch; ++n) b[n] = pair[(first + n) * kWarpSize];
        K3_UNROLL
        for (int m = 0; m < S::kMT; ++m) {
          if (!kAll && m >= count) break;
          K3_UNROLL
          for (int n = 0; n < kBatch; ++n) mma(c[m][first + n], a[0][m], b[n].x, b[n].y);
          if (second) {
            K3_UNROLL
            for (int n = 0; n < kBatch; ++n) mma(c[m][first + n], a[1][m], b[n].z, b[n].w);
          }
        }
      }
    }
    ring.release();
  }
}

// w: packed weights. x: tokens, `stride` elements apart. With one leaf epilogue(row, token, value) gets the results, for every token of
// kRows; with more, `partial` gets leaf sums [tile][token tile][leaf][lane] for wide_sum. wide_blocks blocks, S::kSmem bytes.
template <class S, class Epilogue>
K3_DEVICE void wide_product(const uint4* w, const bf16* x, int stride, f32x4* partial, u8* smem, Epilogue&& epilogue) {
  constexpr int kShared = S::kLeaves * S::kGroups;
  const int leaf = int(blockIdx.x) % S::kLeaves, group = int(blockIdx.x) / S::kLeaves % S::kGroups;
  const int share = int(blockIdx.x) / kShared * S::kWarps + warp_id(), shares = int(gridDim.x) / kShared * S::kWarps;
  int tile = S::kTotal * share / shares;
  const int end = S::kTotal * (share + 1) / shares;
  WideRing<S> ring(w + size_t(leaf) * S::kSteps * kWarpSize, tile, end, smem);
  ring.start();
  grid_launch_next();
  grid_wait();
  wide_tokens<S>(x + size_t(group) * S::kNT * kTokenTile * stride + leaf * S::kSteps * 16, stride, (uint4*)smem);
#pragma unroll 1
  for (; tile < end; tile += S::kMT) {
    float c[S::kMT][S::kNT][4];
    const int count = min_of(S::kMT, end - tile);
    if (count == S::kMT) wide_leaf<S, true>(c, ring, (const uint4*)smem, count);
    else wide_leaf<S, false>(c, ring, (const uint4*)smem, count);
    K3_UNROLL
    for (int m = 0; m < S::kMT; ++m) {
      if (m >= count) break;
      K3_UNROLL
      for (int n = 0; n < S::kNT; ++n) {
        const int token_tile = group * S::kNT + n;
        if constexpr (S::kLeaves > 1) {
          f32x4* to = partial + ((size_t(tile + m) * S::kTokenTiles + token_tile) * S::kLeaves + leaf) * kWarpSize + lane_id();
          *to = f32x4{c[m][n][0], c[m][n][1], c[m][n][2], c[m][n][3]};
        } else {
          K3_UNROLL   // each a run of eight rows of four tokens: whole sectors
          for (int i = 0; i < 4; ++i) epilogue((tile + m) * kTileRows + lane_id() / 4 + i / 2 * 8, token_tile * kTokenTile + lane_id() % 4 * 2 + i % 2, c[m][n][i]);
        }
      }
    }
  }
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

// Adds leaf sums and finishes; epilogue as in row_product. wide_sum_blocks blocks of S::kThreads threads.
template <class S, bool kPair, class Epilogue>
K3_DEVICE void wide_sum(const f32x4* partial, Epilogue&& epilogue) {
  constexpr int kTiles = kPair ? 2 : 1;
  grid_wait();
  grid_launch_next();
  const int job = int(blockIdx.x) * S::kWarps + warp_id(), token_tile = job % S::kTokenTiles, tile = job / S::kTokenTiles * kTiles;
  if (tile >= S::kTotal) return;
  f32x4 v[kTiles];
  K3_UNROLL
  for (int t = 0; t < kTiles; ++t)   // an odd last tile has no neighbour: its place is not used
    v[t] = wide_tree<S::kLeaves>(partial + (size_t(min_of(tile + t, S::kTotal - 1)) * S::kTokenTiles + token_tile) * S::kLeaves * kWarpSize + lane_id());
  auto row_of = [&](int i) { return tile / kTiles * kTileRows + lane_id() / 4 + i / 2 * 8; };
  auto token_of = [&](int i) { return token_tile * kTokenTile + lane_id() % 4 * 2 + i % 2; };
  if constexpr (kPair) {
    K3_UNROLL
    for (int i = 0; i < 4; ++i) epilogue(row_of(i), token_of(i), (&v[0].x)[i], (&v[1].x)[i]);
  } else {
    float addend[4];
    K3_UNROLL
    for (int i = 0; i < 4; ++i) addend[i] = addend_of(epilogue, row_of(i), token_of(i));
    K3_UNROLL
    for (int i = 0; i < 4; ++i) finish(epilogue, row_of(i), token_of(i), (&v[0].x)[i], addend[i]);
  }
}
