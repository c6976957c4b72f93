// The middle of KDA for steps of few rows: all parts of kda_core.cuh in one kernel, a cluster of blocks a head.
#pragma once
#include "kda_core.cuh"

// Block `part` of the cluster of `head`, for the sequence whose oldest row of this step is `first`; a block of another row, or
// of padding, does nothing. `ready` is called once, when weights, conv window and state are on their way and what this step's
// earlier kernels wrote is needed: state and window may be loaded before it because no kernel between commit and here writes them.
template <class S, class Ready>
K3_DEVICE void kda_mix(const KdaMix& a, KdaMixSmem<S>& m, int head, int part, int first, Ready ready) {
  int slot = a.row_slot[first];
  if (slot < 0 || (first > 0 && a.row_slot[first - 1] == slot)) {
    if (first == 0) ready();                    // a step of nothing but padding still keeps its place in the order of kernels
    return;
  }
  const bool holder = threadIdx.x < S::kHolders;
  KdaState<S> state;
  if (holder) state.load(a.state + (size_t(slot) * a.heads + head) * S::kDim * S::kDim + part * S::kSlice);
  if constexpr (S::kSplit > 1) inboxes_begin<2>(m.inbox);
  kda_load_weights<S>(a, m, head, part);
  const int channels = a.heads * S::kDim;       // the window: nothing of this step writes it
  kda_load_window<S>(m, a.conv_state + size_t(slot) * 3 * S::kHistory * channels, channels * S::kHistory, channels, head, part);
  const float scale = expf(a.a_log[head]);
  const int length = kda_sequence_rows(a.row_slot, a.rows, first, slot);
  if constexpr (S::kSplit > 1) cluster_wait();  // every block's inbox stands
  ready();

  KdaInputs<S> in;
  in.load(a, head, part, first, length);
  for (int done = 0; done < length; done += S::kBatch) {
    const int row = first + done, left = length - done, n = left < S::kBatch ? left : S::kBatch;
    in.store(m, done, n);
    copy_wait();
    __syncthreads();
    if (n == 1) kda_conv<S, 1>(a, m, head, part, row, done, n);
    else kda_conv<S, 4>(a, m, head, part, row, done, n);
    kda_low_rank<S>(m, done, n);
    float gate[S::kGates];
    K3_UNROLL
    for (int i = 0; i < S::kGates; ++i) gate[i] = in.gate[i];
    if (left > S::kBatch) in.load(a, head, part, row + S::kBatch, left - S::kBatch);   // under what follows
    __syncthreads();
    kda_decay<S>(a, m, scale, head, part, row, n);
    kda_l2norm<S>(a, m, head, part, row, n);
    __syncthreads();
    if (holder) kda_recur<S>(state, m, n);
    __syncthreads();
    kda_finish<S>(a, m, gate, head, part, row, n, done / S::kBatch);
  }
}
