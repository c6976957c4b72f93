// norm_core.cuh for steps of many rows: the same sums, so the same bytes, with a block a row and a warp a chunk of the tree. Closed blocks are
// read twice, for their scores and for their weighted sum, since a row of all of them fits neither registers nor shared memory beside
// another row's; the second time they come from the L2. No cluster: there are rows enough to fill the machine.
#pragma once
#include "norm_core.cuh"

// As NormShape.
template <int kN_, int kLeaves_, int kParts_, int kBlocks_>
struct WideNormShape {
  static constexpr int kN = kN_, kLeaves = kLeaves_, kParts = kParts_, kBlocks = kBlocks_, kLeaf = kN / kLeaves, kThreads = kLeaves * kWarpSize;
  static constexpr int kPer = (kLeaf + kWarpSize - 1) / kWarpSize;   // elements of a lane
  static constexpr int kResident = kPer <= 16 ? 2 : 1;               // blocks that a multiprocessor's registers hold
  static_assert(kN % kLeaves == 0 && kLeaves <= 16 && kBlocks <= 8, "a warp combines two sums of every block");
};

template <class S>
struct WideNormSmem { float closed[S::kLeaves][2][8], sums[S::kLeaves][4]; };   // as NormSmem

// f(i, element) of a lane's elements of its warp's chunk, rising.
template <class S, class F>
K3_DEVICE void each_of_leaf(F&& f) {
  K3_UNROLL
  for (int i = 0; i < S::kPer; ++i) {
    const int e = i * kWarpSize + lane_id();
    if (S::kLeaf % kWarpSize == 0 || e < S::kLeaf) f(i, warp_id() * S::kLeaf + e);
  }
}

// Output row `index` by the whole block. `ready` as of norm_row.
template <class S, class Ready>
K3_DEVICE void wide_norm_row(const NormRow& a, WideNormSmem<S>& m, int index, Ready ready) {
  const int row = a.row_map ? a.row_map[index] : index, slot = row < 0 || !a.row_slot ? row : a.row_slot[row];
  if (slot < 0) {
    ready();
    return;
  }
  const size_t own = size_t(row) * S::kN, next = size_t(a.rows) * S::kN;
  const bool mix = S::kBlocks > 0 && a.num_blocks > 0;
  float c[S::kPer] = {}, top = 0, total = 0;
  if (mix) {
#pragma unroll 2
    for (int j = 0; j < a.num_blocks; ++j) {
      float v[S::kPer], squares = 0, scores = 0;
      each_of_leaf<S>([&](int i, int e) { v[i] = a.blocks[j * next + own + e]; });
      each_of_leaf<S>([&](int i, int e) {
        squares = fmaf(v[i], v[i], squares);
        scores = fmaf(v[i], a.score[e], scores);
      });
      squares = warp_sum(squares), scores = warp_sum(scores);
      if (lane_id() == 0) m.closed[warp_id()][0][j] = squares, m.closed[warp_id()][1][j] = scores;
    }
    __syncthreads();
    float e = closed_weights<S>(a, m.closed, top);
#pragma unroll 2
    for (int k = 0; k < a.num_blocks; ++k) {
      const float weight = __shfl_sync(kFullWarp, e, k);
      total += weight;
      each_of_leaf<S>([&](int i, int at) { c[i] = fmaf(weight, a.blocks[k * next + own + at], c[i]); });
    }
  }
  ready();
  float p[S::kPer] = {}, sum[4] = {};
  each_of_leaf<S>([&](int i, int e) { p[i] = joined<S>(a, own + e); });
  each_of_leaf<S>([&](int i, int e) {
    keep_prefix(a, own + e, p[i]);
    sum[0] = fmaf(p[i], p[i], sum[0]);
    if (!mix) return;
    sum[1] = fmaf(p[i], a.score[e], sum[1]);
    sum[2] = fmaf(p[i], c[i], sum[2]);
    sum[3] = fmaf(c[i], c[i], sum[3]);
  });
  K3_UNROLL
  for (int w = 0; w < 4; ++w) {
    sum[w] = warp_sum(sum[w]);
    if (lane_id() == 0) m.sums[warp_id()][w] = sum[w];
  }
  __syncthreads();
  float alpha, beta;
  const float inv = mixed<S>(a, m.sums, mix, top, total, alpha, beta);
  each_of_leaf<S>([&](int i, int e) {
    const float x = mix ? fmaf(alpha, c[i], beta * p[i]) : p[i];
    a.out[size_t(index) * S::kN + e] = float_to_bf16(x * inv * bf16_to_float(a.weight[e]));
  });
}
