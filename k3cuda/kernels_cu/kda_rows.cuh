// The middle of KDA for steps of 16 to 64 rows, in which most sequences have few: arithmetic and bytes of kda_core.cuh. A block takes a head of
// neighbouring sequences, a block an SM, so that every state is on its way at once. What eight rows need of no state they get together.
#pragma once
#include "kda_wide.cuh"

constexpr int kStateSlots = 2;                  // states in shared memory; one more is in registers

template <class S>
struct KdaRowsSmem {
  // Pieces of four keys, set off so that the eight groups of a warp find theirs in different banks.
  static constexpr int kPiece = 4 * S::kDim, kStride = kPiece + 16, kPieces = S::kDim / 4;
  KdaGatesSmem<S> g;
  float state[kStateSlots][kPieces][kStride];
  u64 full[kStateSlots], empty[kStateSlots];
};

// The sequences that open in part `lane` of `lanes` equal parts of the rows, for one head.
template <class S, class Ready>
K3_DEVICE void kda_rows(const KdaMix& a, KdaRowsSmem<S>& w, int head, int lane, int lanes, Ready ready) {
  static_assert(S::kSplit == 1 && S::kThreads == S::kHolders, "all threads hold state");
  typedef KdaRowsSmem<S> Smem;
  KdaMixSmem<S>& m = w.g.m;
  const KdaRowBits rows(a.row_slot, a.rows);
  const int from = a.rows * lane / lanes, to = a.rows * (lane + 1) / lanes;
  const u64 below = to < 64 ? (u64(1) << to) - 1 : ~u64(0), mine = rows.opens & below & ~((u64(1) << from) - 1);
  if (!mine) {
    if (!rows.opens) ready();                   // a step of nothing but padding still keeps its place in the order of kernels
    return;
  }
  const u64 later = rows.opens & ~below;
  int end = later ? lowest_bit(later) : a.rows;
  while (!(rows.live >> (end - 1) & 1)) --end;
  u64 coming = mine;                            // openings whose states have not been asked for
  auto bring = [&](int k) {                     // the first warp
    if (!coming) return;
    const int first = lowest_bit(coming), at = k % kStateSlots;
    coming &= coming - 1;
    if (k >= kStateSlots) barrier_wait(w.empty + at, k / kStateSlots - 1 & 1);
    if (lane_id() == 0) barrier_expect(w.full + at, S::kDim * S::kDim * sizeof(float));
    __syncwarp();
    const float* state = a.state + (size_t(a.row_slot[first]) * a.heads + head) * S::kDim * S::kDim;
    for (int i = lane_id(); i < Smem::kPieces; i += kWarpSize)
      bulk_copy(w.state[at][i], state + i * Smem::kPiece, Smem::kPiece * sizeof(float), w.full + at);
  };
  if (warp_id() == 0) {
    if (lane_id() < kStateSlots) {
      barrier_init(w.full + lane_id(), 1);
      barrier_init(w.empty + lane_id(), S::kWarps);
      barrier_fence_init();
    }
    __syncwarp();
    for (int k = 0; k < kStateSlots; ++k) bring(k);
  }
  kda_load_weights<S>(a, m, head, 0);
  const float scale = expf(a.a_log[head]);
  ready();
  KdaState<S> state;
  int opened = 0;
#pragma unroll 1
  for (int first = lowest_bit(mine); first < end; first += S::kBatch) {
    const int left = end - first, n = left < S::kBatch ? left : S::kBatch;
    const u32 live = u32(rows.live >> first) & ((1u << n) - 1), opens = u32(rows.opens >> first);
    kda_before<S>(a, w.g, head, first, n, live);
    KdaInputs<S> in;
    in.load(a, head, 0, first, n);
    in.store(m, 0, n);
    copy_wait();
    __syncthreads();
    kda_conv_rows<S>(a, w.g, head, first, n, [&](int r, int column, const f32x2& v) { *(f32x2*)&m.v[r][column] = v; });
    kda_low_rank<S>(m, 0, n);
    __syncthreads();
    kda_decay<S>(a, m, scale, head, 0, first, n);
    kda_l2norm<S>(a, m, head, 0, first, n);
    __syncthreads();
    float o[S::kCols] = {};
    int pending = -1;                           // row whose output is on its way through the warp
    auto put = [&] {
      if (pending < 0) return;
      state.template fold<false>(o, o);
      state.put(o, m.o[pending]);
      pending = -1;
    };
#pragma unroll 1
    for (int r = 0; r < n; ++r) {
      if (!(live >> r & 1)) continue;
      if (opens >> r & 1) {
        put();
        const int at = opened % kStateSlots;
        barrier_wait(w.full + at, opened / kStateSlots & 1);
        state.load_pieces(w.state[at][0], Smem::kStride);
        __syncwarp();
        if (lane_id() == 0) barrier_arrive(w.empty + at);
        if (warp_id() == 0) bring(opened + kStateSlots);
        ++opened;
      }
      state.template advance<true>(m.k[r], m.fade[r], m.v[r], m.beta[r], o);
      if (pending >= 0) state.put(o, m.o[pending]);
      state.partial(m.q[r], o);
      pending = r;
    }
    put();
    __syncthreads();
    kda_finish<S>(a, m, in.gate, head, 0, first, n, first / S::kBatch);
    __syncthreads();                            // the batch is used up
  }
}
