// One row of hidden state between two halves of a layer: the sum of ranks' parts joins the prefix sum, AttnRes mixes it with the
// closed blocks, RMSNorm makes the next input. Here are the parts of it; norm_row.cuh, norm_wide.cuh and launch_mix.cuh put them together.
//
// Closed blocks don't change until the next snapshot, so their scores, their softmax-weighted sum c and its squares need not wait for
// this step. What waits for the parts is p and four sums: p p, p score, p c, c c. With s the score of p and
// Z the closed blocks' weights, x = (c + e^s p) / (Z + e^s), and x x follows from the same four: one exchange.
// Its error is that of x x times (|alpha c|^2 + |beta p|^2) / |x|^2, far inside BF16 unless c and p cancel to 1 part in 1,000.
//
// Sums over a row: kLeaves contiguous chunks; in a chunk 32 lanes take elements l, l + 32, ... in rising order by fmaf from zero, then
// lanes and chunks meet as neighbours. Sums over ranks: neighbours first.
#pragma once
#include "exchange.cuh"
#include "row_shape.cuh"

// kN: row length. kLeaves: weights.tree_leaves(kN). kParts: ranks. kBlocks: closed blocks at most, 0 where there is no mixture.
// kCluster: blocks a row. kNormed: else what would be normed is stored as it is. kOutStride: elements from row to row of the result.
template <int kN_, int kLeaves_, int kParts_, int kBlocks_, int kCluster_, int kThreads_, bool kNormed_ = true, int kOutStride_ = kN_>
struct NormShape {
  static constexpr bool kNormed = kNormed_;
  static constexpr int kOutStride = kOutStride_;
  static constexpr int kN = kN_, kLeaves = kLeaves_, kParts = kParts_, kBlocks = kBlocks_, kCluster = kCluster_, kThreads = kThreads_;
  static constexpr int kWarps = kThreads / kWarpSize;
  static constexpr int kLeaf = kN / kLeaves, kOwnLeaves = kLeaves / kCluster, kOwn = kLeaf * kOwnLeaves;
  static constexpr int kPer = (kOwn + kThreads - 1) / kThreads;
  static constexpr int kVector = kBlocks && kPer % 2 == 0 && kN % 2 == 0 && kOwn % 2 == 0 ? 2 : 1, kVectors = kPer / kVector;   // runs of norm_row's threads
  static constexpr bool kHeld = kPer <= 2;                 // closed blocks stay in registers; else, in many blocks an SM, only in shared memory
  static constexpr int kRows = kBlocks > 2 ? kBlocks : 2;  // vectors that lie in shared memory at once
  static_assert(kN % kLeaves == 0 && kLeaves % kCluster == 0 && kLeaves <= 16 && kCluster <= kWarpSize, "blocks take whole chunks");
  static_assert(kBlocks <= 8, "a warp combines two sums of every block");
};

struct NormRow {
  const int* row_slot;                          // [rows], -1 pads; null: every row is live
  const int* row_map;                           // row of the inputs that output row i takes, -1 for none; null: i itself
  int rows, part_rows;                          // of a block, and of a rank's part: their strides
  const float* parts;                           // [ranks][part_rows][n]; null: nothing joins
  const float* hidden;                          // [rows][n]; null: the sum of parts is all
  float* hidden_out;                            // [rows][n], may be `hidden`; null: not kept
  float* snapshot;                              // [rows][n]: the closed block this row's sum becomes, hidden_out then 0; null: none
  const float* blocks;                          // [num_blocks][rows][n], in order of creation
  int num_blocks;
  const float* score;                           // [n], norm times projection
  const bf16* weight;                           // [n]
  bf16* out;                                    // [rows][n]
  float eps;
};

// sum_e a[e] b[e] over one chunk; a warp.
template <class S, class Team = WholeBlock>
K3_DEVICE float leaf_dot(const float* a, const float* b, const Team& team = {}) {
  float sum = 0;
#pragma unroll 7
  for (int i = 0; i < (S::kLeaf + kWarpSize - 1) / kWarpSize; ++i) {
    int e = i * kWarpSize + team.lane();
    if (e < S::kLeaf) sum = fmaf(a[e], b[e], sum);
  }
  return warp_sum(sum);
}

// Elements from `at` on of [rows][n]: the ranks' parts, then what was there.
template <class S, int kVector = 1, bool kOnce = false>
K3_DEVICE Neighbours<float, kVector> joined(const NormRow& a, size_t at) {
  typedef Neighbours<float, kVector> V;
  auto get = [](const float* p) { if constexpr (kOnce && kVector == 1) return V{load_once(p)}; else return *(const V*)p; };
  V sum = a.hidden ? get(a.hidden + at) : V{};
  if (!a.parts) return sum;
  V part[S::kParts];
  K3_UNROLL
  for (int k = 0; k < S::kParts; ++k) part[k] = get(a.parts + size_t(k) * a.part_rows * S::kN + at);
  K3_UNROLL
  for (int i = 0; i < kVector; ++i) {
    const float parts = tree_sum<S::kParts>(&part[0].v[i], kVector);
    sum.v[i] = a.hidden ? parts + sum.v[i] : parts;
  }
  return sum;
}

// e^(s_j - top) of closed block j in lane j, from the sums of every chunk; `top`: the highest score.
template <class S, class Team = WholeBlock>
K3_DEVICE float closed_weights(const NormRow& a, const float (&closed)[S::kLeaves][2][8], float& top, const Team& team = {}) {
  // Lane 8 w + j has sum w (0 squares, 1 scores) of block j; lanes from 16 repeat them.
  int j = team.lane() % 8, w = team.lane() / 8 % 2;
  float sum = j < a.num_blocks ? tree_sum<S::kLeaves>(&closed[0][w][j], 16) : 0;
  float squares = __shfl_sync(kFullWarp, sum, j), score = __shfl_sync(kFullWarp, sum, 8 + j);
  score *= inverse_sqrt(squares * (1.0f / S::kN) + a.eps);
  K3_UNROLL
  for (int k = 0; k < S::kBlocks; ++k) {
    float s = __shfl_sync(kFullWarp, score, k);
    if (k < a.num_blocks) top = k ? fmaxf(top, s) : s;
  }
  return expf(score - top);
}

// 1 / rms of the mixture x = alpha c + beta p, from the four sums of every chunk; without closed blocks the first is all, and x is p.
template <class S, class Team = WholeBlock>
K3_DEVICE float mixed(const NormRow& a, const float (&sums)[S::kLeaves][4], bool mix, float top, float total, float& alpha, float& beta, const Team& team = {}) {
  const int used = mix ? 4 : 1;
  // Lane 4 q + w adds chunks 2 q and 2 q + 1 of sum w; the lanes of one w then meet as neighbours.
  int q = team.lane() / 4, w = team.lane() % 4;
  float sum = 2 * q < S::kLeaves && w < used ? sums[2 * q][w] : 0;
  if (2 * q + 1 < S::kLeaves && w < used) sum += sums[2 * q + 1][w];
  K3_UNROLL
  for (int d = 4; d < kWarpSize; d *= 2) sum += __shfl_xor_sync(kFullWarp, sum, d);
  float pp = __shfl_sync(kFullWarp, sum, 0), xx = pp;
  alpha = 0, beta = 1;
  if (mix) {
    float ps = __shfl_sync(kFullWarp, sum, 1), pc = __shfl_sync(kFullWarp, sum, 2), cc = __shfl_sync(kFullWarp, sum, 3);
    float s = ps * inverse_sqrt(pp * (1.0f / S::kN) + a.eps), high = fmaxf(top, s);
    float ec = expf(top - high), ep = expf(s - high), scale = reciprocal(fmaf(ec, total, ep));
    alpha = ec * scale;
    beta = ep * scale;
    xx = fmaxf(fmaf(alpha * alpha, cc, fmaf(2 * alpha * beta, pc, beta * beta * pp)), 0.0f);
  }
  return inverse_sqrt(xx * (1.0f / S::kN) + a.eps);
}

// Squares and scores of the closed blocks over this block's chunks: tell(chunk, 0 squares or 1 scores, closed block, sum) by whole warps.
template <class S, class Tell, class Team = WholeBlock>
K3_DEVICE void closed_sums(const float (*source)[S::kOwn], const float* score, int num_blocks, Tell&& tell, const Team& team = {}) {
  for (int job = team.warp(); job < 2 * num_blocks * S::kOwnLeaves; job += S::kWarps) {
    int leaf = job % S::kOwnLeaves, which = job / S::kOwnLeaves % 2, j = job / S::kOwnLeaves / 2;
    const float* x = source[j] + leaf * S::kLeaf;
    tell(leaf, which, j, leaf_dot<S>(x, which ? score + leaf * S::kLeaf : x, team));
  }
}

// The four sums (or p p alone) over this block's chunks of p, in source[0], and c, in source[1]: tell(chunk, which, sum) by whole warps.
template <class S, class Tell, class Team = WholeBlock>
K3_DEVICE void prefix_sums(const float (*source)[S::kOwn], const float* score, bool mix, Tell&& tell, const Team& team = {}) {
  for (int job = team.warp(); job < (mix ? 4 : 1) * S::kOwnLeaves; job += S::kWarps) {
    int leaf = job % S::kOwnLeaves, which = job / S::kOwnLeaves, at = leaf * S::kLeaf;
    const float *x = source[0] + at, *closed = source[1] + at;
    tell(leaf, which, leaf_dot<S>(which == 3 ? closed : x, which == 0 ? x : which == 1 ? score + at : closed, team));
  }
}

// This thread's elements of c = sum_j e^(s_j - top) v_j, and total = sum_j e^(s_j - top). weights: e^(s_j - top) in lane j. value(j, i): v_j.
template <class S, class Value>
K3_DEVICE void weighted_closed(int num_blocks, float weights, float (&c)[S::kPer], float& total, Value&& value) {
  K3_UNROLL
  for (int i = 0; i < S::kPer; ++i) c[i] = 0;
  total = 0;
  K3_UNROLL
  for (int k = 0; k < S::kBlocks; ++k) {
    float e = __shfl_sync(kFullWarp, weights, k);
    if (k >= num_blocks) continue;
    total += e;
    K3_UNROLL
    for (int i = 0; i < S::kPer; ++i) c[i] = fmaf(e, value(k, i), c[i]);
  }
}

// Elements that this thread has of closed block j, of the row and cluster block where `at` begins; all loads at once.
template <class S, class Team = WholeBlock>
K3_DEVICE void load_closed(float (&v)[max_of(S::kBlocks, 1)][S::kPer], const NormRow& a, size_t at, bool live, const Team& team = {}) {
  K3_UNROLL
  for (int i = 0; i < S::kPer; ++i) {
    const int e = team.thread() + i * S::kThreads;
    K3_UNROLL
    for (int j = 0; j < S::kBlocks; ++j) v[j][i] = live && e < S::kOwn && j < a.num_blocks ? a.blocks[size_t(j) * a.rows * S::kN + at + e] : 0;
  }
}

// What joined at `at`, a float or neighbours, becomes the prefix sum, or a closed block and the sum begins anew.
template <class T>
K3_DEVICE void keep_prefix(const NormRow& a, size_t at, const T& p) {
  if (a.snapshot) *(T*)(a.snapshot + at) = p;
  if (a.hidden_out) *(T*)(a.hidden_out + at) = a.snapshot ? T{} : p;
}

// An element of the mixture, and what the next half layer reads of it.
K3_DEVICE float mixture_value(bool mix, float alpha, float beta, float c, float p) { return mix ? fmaf(alpha, c, beta * p) : p; }
template <class S>
K3_DEVICE float normed_value(bool mix, float alpha, float beta, float c, float p, float inv, float weight) {
  float x = mixture_value(mix, alpha, beta, c, p);
  return S::kNormed ? x * inv * weight : x;
}
