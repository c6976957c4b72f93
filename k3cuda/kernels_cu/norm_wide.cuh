// norm_core.cuh for steps of many rows: the same sums, so the same bytes, with a warp a chunk of the tree and no cluster: there are rows enough to fill
// the machine. Where there are closed blocks a block has an SM for itself and takes rows one after the other: the closed blocks of a row, and of those
// behind it as far as there is room, come into shared memory while the row before is added up.
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

// kSlots: closed blocks of a row in shared memory.
template <int kN_, int kLeaves_, int kParts_, int kBlocks_>
struct WideMixShape : WideNormShape<kN_, kLeaves_, kParts_, kBlocks_> {
  static constexpr int kSlots = min_of(2 * kBlocks_, (226 * 1024 - int(sizeof(WideNormSmem<WideMixShape>))) / (kN_ * 4 + kLeaves_ * 8));
  static_assert(kSlots >= 1 && WideMixShape::kLeaf % 4 == 0, "pieces are copied in units of 16 bytes");
};

template <class S>
struct WideMixSmem {
  float piece[S::kLeaves][S::kSlots][S::kLeaf];   // a warp's
  u64 full[S::kLeaves][S::kSlots];
  WideNormSmem<S> m;
};

// f(i, element) of a lane's elements of its warp's chunk, rising.
template <class S, class F>
K3_DEVICE void each_of_leaf(F&& f) {
  K3_UNROLL
  for (int i = 0; i < S::kPer; ++i) {
    const int e = i * kWarpSize + lane_id();
    if (S::kLeaf % kWarpSize == 0 || e < S::kLeaf) f(i, warp_id() * S::kLeaf + e);
  }
}

// What joins the prefix sum of a row, an element of a lane each. With one part it can be asked for long before it is used.
template <class S>
struct WideJoined {
  static constexpr bool kAhead = S::kParts == 1;
  float part[S::kPer] = {}, before[S::kPer] = {};
  K3_DEVICE void load(const NormRow& a, int row) {
    if (!kAhead || row < 0) return;
    each_of_leaf<S>([&](int i, int e) {
      if (a.parts) part[i] = a.parts[size_t(row) * S::kN + e];
      if (a.hidden) before[i] = a.hidden[size_t(row) * S::kN + e];
    });
  }
  K3_DEVICE float sum(const NormRow& a, int row, int i, int e) const {   // as `joined`
    if constexpr (!kAhead) return joined<S>(a, size_t(row) * S::kN + e);
    return !a.parts ? before[i] : a.hidden ? part[i] + before[i] : part[i];
  }
};

// Output row `index` of input row `row`, from this lane's elements of p and c. The whole block.
template <class S>
K3_DEVICE void wide_finish(const NormRow& a, WideNormSmem<S>& m, int index, int row, const float (&p)[S::kPer], const float (&c)[S::kPer],
                           const float (&score)[S::kPer], bool mix, float top, float total) {
  float sum[4] = {};
  each_of_leaf<S>([&](int i, int e) {
    keep_prefix(a, size_t(row) * S::kN + e, p[i]);
    sum[0] = fmaf(p[i], p[i], sum[0]);
    if (!mix) return;
    sum[1] = fmaf(p[i], score[i], sum[1]);
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

// The row of the inputs that output row `index` takes; -1: none.
K3_DEVICE int norm_row_of(const NormRow& a, int index) {
  const int row = a.row_map ? a.row_map[index] : index;
  return row < 0 || !a.row_slot || a.row_slot[row] >= 0 ? row : -1;
}

// Output row `index`, without closed blocks, by the whole block. `ready` as of norm_row.
template <class S, class Ready>
K3_DEVICE void wide_norm_row(const NormRow& a, WideNormSmem<S>& m, int index, Ready ready) {
  static_assert(S::kBlocks == 0, "nothing is mixed");
  const int row = norm_row_of(a, index);
  ready();
  if (row < 0) return;
  float p[S::kPer] = {}, none[S::kPer] = {};
  each_of_leaf<S>([&](int i, int e) { p[i] = joined<S>(a, size_t(row) * S::kN + e); });
  wide_finish<S>(a, m, index, row, p, none, none, false, 0, 0);
}

// Output rows blockIdx.x, blockIdx.x + blocks, ... of `count`, at most one a lane. `ready` as of norm_row.
template <class S, class Ready>
K3_DEVICE void wide_mix_rows(const NormRow& a, WideMixSmem<S>& w, int count, int blocks, Ready ready) {
  const int n = a.num_blocks, own = int(blockIdx.x) + lane_id() * blocks, row_here = own < count ? norm_row_of(a, own) : -1;
  const u32 live = __ballot_sync(kFullWarp, row_here >= 0);
  float(&piece)[S::kSlots][S::kLeaf] = w.piece[warp_id()];
  u64* full = w.full[warp_id()];
  // Closed blocks are needed twice, for their scores and for their weighted sum. Where a row's do not fit together they come twice.
  const bool held = n <= S::kSlots;
  const int each = held ? n : 2 * n;
  int coming = 0, next = 0;                     // of the next copy: turn of its row, and which of that row's
  auto issue = [&](int slot) {                  // all lanes
    while (coming < kWarpSize && !(live >> coming & 1)) ++coming;
    if (coming == kWarpSize || n == 0) return;
    const int row = __shfl_sync(kFullWarp, row_here, coming);
    if (lane_id() == 0) {
      barrier_expect(full + slot, S::kLeaf * 4);
      bulk_copy(piece[slot], a.blocks + (size_t(next % n) * a.rows + row) * S::kN + warp_id() * S::kLeaf, S::kLeaf * 4, full + slot);
    }
    if (++next == each) next = 0, ++coming;
  };
  if (lane_id() == 0) {
    for (int i = 0; i < S::kSlots; ++i) barrier_init(full + i, 1);
    barrier_fence_init();
  }
  __syncwarp();
  for (int i = 0; i < S::kSlots; ++i) issue(i);
  float score[S::kPer] = {};
  each_of_leaf<S>([&](int i, int e) { score[i] = a.score[e]; });
  WideJoined<S> ahead;
  bool begun = false;
  int slot = 0;                                 // of the row's first copy
  u32 parity = 0;
  auto take = [&](int& at, u32& phase) {        // waits for a slot and goes on to the next one
    const int taken = at;
    barrier_wait(full + at, phase);
    if (++at == S::kSlots) at = 0, phase ^= 1;
    return taken;
  };
  auto give = [&](int taken) {
    __syncwarp();
    issue(taken);
  };
#pragma unroll 1
  for (int turn = 0; turn < kWarpSize; ++turn) {
    if (!(live >> turn & 1)) continue;
    const int row = __shfl_sync(kFullWarp, row_here, turn);
    float c[S::kPer] = {}, squares[S::kBlocks] = {}, scores[S::kBlocks] = {}, top = 0, total = 0;
    int at = slot;
    u32 phase = parity;
    K3_UNROLL
    for (int j = 0; j < S::kBlocks; ++j) {
      if (j >= n) break;
      const int taken = take(at, phase);
      each_of_leaf<S>([&](int i, int) {
        const float x = piece[taken][i * kWarpSize + lane_id()];
        squares[j] = fmaf(x, x, squares[j]);
        scores[j] = fmaf(x, score[i], scores[j]);
      });
      if (!held) give(taken);
    }
    K3_UNROLL
    for (int j = 0; j < S::kBlocks; ++j) {
      if (j >= n) break;
      squares[j] = warp_sum(squares[j]), scores[j] = warp_sum(scores[j]);
      if (lane_id() == 0) w.m.closed[warp_id()][0][j] = squares[j], w.m.closed[warp_id()][1][j] = scores[j];
    }
    __syncthreads();
    if (n > 0) {
      const float weights = closed_weights<S>(a, w.m.closed, top);
      if (held) at = slot, phase = parity;
#pragma unroll 1
      for (int j = 0; j < n; ++j) {
        const float weight = __shfl_sync(kFullWarp, weights, j);
        total += weight;
        const int taken = take(at, phase);
        each_of_leaf<S>([&](int i, int) { c[i] = fmaf(weight, piece[taken][i * kWarpSize + lane_id()], c[i]); });
        give(taken);
      }
      slot = at, parity = phase;
    }
    if (!begun) {
      ready();
      ahead.load(a, row);
      begun = true;
    }
    float p[S::kPer] = {};
    each_of_leaf<S>([&](int i, int e) { p[i] = ahead.sum(a, row, i, e); });
    const u32 later = turn + 1 < kWarpSize ? live >> (turn + 1) : 0;
    int following = turn + 1;
    for (u32 left = later; left && !(left & 1); left >>= 1) ++following;
    ahead.load(a, later ? __shfl_sync(kFullWarp, row_here, following) : -1);
    wide_finish<S>(a, w.m, int(blockIdx.x) + turn * blocks, row, p, c, score, n > 0, top, total);
  }
  if (!begun) ready();
}
