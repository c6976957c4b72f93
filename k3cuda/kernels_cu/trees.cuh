// Fixed trees inside a warp and over leaves: neighbours first, the same order whatever the data.
#pragma once
#include "prims.cuh"

K3_DEVICE float warp_sum(float v) {
  K3_UNROLL
  for (int d = 1; d < kWarpSize; d *= 2) v += __shfl_xor_sync(kFullWarp, v, d);
  return v;
}
// warp_sum of kCount (a power of two) values at once, the same bytes: of value l % kCount in lane l. As long as there are several, lanes share them out.
template <int kCount>
K3_DEVICE float warp_sums(const float (&v)[kCount], int d = 1) {
  if constexpr (kCount == 1) {
    float sum = v[0];
    K3_UNROLL
    for (; d < kWarpSize; d *= 2) sum += __shfl_xor_sync(kFullWarp, sum, d);
    return sum;
  } else {
    float half[kCount / 2];
    const bool odd = lane_id() & d;
    K3_UNROLL
    for (int i = 0; i < kCount / 2; ++i) half[i] = (odd ? v[2 * i + 1] : v[2 * i]) + __shfl_xor_sync(kFullWarp, odd ? v[2 * i] : v[2 * i + 1], d);
    return warp_sums(half, 2 * d);
  }
}
K3_DEVICE float warp_max(float v) {
  K3_UNROLL
  for (int d = 1; d < kWarpSize; d *= 2) {
    float o = __shfl_xor_sync(kFullWarp, v, d);
    v = v > o ? v : o;
  }
  return v;
}

// Sum of kCount (a power of two) values `stride` apart, adding neighbours: the canonical tree over leaves.
template <int kCount>
K3_DEVICE float tree_sum(const float* v, int stride) {
  if constexpr (kCount == 1) return v[0];
  else return tree_sum<kCount / 2>(v, stride) + tree_sum<kCount / 2>(v + kCount / 2 * stride, stride);
}
// The same of kRun neighbours, each by itself.
template <int kCount, int kRun>
K3_DEVICE Neighbours<float, kRun> tree_sums(const float* v, int stride) {
  if constexpr (kCount == 1) return *(const Neighbours<float, kRun>*)v;
  else {
    Neighbours<float, kRun> sums = tree_sums<kCount / 2, kRun>(v, stride), right = tree_sums<kCount / 2, kRun>(v + kCount / 2 * stride, stride);
    K3_UNROLL
    for (int i = 0; i < kRun; ++i) sums.v[i] += right.v[i];
    return sums;
  }
}
