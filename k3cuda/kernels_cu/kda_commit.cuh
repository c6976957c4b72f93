// The commit of KDA: for every layer at once, replays the accepted rows of each sequence from their records, in the arithmetic of
// the forward (KdaState), and moves the conv window on. A sequence with no accepted row moves no byte.
#pragma once
#include "kda_core.cuh"

// Arrays of all layers, this rank's heads; `record_rows` is the rows a layer of the records has room for.
struct KdaCommit {
  const int* row_slot;                          // [rows]
  const u8* row_accepted;                       // [rows]
  int rows, heads, slots, record_rows;
  const bf16* qkv;                              // [layers][record_rows][3][heads dim]
  const float *k, *v, *decay;                   // [layers][record_rows][heads dim]
  const float* beta;                            // [layers][record_rows][heads]
  float* state;                                 // [layers][slots][heads][key][value]
  bf16* conv_state;                             // [layers][slots][3][history][heads dim]
};

template <class S>
struct KdaCommitSmem {
  int row_slot[kStepRows];
  u8 row_accepted[kStepRows];
  float k[S::kBatch][S::kDim], fade[S::kBatch][S::kDim], v[S::kBatch][S::kSlice], beta[S::kBatch];
};

// Slice `part` of one head and layer for the sequence that begins at row `first`. Each block touches its own columns of the state
// and its own channels of the window, nothing else.
template <class S>
K3_DEVICE void kda_commit_sequence(const KdaCommit& a, KdaCommitSmem<S>& m, int layer, int head, int part, int first, int slot) {
  const int tid = threadIdx.x, channels = a.heads * S::kDim;
  const size_t row0 = size_t(layer) * a.record_rows;
  float* state_at = a.state + ((size_t(layer) * a.slots + slot) * a.heads + head) * S::kDim * S::kDim + part * S::kSlice;
  const bool holder = tid < S::kHolders;
  KdaState<S> state;
  float unused[S::kCols];
  const int length = kda_sequence_rows(m.row_slot, a.rows, first, slot);
  int accepted = 0, last[S::kHistory];          // rows of the newest accepted inputs, newest last
#pragma unroll 1
  for (int r = first; r < first + length; r += S::kBatch) {
    const int left = first + length - r, n = left < S::kBatch ? left : S::kBatch;
    u32 take = __ballot_sync(kFullWarp, lane_id() < n && m.row_accepted[lane_id() < n ? r + lane_id() : first] != 0);
    if (take && !accepted && holder) state.load(state_at);
    __syncthreads();                            // the batch before is used up
    for (int i = warp_id(); i < n; i += S::kWarps) {
      if (!(take >> i & 1)) continue;
      size_t at = (row0 + r + i) * channels + head * S::kDim;
      f32x4 f = load4(a.decay + at + 4 * lane_id());
      store4(m.fade[i] + 4 * lane_id(), f32x4{expf(f.x), expf(f.y), expf(f.z), expf(f.w)});
      store4(m.k[i] + 4 * lane_id(), load4(a.k + at + 4 * lane_id()));
      for (int c = lane_id(); c < S::kSlice; c += kWarpSize) m.v[i][c] = a.v[at + part * S::kSlice + c];
      if (lane_id() == 0) m.beta[i] = a.beta[(row0 + r + i) * a.heads + head];
    }
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < n; ++i) {
      if (!(take >> i & 1)) continue;
      if (holder) state.template advance<false>(m.k[i], m.fade[i], m.v[i], m.beta[i], unused);
      K3_UNROLL
      for (int j = 0; j + 1 < S::kHistory; ++j) last[j] = last[j + 1];
      last[S::kHistory - 1] = r + i;
      ++accepted;
    }
  }
  if (!accepted) return;
  if (holder) state.store(state_at);
  kda_move_window<S>(a.conv_state + (size_t(layer) * a.slots + slot) * 3 * S::kHistory * channels, a.qkv + row0 * 3 * channels, channels,
                     head * S::kDim + part * S::kSlice, accepted, [&](int j) { return last[j]; });
}

// Sequences `lane`, lane + lanes, ... of the step, counted by their first row.
template <class S>
K3_DEVICE void kda_commit(const KdaCommit& a, KdaCommitSmem<S>& m, int layer, int head, int part, int lane, int lanes) {
  for (int i = threadIdx.x; i < a.rows; i += S::kThreads) {
    m.row_slot[i] = a.row_slot[i];
    m.row_accepted[i] = a.row_accepted[i];
  }
  __syncthreads();
  kda_each_sequence(m.row_slot, a.rows, lane, lanes, [&](int first, int slot) { kda_commit_sequence<S>(a, m, layer, head, part, first, slot); });
}
