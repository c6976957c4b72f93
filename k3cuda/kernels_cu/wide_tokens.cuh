// The tiles of wide_core.cuh by mma.sync: tokens lie in fragment order, and each warp loads them for tiles of its own.
#pragma once
#include "wide_ring.cuh"

// Tokens in fragment order: [leaf][pair of steps][token tile][lane]. kLeaves: of a block that may have several; 0: one. x: at the first, the block's first token.
template <class S, int kLeaves = 0>
K3_DEVICE void wide_tokens(const bf16* x, int stride, uint4* shared) {
  for (int i = warp_id(); i < max_of(kLeaves, 1) * S::kPairs * S::kNT; i += S::kWarps) {
    const int pair = i / S::kNT, p = kLeaves ? pair % S::kPairs : pair, leaf = kLeaves ? pair / S::kPairs : 0;
    const int token = i % S::kNT * kTokenTile + lane_id() / 4;
    const bf16* from = x + size_t(token) * stride + leaf * S::kSteps * 16 + p * 32;
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

// The team's units against every token of the block. x: at the leaf, the block's first token. put(leaf sums, tile).
template <class S, class Put>
K3_DEVICE void token_tiles(WideRing<S>& ring, const bf16* x, int stride, u8* smem, int team, int share, Put&& put) {
  wide_tokens<S>(x, stride, (uint4*)smem);
#pragma unroll 1
  for (int unit = team; unit < S::kMostUnits; unit += S::kTeams) {
    const WideUnit<S> now(unit, share);
    const int tile = now.first, count = now.end - tile;
    if (count == 0) break;
    float c[S::kMT][S::kNT][4];
    if (count == S::kMT) wide_leaf<S, true>(c, ring, (const uint4*)smem, count);
    else wide_leaf<S, false>(c, ring, (const uint4*)smem, count);
    K3_UNROLL
    for (int m = 0; m < S::kMT; ++m) {
      if (m >= count) break;
      put(c[m], tile + m);
    }
  }
}
