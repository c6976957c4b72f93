// The likeliest tokens of a row and their log-probabilities.
#pragma once
#include "sample_core.cuh"

// Better of two (log-probability, id): the larger, then the lower id.
K3_DEVICE bool better(float a, int ia, float b, int ib) { return a > b || (a == b && ia < ib); }

K3_DEVICE void best_of_warp(float& v, int& i) {
  K3_UNROLL
  for (int d = 1; d < kWarpSize; d *= 2) {
    float ov = __shfl_xor_sync(kFullWarp, v, d);
    int oi = __shfl_xor_sync(kFullWarp, i, d);
    if (better(ov, oi, v, i)) v = ov, i = oi;
  }
}

// b.x: raw logits, then log-probabilities. Every warp sorts out its own likeliest, block 0 merges them.
template <class S>
K3_DEVICE void most_likely(SampleBlock<S>& b, const SampleArgs& a, int row, int count, float top, float log_sum) {
  const float none = __uint_as_float(0xff800000u);
  const int no_id = kSampleNode * S::kNodes;
  float last = __uint_as_float(0x7f800000u);
  int last_id = -1;
  b.each([&](float& s, int j, int) { s = b.exists(j) ? fmaxf(s - top - log_sum, -kLargestFloat) : none; });
#pragma unroll 1
  for (int k = 0; k < count; ++k) {
    float v = none;
    int i = no_id;
    b.each([&](float p, int j, int c) {
      if (better(last, last_id, p, b.id(j, c)) && better(p, b.id(j, c), v, i)) v = p, i = b.id(j, c);
    });
    best_of_warp(v, i);
    if (b.lane == 0) {
      store_remote(&b.m.top[b.node][k], 0, v);
      store_remote(&b.m.top_id[b.node][k], 0, float(i));   // whole and below 2^24
    }
    last = v, last_id = i;
  }
  cluster_arrive();
  cluster_wait();
  if (b.rank != 0 || b.warp != 0) return;
  int head[S::kPerLane] = {};
  for (int k = 0; k < count; ++k) {
    float v = none;
    int i = no_id;
    K3_UNROLL
    for (int h = 0; h < S::kPerLane; ++h) {
      int n = h * kWarpSize + b.lane;
      if (n >= S::kNodes || head[h] >= count) continue;
      const float p = b.m.top[n][head[h]];
      const int q = int(b.m.top_id[n][head[h]]);
      if (better(p, q, v, i)) v = p, i = q;
    }
    const int mine = i;
    best_of_warp(v, i);
    K3_UNROLL
    for (int h = 0; h < S::kPerLane; ++h) {
      int n = h * kWarpSize + b.lane;
      if (mine == i && n == i / kSampleNode) ++head[h];
    }
    if (b.lane == 0 && v > none) {
      a.top_ids[row * kSampleTop + k] = i;
      a.top_logprobs[row * kSampleTop + k] = v;
    }
  }
}
