// What a draft's stages share: a row's RMSNorm by one block, rotation, and which sequence a row of a product stands for.
//
// Sums over a row have the tree of norm_core.cuh: a warp takes a leaf, lanes elements l, l + 32, ... by fmaf from zero, then lanes and
// leaves meet as neighbours.
#pragma once
#include "stages/common.cuh"

constexpr int kNormThreads = 512;

// Norms a row of kN values: load(e) gives one, store(e, x, inv) takes it with 1 / rms. Whole blocks of kNormThreads.
template <int kN, int kLeaves, class Load, class Store>
K3_DEVICE void block_norm(float eps, Load&& load, Store&& store) {
  constexpr int kWarps = kNormThreads / kWarpSize, kLeaf = kN / kLeaves, kValues = ceil_div(kLeaf, kWarpSize);
  static_assert(kLeaves <= kWarps && kN % kLeaves == 0, "a warp takes a leaf");
  __shared__ float sums[kWarps];
  const bool mine = warp_id() < kLeaves;
  float v[kValues], sum = 0;
  K3_UNROLL
  for (int i = 0; i < kValues; ++i) {
    int e = lane_id() + i * kWarpSize;
    v[i] = mine && e < kLeaf ? load(warp_id() * kLeaf + e) : 0;
    sum = fmaf(v[i], v[i], sum);
  }
  sum = warp_sum(sum);
  if (lane_id() == 0) sums[warp_id()] = sum;
  __syncthreads();
  const float inv = inverse_sqrt(tree_sum<kLeaves>(sums, 1) * (1.0f / kN) + eps);
  K3_UNROLL
  for (int i = 0; i < kValues; ++i) {
    int e = lane_id() + i * kWarpSize;
    if (mine && e < kLeaf) store(warp_id() * kLeaf + e, v[i], inv);
  }
}

// Cosine and sine of a number of turns. Whole turns are taken off in F64, since positions reach a million.
K3_DEVICE void turn_of(double turns, float& cosine, float& sine) {
  turns -= floor(turns);
#ifdef K3_HOST_SHIM
  const double angle = turns * 6.283185307179586476925286766559;
  cosine = float(cos(angle)), sine = float(sin(angle));
#else
  double c, s;
  sincospi(2 * turns, &s, &c);
  cosine = float(c), sine = float(s);
#endif
}

// Element e of a head of kRopeDim values turned to `position`; at(e) gives one that is not.
template <class At>
K3_DEVICE float rotated(int e, int position, At&& at) {
  if (!kRope) return at(e);
  constexpr int kHalf = kRopeDim / 2;
  const int pair = kRopeInterleaved ? e / 2 : e % kHalf;
  const bool second = kRopeInterleaved ? e % 2 : e >= kHalf;
  float c, s;
  turn_of(position * kTurns[pair], c, s);
  c *= kRopeMagnitude, s *= kRopeMagnitude;
  const float a = at(kRopeInterleaved ? 2 * pair : pair), b = at(kRopeInterleaved ? 2 * pair + 1 : pair + kHalf);
  return second ? a * s + b * c : a * c - b * s;
}

// Row at which the block of a sequence begins, or -1 where a product's column stands for no sequence of the step.
K3_DEVICE int first_row_of(const Step& s, int seq) {
  const int row = seq * kBlockRows;
  return row < kRows && row_slot(s)[row] >= 0 ? row : -1;
}
// Row of logits that gives draft `draft` of a sequence.
K3_DEVICE int logit_row_of(int seq, int draft) { return seq * kNumDrafts + draft; }

// Where the cache row of a position lies.
K3_DEVICE int cache_page(const Step& s, int slot, int position) { return page_table(s)[size_t(slot) * s.slot_pages + position / kPageSize]; }
