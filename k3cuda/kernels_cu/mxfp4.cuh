// MXFP4 weights as tensor operands. A 32-group is an MMA chain of two from zero, times its power-of-two scale, added in group order.
// Expanded weights are 2^-126 too small (their exponent bits land at the bottom of BF16's) and tokens come multiplied by
// kTokenFactor; the stored factor exponent undoes both, exactly. Layout and bit order: k3cuda/runtime/repack.py.
#pragma once
#include "row_core.cuh"

constexpr u32 kTokenFactor = 0x5f805f80u;   // 2^64, twice, in BF16

// Eight weights of one word: four BF16 pairs, a whole A fragment of one k-step. What both terms of the last pair bring cancels: words are stored so.
K3_DEVICE uint4 expand_mxfp4(u32 w) {
  constexpr u32 kMask = 0x81c081c0u;
  const u32 turned = funnel_left(w, w, 22);
  uint4 a;
  a.x = w & kMask;
  a.y = turned << 4 & kMask;
  a.z = w << 4 & kMask;
  a.w = (turned ^ turned << 8) & kMask;
  return a;
}

K3_DEVICE uint4 scale_tokens(uint4 x) {
  return {mul_bf16x2(x.x, kTokenFactor), mul_bf16x2(x.y, kTokenFactor), mul_bf16x2(x.z, kTokenFactor), mul_bf16x2(x.w, kTokenFactor)};
}

constexpr int scale_words(int groups) { return (groups + 3) / 4; }
constexpr int mxfp4_leaf_bytes(int groups) { return groups * 256 + scale_words(groups) * 64; }

// Factor of group `j` of the four in a word of exponents.
K3_DEVICE float scale_factor(u32 exponents, int j) {
  return __uint_as_float((j < 3 ? exponents << (23 - 8 * j) : exponents >> 1) & 0x7f800000u);
}

K3_DEVICE void mxfp4_group(float (&sum)[4], u32 first, u32 second, const uint4& x, uint2 exponents, int j) {
  float c[4] = {0.f, 0.f, 0.f, 0.f};
  mma(c, expand_mxfp4(first), x.x, x.y);
  mma(c, expand_mxfp4(second), x.z, x.w);
  float low = scale_factor(exponents.x, j), high = scale_factor(exponents.y, j);   // rows g and g + 8
  sum[0] = fmaf(c[0], low, sum[0]);
  sum[1] = fmaf(c[1], low, sum[1]);
  sum[2] = fmaf(c[2], high, sum[2]);
  sum[3] = fmaf(c[3], high, sum[3]);
}

// Where in a leaf this lane's bytes lie: its words, those of an odd last group, its rows' scales. Asked for anew, or kept from turn to turn.
struct LeafLaneNow {
  K3_DEVICE static const uint4* words(const u8* leaf) { return (const uint4*)leaf + lane_id(); }
  K3_DEVICE static const uint2* odd(const u8* group) { return (const uint2*)group + lane_id(); }
  K3_DEVICE static const uint2* scales(const u8* all) { return (const uint2*)all + lane_id() / 4; }
};
struct LeafLane {
  int words_at, odd_at, scales_at;
  K3_DEVICE static LeafLane here() { return {lane_id() * 16, lane_id() * 8, lane_id() / 4 * 8}; }
  K3_DEVICE const uint4* words(const u8* leaf) const { return (const uint4*)(leaf + words_at); }
  K3_DEVICE const uint2* odd(const u8* group) const { return (const uint2*)(group + odd_at); }
  K3_DEVICE const uint2* scales(const u8* all) const { return (const uint2*)(all + scales_at); }
};

// One tile's leaf, in shared memory, against one 8-token tile, of which x(group) is 32 values.
template <int kGroups, class X, class Lane = LeafLaneNow>
K3_DEVICE void mxfp4_leaf_with(float (&sum)[4], const u8* leaf, X&& x, const Lane& at = {}) {
  const uint4* words = at.words(leaf);
  const uint2* scales = at.scales(leaf + kGroups * 256);
  sum[0] = sum[1] = sum[2] = sum[3] = 0.f;
  uint2 exponents;
  K3_UNROLL
  for (int g = 0; g < kGroups; g += 2) {
    if (g % 4 == 0) exponents = scales[g / 4 * 8];
    if (g + 1 < kGroups) {
      uint4 w = words[g / 2 * kWarpSize];
      mxfp4_group(sum, w.x, w.y, x(g), exponents, g % 4);
      mxfp4_group(sum, w.z, w.w, x(g + 1), exponents, g % 4 + 1);
    } else {
      uint2 w = *at.odd(leaf + g * 256);
      mxfp4_group(sum, w.x, w.y, x(g), exponents, g % 4);
    }
  }
}
template <int kGroups>
K3_DEVICE void mxfp4_leaf(float (&sum)[4], const u8* leaf, const uint4* x, const LeafLane& at = LeafLane::here()) {
  mxfp4_leaf_with<kGroups>(sum, leaf, [&](int g) { return x[g]; }, at);
}

// The same against the first kTiles tiles of tokens: every weight is expanded once. x: from kFirst on, this leaf's.
template <int kGroups, int kFirst, int kTiles, int kTokenTiles, int kX>
K3_DEVICE void mxfp4_leaf_of_tiles(float (&sum)[kTokenTiles][4], const u8* leaf, const uint4 (&x)[kTokenTiles][kX]) {
  const uint4* words = (const uint4*)leaf + lane_id();
  const uint2* scales = (const uint2*)(leaf + kGroups * 256) + lane_id() / 4;
  K3_UNROLL
  for (int i = 0; i < kTiles * 4; ++i) (&sum[0][0])[i] = 0.f;
  uint2 exponents;
  uint4 w;
  K3_UNROLL
  for (int g = 0; g < kGroups; ++g) {
    if (g % 4 == 0) exponents = scales[g / 4 * 8];
    if (g % 2 == 0 && g + 1 < kGroups) w = words[g / 2 * kWarpSize];
    if (g % 2 == 0 && g + 1 == kGroups) {
      const uint2 odd = ((const uint2*)(leaf + g * 256))[lane_id()];
      w.x = odd.x, w.y = odd.y;
    }
    const uint4 first = expand_mxfp4(g % 2 ? w.z : w.x), second = expand_mxfp4(g % 2 ? w.w : w.y);
    const float low = scale_factor(exponents.x, g % 4), high = scale_factor(exponents.y, g % 4);
    float c[kTiles][4] = {};
    K3_UNROLL
    for (int n = 0; n < kTiles; ++n) mma(c[n], first, x[n][kFirst + g].x, x[n][kFirst + g].y);
    K3_UNROLL
    for (int n = 0; n < kTiles; ++n) mma(c[n], second, x[n][kFirst + g].z, x[n][kFirst + g].w);
    K3_UNROLL
    for (int n = 0; n < kTiles; ++n) {
      sum[n][0] = fmaf(c[n][0], low, sum[n][0]);
      sum[n][1] = fmaf(c[n][1], low, sum[n][1]);
      sum[n][2] = fmaf(c[n][2], high, sum[n][2]);
      sum[n][3] = fmaf(c[n][3], high, sum[n][3]);
    }
  }
}

// Leaf kLeaf of one tile against the first `tiles` tiles of tokens, at least one. Each number has code of its own: branches inside would keep
// one tile's products from hiding another's.
template <int kGroups, int kLeaf, int kTiles = 1, int kTokenTiles, int kX>
K3_DEVICE void mxfp4_of_tiles(float (&sum)[kTokenTiles][4], const u8* leaves, const uint4 (&x)[kTokenTiles][kX], int tiles) {
  if constexpr (kTiles < kTokenTiles) {
    if (tiles > kTiles) return mxfp4_of_tiles<kGroups, kLeaf, kTiles + 1>(sum, leaves, x, tiles);
  }
  mxfp4_leaf_of_tiles<kGroups, kLeaf * kGroups, kTiles>(sum, leaves + kLeaf * mxfp4_leaf_bytes(kGroups), x);
}

// Leaves kFirst onward of one tile, neighbours added first.
template <int kGroups, int kFirst, int kCount>
K3_DEVICE void mxfp4_leaves(float (&sum)[4], const u8* leaves, const uint4* x, const LeafLane& at) {
  if constexpr (kCount == 1) mxfp4_leaf<kGroups>(sum, leaves + kFirst * mxfp4_leaf_bytes(kGroups), x + kFirst * kGroups, at);
  else {
    float right[4];
    mxfp4_leaves<kGroups, kFirst, kCount / 2>(sum, leaves, x, at);
    mxfp4_leaves<kGroups, kFirst + kCount / 2, kCount / 2>(right, leaves, x, at);
    K3_UNROLL
    for (int i = 0; i < 4; ++i) sum[i] += right[i];
  }
}
