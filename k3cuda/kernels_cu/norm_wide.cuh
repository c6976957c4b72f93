// norm_core.cuh for steps of more rows than clusters are good for: the same sums, so the same bytes, with a block a row and a warp a chunk of the
// tree. Closed blocks are needed twice, for their scores and for their weighted sum. Some stay in shared memory, where bulk copies bring them, some in
// registers; what finds no room there comes from the L2 the second time. No cluster, so nobody waits for another block.
#pragma once
#include "norm_core.cuh"

constexpr int kSmShared = 228 << 10, kBlockShared = 1 << 10;   // shared memory of a multiprocessor, and what each of its blocks takes unseen

// As NormShape. kFew: not more rows than multiprocessors, so that a block has one to itself.
template <int kN_, int kLeaves_, int kParts_, int kBlocks_, bool kFew_ = false>
struct WideNormShape {
  static constexpr bool kFew = kFew_;
  static constexpr int kN = kN_, kLeaves = kLeaves_, kParts = kParts_, kBlocks = kBlocks_, kLeaf = kN / kLeaves, kThreads = kLeaves * kWarpSize;
  static constexpr int kPer = (kLeaf + kWarpSize - 1) / kWarpSize;   // elements of a lane
  static constexpr int kResident = kPer <= 16 && !kFew ? 2 : 1;      // blocks that a multiprocessor's registers hold
  static constexpr int kRoom = (kSmShared / kResident - 3 * kBlockShared - kN * 2) / (kN * 4);
  static constexpr int kHeld = min_of(kBlocks, (kFew ? 56 : 14) / kPer);               // closed blocks in registers
  static constexpr int kKept = min_of(kFew ? kBlocks - kHeld : kBlocks, kRoom);        // and in shared memory
  static_assert(kN % kLeaves == 0 && kLeaves <= 16 && kBlocks <= 8, "a warp combines two sums of every block");
  static_assert(kN % 8 == 0, "bulk copies of 16 bytes");
};

template <class S>
struct WideNormSmem {
  alignas(16) float kept[max_of(S::kKept, 1)][S::kKept ? S::kN : 1];
  alignas(16) bf16 weight[S::kKept ? S::kN : 1];
  u64 landed[S::kKept + 1];                              // of each kept block; of the weight
  float closed[S::kLeaves][2][8], sums[S::kLeaves][4];   // as NormSmem
};

// f(i, element) of a lane's elements of its warp's chunk, rising. 64 bits: added to an address they become one register and constants.
template <class S, class F>
K3_DEVICE void each_of_leaf(F&& f) {
  const size_t first = warp_id() * S::kLeaf + lane_id();
  K3_UNROLL
  for (int i = 0; i < S::kPer; ++i)
    if (S::kLeaf % kWarpSize == 0 || i * kWarpSize + lane_id() < S::kLeaf) f(i, first + i * kWarpSize);
}

// Output row `index` by the whole block. `ready` as of norm_row.
template <class S, class Ready>
K3_DEVICE void wide_norm_row(const NormRow& a, WideNormSmem<S>& m, int index, Ready ready) {
  const int row = a.row_map ? a.row_map[index] : index;
  const size_t own = size_t(row) * S::kN, next = size_t(a.rows) * S::kN;
  const int closed = S::kBlocks && row >= 0 ? a.num_blocks : 0;
  const int kept = min_of(S::kFew ? max_of(closed - S::kHeld, 0) : closed, S::kKept);   // the first ones
  const int held = min_of(closed - kept, S::kHeld), first_held = closed - held;         // the last ones
  const bool mix = closed > 0;
  auto value = [&](int j, size_t e) { return load_once(a.blocks + (j * next + own) + e); };
  // Everything is on its way before anything is looked at.
  if constexpr (S::kKept > 0) {
    if (threadIdx.x == 0 && row >= 0) {
      K3_UNROLL
      for (int j = 0; j <= S::kKept; ++j) barrier_init(&m.landed[j], 1);
      barrier_fence_init();
      K3_ROLLED
      for (int j = 0; j < kept; ++j) {
        barrier_expect(&m.landed[j], S::kN * 4);
        bulk_copy(m.kept[j], a.blocks + j * next + own, S::kN * 4, &m.landed[j]);
      }
      barrier_expect(&m.landed[S::kKept], S::kN * 2);
      bulk_copy(m.weight, a.weight, S::kN * 2, &m.landed[S::kKept]);
    }
  }
  float c[S::kPer] = {}, hold[max_of(S::kHeld, 1)][S::kPer] = {}, score[S::kPer], top = 0, total = 0;
  K3_UNROLL
  for (int h = 0; h < S::kHeld; ++h)
    if (h < held) each_of_leaf<S>([&](int i, size_t e) { hold[h][i] = value(first_held + h, e); });
  if (mix) each_of_leaf<S>([&](int i, size_t e) { score[i] = a.score[e]; });
  const int slot = row < 0 || !a.row_slot ? row : a.row_slot[row];
  if constexpr (S::kKept > 0) __syncthreads();   // barriers stand
  auto weight_landed = [&] { if constexpr (S::kKept > 0) barrier_wait(&m.landed[S::kKept], 0); };
  if (slot < 0) {
    if (row >= 0) {   // nobody ends before his copies
      for (int j = 0; j < kept; ++j) barrier_wait(&m.landed[j], 0);
      weight_landed();
    }
    ready();
    return;
  }
  if (S::kBlocks > 0 && mix) {
    auto scored = [&](int j, auto&& v) {
      float sum[2] = {};   // squares, scores
      each_of_leaf<S>([&](int i, size_t e) {
        const float x = v(i, e);
        sum[0] = fmaf(x, x, sum[0]);
        sum[1] = fmaf(x, score[i], sum[1]);
      });
      const float all = warp_sums(sum);
      if (lane_id() < 2) m.closed[warp_id()][lane_id()][j] = all;
    };
    K3_ROLLED
    for (int j = kept; j < first_held; ++j) {
      float v[S::kPer];
      each_of_leaf<S>([&](int i, size_t e) { v[i] = value(j, e); });
      scored(j, [&](int i, int) { return v[i]; });
    }
    K3_UNROLL
    for (int h = 0; h < S::kHeld; ++h)
      if (h < held) scored(first_held + h, [&](int i, int) { return hold[h][i]; });
    K3_UNROLL
    for (int j = 0; j < S::kKept; ++j)
      if (j < kept) {
        barrier_wait(&m.landed[j], 0);
        scored(j, [&](int, size_t e) { return m.kept[j][e]; });
      }
    __syncthreads();
    const float e = closed_weights<S>(a, m.closed, top);
    auto add = [&](int k, auto&& v) {
      const float weight = __shfl_sync(kFullWarp, e, k);
      total += weight;
      each_of_leaf<S>([&](int i, size_t at) { c[i] = fmaf(weight, v(i, at), c[i]); });
    };
    K3_UNROLL
    for (int k = 0; k < S::kKept; ++k)
      if (k < kept) add(k, [&](int, size_t at) { return m.kept[k][at]; });
    K3_ROLLED
    for (int k = kept; k < first_held; ++k) add(k, [&](int, size_t at) { return value(k, at); });
    K3_UNROLL
    for (int h = 0; h < S::kHeld; ++h)
      if (h < held) add(first_held + h, [&](int i, int) { return hold[h][i]; });
  }
  ready();
  float p[S::kPer] = {}, sum[4] = {};
  each_of_leaf<S>([&](int i, size_t e) { p[i] = joined<S, 1, true>(a, own + e).v[0]; });
  if (float* to = a.snapshot ? a.snapshot : a.hidden_out) each_of_leaf<S>([&](int i, size_t e) { to[own + e] = p[i]; });
  if (a.snapshot && a.hidden_out) each_of_leaf<S>([&](int, size_t e) { a.hidden_out[own + e] = 0; });
  if (mix && !S::kFew) each_of_leaf<S>([&](int i, size_t e) { score[i] = a.score[e]; });
  each_of_leaf<S>([&](int i, size_t e) {
    sum[0] = fmaf(p[i], p[i], sum[0]);
    if (!mix) return;
    sum[1] = fmaf(p[i], score[i], sum[1]);
    sum[2] = fmaf(p[i], c[i], sum[2]);
    sum[3] = fmaf(c[i], c[i], sum[3]);
  });
  const float all = warp_sums(sum);
  if (lane_id() < 4) m.sums[warp_id()][lane_id()] = all;
  __syncthreads();
  weight_landed();
  float alpha, beta;
  const float inv = mixed<S>(a, m.sums, mix, top, total, alpha, beta);
  each_of_leaf<S>([&](int i, size_t e) {
    const float x = mix ? fmaf(alpha, c[i], beta * p[i]) : p[i];
    a.out[size_t(index) * S::kN + e] = float_to_bf16(x * inv * bf16_to_float(S::kKept ? m.weight[e] : a.weight[e]));
  });
}
