// The middle of KDA for steps of 16 to 64 rows, in which most sequences have few: arithmetic and bytes of kda_core.cuh. A block takes a head of
// neighbouring sequences, a block an SM, so that every state is on its way at once. What eight rows need of no state they get together. What a
// multiprocessor asks for comes in order, loads that hit a cache too: whatever else a block needs it asks for before its states.
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

// The windows of sequences that end in a batch: behind the last row they are the conv's inputs of that row without the oldest.
template <class S>
K3_DEVICE void kda_keep_windows(const KdaMix& a, const KdaGatesSmem<S>& g, int head, int first, int n, const KdaRowBits& rows, int end) {
  const int channels = a.heads * S::kDim;
  for (int i = threadIdx.x; i < n * S::kConvVectors; i += S::kThreads) {
    const int v = i % S::kConvVectors, r = i / S::kConvVectors, next = first + r + 1;
    const bool goes_on = next < end && (rows.live & ~rows.opens) >> next & 1;
    if (goes_on || !(rows.live >> (next - 1) & 1)) continue;
    bf16* to = a.conv_state + size_t(a.row_slot[next - 1]) * 3 * S::kHistory * channels + kda_vector_at<S>(v, channels * S::kHistory, head, 0);
    K3_UNROLL
    for (int j = 0; j < S::kHistory; ++j)
      *(uint4*)(to + j * channels) = *(const uint4*)(j + 1 < S::kHistory ? &g.before[r][j + 1][v * 8] : &g.m.inputs[r + S::kHistory][v * 8]);
  }
}

// The sequences that open in part `lane` of `lanes` equal parts of the rows, for one head.
template <class S, class Ready>
K3_DEVICE void kda_rows(const KdaMix& a, KdaRowsSmem<S>& w, int head, int lane, int lanes, Ready ready) {
  static_assert(S::kSplit == 1 && S::kThreads == S::kHolders, "all threads hold state");
  typedef KdaRowsSmem<S> Smem;
  KdaMixSmem<S>& m = w.g.m;
  kda_load_weights<S>(a, m, head, 0);
  const float rate = a.a_log[head];
  const KdaRowBits rows(a.row_slot, a.rows);
  const int from = a.rows * lane / lanes, to = a.rows * (lane + 1) / lanes;
  const u64 below = to < 64 ? (u64(1) << to) - 1 : ~u64(0), mine = rows.opens & below & ~((u64(1) << from) - 1);
  if (!mine) {
    if (!rows.opens) ready();                   // a step of nothing but padding still keeps its place in the order of kernels
    copy_wait();
    return;
  }
  const u64 later = rows.opens & ~below;
  int end = later ? lowest_bit(later) : a.rows;
  while (!(rows.live >> (end - 1) & 1)) --end;
  const int opening = lowest_bit(mine);
  auto state_at = [&](int row) { return a.state + (size_t(rows.slot(row)) * a.heads + head) * S::kDim * S::kDim; };
  u64 coming = mine;                            // openings whose states have not been asked for
  auto bring = [&](int k) {                     // who issues a copy is busy with it for some 80 cycles, so every warp issues some
    if (!coming) return;
    const int first = lowest_bit(coming), at = k % kStateSlots;
    coming &= coming - 1;
    if (k >= kStateSlots) barrier_wait(w.empty + at, k / kStateSlots - 1 & 1);
    const float* from = state_at(first);
    if (threadIdx.x == 0) barrier_expect(w.full + at, S::kDim * S::kDim * sizeof(float));
    constexpr int kEach = Smem::kPieces / S::kWarps;
    const int i = warp_id() * kEach + lane_id();
    if (lane_id() < kEach) bulk_copy(w.state[at][i], from + i * Smem::kPiece, Smem::kPiece * sizeof(float), w.full + at);
  };
  if (threadIdx.x < kStateSlots) {
    barrier_init(w.full + threadIdx.x, 1);
    barrier_init(w.empty + threadIdx.x, S::kWarps);
    barrier_fence_init();
  }
  __syncthreads();
  KdaState<S> state;
  float* held = nullptr;                        // where the state in registers belongs
  int opened = 0;
#pragma unroll 1
  for (int first = opening; first < end; first += S::kBatch) {
    const int left = end - first, n = left < S::kBatch ? left : S::kBatch;
    const u32 live = u32(rows.live >> first) & ((1u << n) - 1), opens = u32(rows.opens >> first);
    kda_before<S, true, false>(a, w.g, head, first, n, live);
    if (first == opening) ready();
    kda_before<S, false, true>(a, w.g, head, first, n, live);
    KdaInputs<S> in;
    in.load(a, head, 0, first, n);
    in.store(m, 0, n);
    copy_wait();
    __syncthreads();
    if (first == opening)                       // not before: behind the states of all blocks the memory would bring last what they wait for
      for (int k = 0; k < kStateSlots; ++k) bring(k);
    kda_conv_rows<S>(a, w.g, head, first, n, [&](int r, int column, const f32x2& v) { *(f32x2*)&m.v[r][column] = v; });
    kda_low_rank<S>(m, 0, n);
    __syncthreads();
    kda_decay<S>(a, m, expf(rate), head, 0, first, n);
    kda_l2norm<S>(a, m, head, 0, first, n);
    __syncthreads();
    float o[S::kCols] = {};
    int pending = -1;                           // row whose output is on its way through the warp
#pragma unroll 1
    for (int r = 0; r < n; ++r) {
      if (!(live >> r & 1)) continue;
      if (opens >> r & 1) {
        if (a.advances && held) state.store(held);
        held = state_at(first + r);
        const int at = opened % kStateSlots;
        barrier_wait(w.full + at, opened / kStateSlots & 1);
        state.load_pieces(w.state[at][0], Smem::kStride);
        __syncwarp();
        if (lane_id() == 0) barrier_arrive(w.empty + at);
        bring(opened + kStateSlots);
        ++opened;
      }
      state.template advance<true>(m.k[r], m.fade[r], m.v[r], m.beta[r], o);
      if (pending >= 0) state.put(o, m.o[pending]);
      state.partial(m.q[r], o);
      pending = r;
    }
    if (first + n == end && a.advances) state.store(held);
    if (pending >= 0) {
      state.template fold<false>(o, o);
      state.put(o, m.o[pending]);
    }
    __syncthreads();
    kda_finish<S>(a, m, in.gate, head, 0, first, n, first / S::kBatch);
    if (a.advances) kda_keep_windows<S>(a, w.g, head, first, n, rows, end);
    __syncthreads();                            // the batch is used up
  }
}
