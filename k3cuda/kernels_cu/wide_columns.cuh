// The tiles of wide_core.cuh by wgmma: four warps have neighbouring tiles, a fragment of weights each in registers, and the tensor cores read the tokens of
// all from shared memory. Rows, columns, k and its order are those of mma.sync, and so are the bytes.
#pragma once
#include "wide_ring.cuh"
#ifdef K3_WGMMA

// Tokens as columns in cores: [k-step][8 k of it][token tile]. asked() comes between the last loads and the stores of what they bring.
template <class S, class Asked>
K3_DEVICE void wide_columns(const bf16* x, int stride, u8* shared, Asked&& asked) {
  constexpr int kCore = S::kNT * 128, kAll = S::kPairs * S::kNT, kEach = groups_of(kAll, S::kWarps);
  constexpr int kBatch = groups_of(kEach, groups_of(kEach, 12));   // loads under way
  auto place = [](int i) { return warp_id() + i * S::kWarps; };   // pair of steps and token tile
#pragma unroll 1
  for (int first = 0; first < kEach; first += kBatch) {
    uint4 v[kBatch];
    K3_UNROLL
    for (int i = 0; i < kBatch; ++i) {
      const int at = min_of(place(first + i), kAll - 1), p = at / S::kNT;
      const bf16* from = x + size_t(at % S::kNT * kTokenTile + lane_id() / 4) * stride + p * 32;
      if (S::kSteps % 2 && p == S::kSteps / 2) {
        const uint2 half = load_activations((const uint2*)from + lane_id() % 4);
        v[i] = {half.x, half.y, 0, 0};
      } else {
        v[i] = load_activations((const uint4*)from + lane_id() % 4);
      }
    }
    if (first + kBatch >= kEach) asked();
    K3_UNROLL
    for (int i = 0; i < kBatch; ++i) {
      const int at = place(first + i), p = at / S::kNT;
      if (kEach % kBatch && first + i >= kEach || kAll % S::kWarps && at >= kAll) break;
      u32* to = (u32*)(shared + p * 4 * kCore + at % S::kNT * 128) + lane_id();   // a lane's word of a core: token lane / 4, k 2 (lane % 4) and one more
      to[0] = v[i].x, to[kCore / 4] = v[i].y;
      if (S::kSteps % 2 == 0 || p < S::kSteps / 2) to[2 * kCore / 4] = v[i].z, to[3 * kCore / 4] = v[i].w;
    }
  }
  fence_copies();
  __syncthreads();
}

// One leaf of this warp's tile against every token of the block; where it has none, nothing of use.
template <class S, class Ring>
K3_DEVICE void columns_leaf(float (&c)[S::kNT][4], Ring& ring, const u8* x, bool has_tile) {
  constexpr int kStep = S::kNT * 256;   // bytes of a k-step of all tokens
  const u32 columns = shared_address(x);
  K3_UNROLL
  for (int i = 0; i < S::kNT * 4; ++i) (&c[0][0])[i] = 0.f;
#pragma unroll 1
  for (int chunk = 0; chunk < S::kLeafChunks; ++chunk) {
    uint4 a[S::kChunkSteps] = {};
    if (has_tile) {
      const uint4* w = ring.take();
      K3_UNROLL
      for (int u = 0; u < S::kChunkSteps; ++u) a[u] = w[u * kWarpSize];
    }
    products_begin();
    K3_UNROLL
    for (int u = 0; u < S::kChunkSteps; ++u)
      product<false, false>(c, a[u], columns_in_cores<S::kNT>(columns + (chunk * S::kChunkSteps + u) * kStep), true);
    products_end();
    products_wait<0>();
    if (has_tile) ring.release();
  }
  K3_UNROLL
  for (int i = 0; i < S::kNT * 4; ++i) settle((&c[0][0])[i]);
}

// As token_tiles.
template <class S, class Put>
K3_DEVICE void column_tiles(WideRing<S>& ring, const bf16* x, int stride, u8* smem, int team, int share, Put&& put) {
  wide_columns<S>(x, stride, smem, [&] {
    if (S::kAhead < S::kSlots && warp_id() < S::kRings) ring.fill(S::kAhead, S::kSlots);
  });
#pragma unroll 1
  for (int unit = team < S::kTeams ? team : S::kMostUnits; unit < S::kMostUnits; unit += S::kTeams) {   // the four warps make equal turns
    const WideUnit<S> now(unit, share);
    if (now.first == now.end) break;
    const int tile = now.first + warp_id() % S::kUnit;
    float c[S::kNT][4];
    columns_leaf<S>(c, ring, smem, tile < now.end);
    if (tile < now.end) put(c, tile);
  }
}
#endif
