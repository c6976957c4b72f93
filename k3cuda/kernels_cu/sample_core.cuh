// The parts of the sampler of reference/sample.py on a GPU, for one row of logits, by a cluster of kCluster blocks that hold it in
// registers; sample_row.cuh puts them together. Every sum runs over the reference's binary tree by token id, so a token differs only where exp rounds differently.
//
// A warp owns 1,024 neighbouring ids, a subtree: lane l, in groups j of 128 ids, the four from 128 j + 4 l. What warps tell one another is
// a few numbers a subtree, written into every block of the cluster, which then add or compare all of them alike: no block decides alone.
//
// Top-k and top-p are thresholds found bit by bit, two bits a round: on the order of z = (score - top) / temperature by counting, on the
// bits of w = e^z by masses. A mass never grows with its threshold, so both find what sorting would.
#pragma once
#include "sample_types.cuh"

// kWarps: of a block. Ids: kCluster * kWarps * 1,024 at least kVocab.
template <int kVocab_, int kCluster_, int kWarps_>
struct SampleShape {
  static constexpr int kVocab = kVocab_, kCluster = kCluster_, kWarps = kWarps_, kThreads = kWarps * kWarpSize;
  static constexpr int kNodes = kCluster * kWarps, kPerLane = kNodes <= 32 ? 1 : kNodes <= 64 ? 2 : kNodes <= 128 ? 4 : 8;
  static_assert(kNodes * kSampleNode >= kVocab && kNodes <= 256 && kVocab % 4 == 0 && kCluster <= 8, "a warp owns one subtree");
};

template <class S>
struct SampleSmem {
  float node[2][4][S::kNodes];      // four numbers a subtree, in turn
  float tree[2 * kSampleNode];      // sums of one subtree, or of the subtrees: root at 1, children of n at 2n and 2n + 1
  float target, raw_top, log_sum;
  int chosen;
  float top[S::kNodes][kSampleTop];  // block 0: every subtree's likeliest
  float top_id[S::kNodes][kSampleTop];
};

template <class S>
struct SampleBlock {
  SampleSmem<S>& m;
  const int rank, lane, warp, node;   // node: this warp's subtree
  int turn;
  float x[8][4];                      // scores, then z, then weights

  K3_DEVICE SampleBlock(SampleSmem<S>& m) : m(m), rank(cluster_rank()), lane(lane_id()), warp(warp_id()), node(rank * S::kWarps + warp), turn(0) {}
  K3_DEVICE int id(int j, int c) const { return node * kSampleNode + j * 128 + lane * 4 + c; }
  K3_DEVICE bool exists(int j) const { return node * kSampleNode + j * 128 + lane * 4 < S::kVocab; }

  template <class F>
  K3_DEVICE void each(F f) {            // of this lane's ids, rising
    K3_UNROLL
    for (int j = 0; j < 8; ++j)
      K3_UNROLL
      for (int c = 0; c < 4; ++c) f(x[j][c], j, c);
  }

  // Tells every block up to four numbers of this warp's subtree, and waits until all have told.
  K3_DEVICE void tell(float a, float b = 0, float c = 0, float d = 0) {
    turn ^= 1;
    const float v = lane < 8 ? a : lane < 16 ? b : lane < 24 ? c : d;
    if (lane % 8 < S::kCluster) store_remote(&m.node[turn][lane / 8][node], lane % 8, v);
    cluster_arrive();
    cluster_wait();
  }
  // Sum of number `i` over all subtrees, by the tree.
  K3_DEVICE float sum(int i) const {
    float v[S::kPerLane];
    K3_UNROLL
    for (int k = 0; k < S::kPerLane; ++k) {
      int n = lane * S::kPerLane + k;
      v[k] = n < S::kNodes ? m.node[turn][i][n] : 0;
    }
    return warp_sum(tree_sum<S::kPerLane>(v, 1));
  }
  K3_DEVICE float max(int i) const {
    float v = m.node[turn][i][0];
    for (int n = lane; n < S::kNodes; n += kWarpSize) v = fmaxf(v, m.node[turn][i][n]);
    return warp_max(v);
  }

  // Sum of f(element) over this warp's subtree, by the tree: quads, lanes, then the eight groups. Lanes halve the groups as they meet.
  template <class F>
  K3_DEVICE float subtree(F f) const {
    float q[8];
    K3_UNROLL
    for (int j = 0; j < 8; ++j) q[j] = (f(x[j][0]) + f(x[j][1])) + (f(x[j][2]) + f(x[j][3]));
    K3_UNROLL
    for (int d = 1, n = 4; n; d *= 2, n /= 2) {
      const bool upper = lane & d;
      K3_UNROLL
      for (int i = 0; i < n; ++i) {
        float give = upper ? q[i] : q[i + n], keep = upper ? q[i + n] : q[i];
        q[i] = keep + __shfl_xor_sync(kFullWarp, give, d);
      }
    }
    float v = q[0];
    v += __shfl_xor_sync(kFullWarp, v, 8);
    v += __shfl_xor_sync(kFullWarp, v, 16);
    K3_UNROLL
    for (int d = 4; d; d /= 2) v += __shfl_xor_sync(kFullWarp, v, d);   // groups, neighbours first
    return v;
  }

  // Largest score of the row; infinite where a score is not finite.
  K3_DEVICE float largest() {
    float v = __uint_as_float(0xff800000u);
    bool bad = false;
    each([&](float s, int j, int) {
      v = fmaxf(v, s);
      bad |= exists(j) && !(fabsf(s) <= kLargestFloat);
    });
    v = warp_max(v);
    tell(__any_sync(kFullWarp, bad) ? __uint_as_float(0x7f800000u) : v);
    return max(0);
  }

  K3_DEVICE void load(const float* logits) {
    K3_UNROLL
    for (int j = 0; j < 8; ++j) {
      uint4 v{0xff800000u, 0xff800000u, 0xff800000u, 0xff800000u};
      if (exists(j)) v = load_activations((const uint4*)(logits + id(j, 0)));
      x[j][0] = __uint_as_float(v.x);
      x[j][1] = __uint_as_float(v.y);
      x[j][2] = __uint_as_float(v.z);
      x[j][3] = __uint_as_float(v.w);
    }
  }

  // Scores of this warp's ids among `r`'s entries, and of `last`, the token before the one to be drawn, if they lack it (-1: no such token).
  K3_DEVICE void penalise(const float* logits, const SampleRow& r, const SamplePenalty* p, int last) {
    int low = 0, high = r.penalty_count;
    while (low < high) {
      int middle = (low + high) / 2;
      if (p[middle].id < node * kSampleNode) low = middle + 1;
      else high = middle;
    }
    if (last >= 0 && last / kSampleNode != node) last = -1;
    for (; low < r.penalty_count && p[low].id < (node + 1) * kSampleNode; ++low) {
      const bool again = p[low].id == last;
      penalise_one(logits, r, p[low].id, p[low].count + again);
      if (again) last = -1;
    }
    if (last >= 0) penalise_one(logits, r, last, 1);
  }
  K3_DEVICE void penalise_one(const float* logits, const SampleRow& r, int token, int count) {
    float v = logits[token];
    if (r.repetition != 1.0f) v = v > 0 ? v / r.repetition : v * r.repetition;
    if (count) {
      v -= r.frequency * float(count);
      v -= r.presence;
    }
    v = fminf(fmaxf(v, -kLargestFloat), kLargestFloat);
    const int at = token % kSampleNode;
    if (at % 128 / 4 == lane)
      each([&](float& s, int j, int c) {
        if (j == at / 128 && c == at % 4) s = v;
      });
  }

  // Lowest id whose score is `top`.
  K3_DEVICE int first_of(float top) {
    int found = kSampleNode * S::kNodes;
    K3_UNROLL
    for (int j = 7; j >= 0; --j)
      K3_UNROLL
      for (int c = 3; c >= 0; --c)
        if (x[j][c] == top) found = id(j, c);
    K3_UNROLL
    for (int d = 1; d < kWarpSize; d *= 2) found = min_of(found, __shfl_xor_sync(kFullWarp, found, d));
    tell(-float(found));               // ids are whole and below 2^24
    return int(-max(0));
  }
  K3_DEVICE static int min_of(int a, int b) { return a < b ? a : b; }

  // Bits of a float in the order of its value, -0 as 0.
  K3_DEVICE static u32 order(float z) {
    u32 u = __float_as_uint(z + 0.0f);
    return u >> 31 ? ~u : u | 0x80000000u;
  }
  // Largest t for which enough(how many numbers of three thresholds reach it): `bits` even; reach(t) tells the number for threshold t.
  template <class Reach>
  K3_DEVICE u32 threshold(int bits, float wanted, Reach reach) {
    u32 t = 0;
    for (int shift = bits - 2; shift >= 0; shift -= 2) {
      tell(reach(t | 1u << shift), reach(t | 2u << shift), reach(t | 3u << shift));
      u32 k = sum(0) >= wanted ? sum(1) >= wanted ? sum(2) >= wanted ? 3 : 2 : 1 : 0;
      t |= k << shift;
    }
    return t;
  }

  // x: z. Leaves the law of the row there.
  K3_DEVICE void filter(const SampleRow& r) {
    u32 lowest = 0;
    each([&](float& z, int j, int) { z = __uint_as_float(exists(j) ? order(z) : 0); });   // in place: another 32 registers are not there
    if (r.top_k > 0 && r.top_k < S::kVocab)
      lowest = threshold(32, float(r.top_k), [&](u32 t) {
        float n = 0;
        each([&](float& z, int, int) { n += __float_as_uint(z) >= t ? 1.0f : 0.0f; });
        return warp_sum(n);
      });
    each([&](float& z, int j, int) {
      const u32 key = __float_as_uint(z);
      const float w = expf(__uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key));
      z = exists(j) && key >= lowest && (r.min_p <= 0 || w >= r.min_p) ? w : 0;
    });
    if (r.top_p >= 1) return;
    tell(subtree([](float w) { return w; }));
    const float wanted = r.top_p * sum(0);
    const u32 t = threshold(30, wanted, [&](u32 t) {        // weights are at most 1, below 2^30 as bits
      const float at = __uint_as_float(t);
      return subtree([=](float w) { return w >= at ? w : 0.0f; });
    });
    const float at = __uint_as_float(t);
    each([=](float& w, int, int) { w = w >= at ? w : 0; });
  }

  // One warp: m.tree[count ...] holds leaves; adds them up. Then walks down from the root.
  K3_DEVICE void grow(int count) {
    for (int n = count / 2; n; n /= 2) {
      __syncwarp();
      for (int i = lane; i < n; i += kWarpSize) m.tree[n + i] = m.tree[2 * (n + i)] + m.tree[2 * (n + i) + 1];
    }
    __syncwarp();
  }
  K3_DEVICE int descend(int count, float& target) const {
    int n = 1;
    while (n < count) {
      n *= 2;
      const float left = m.tree[n], right = m.tree[n + 1];
      if (target >= left && right > 0) target -= left, ++n;
    }
    return n - count;
  }

  // Inverse CDF; x: weights. The chosen id in the warp that owns it, -1 elsewhere.
  K3_DEVICE int pick(float u) {
    constexpr int kTop = S::kPerLane * kWarpSize;
    tell(subtree([](float w) { return w; }));
    if (warp == 0) {
      for (int i = lane; i < kTop; i += kWarpSize) m.tree[kTop + i] = i < S::kNodes ? m.node[turn][0][i] : 0;
      grow(kTop);
      if (lane == 0) {
        float target = u * m.tree[1];
        m.chosen = descend(kTop, target);
        m.target = target;
      }
    }
    __syncthreads();
    if (m.chosen != node) return -1;
    each([&](float w, int j, int c) { m.tree[kSampleNode + j * 128 + lane * 4 + c] = w; });
    grow(kSampleNode);
    float target = m.target;
    return node * kSampleNode + descend(kSampleNode, target);
  }
};
