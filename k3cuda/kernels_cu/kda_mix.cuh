// The middle of KDA for steps of few rows: all parts of kda_core.cuh in one kernel, a cluster of blocks a head.
#pragma once
#include "kda_core.cuh"

// Block `part` of the cluster of `head`, for the sequence whose oldest row of this step is `first`; a block of another row, or
// of padding, does nothing. `ready` is called once, when weights, conv window and state are on their way and what this step's
// earlier kernels wrote is needed: state and window may be loaded before it because no kernel between commit and here writes them.
// kOnce: no sequence has more rows than a batch, and no registers are kept for the next one's.
template <class S, bool kOnce = false, class Ready>
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
  for (int done = 0; kOnce || done < length; done += S::kBatch) {
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
    if (!kOnce && left > S::kBatch) in.load(a, head, part, row + S::kBatch, left - S::kBatch);   // under what follows
    __syncthreads();
    kda_decay<S>(a, m, scale, head, part, row, n);
    kda_l2norm<S>(a, m, head, part, row, n);
    __syncthreads();
    if (holder) kda_recur<S>(state, m, n);
    __syncthreads();
    kda_finish<S>(a, m, gate, head, part, row, n, done / S::kBatch);
    if constexpr (kOnce) break;
  }
}

// What a half of a head's cluster `lane` of `lanes` does in a step of few rows: where these are enough for the step's sequences, both halves
// have the same one, else each has its own.
struct KdaShare {
  bool halves;
  int first;                                    // row that opens the sequence, -1 for none

  K3_DEVICE KdaShare(u64 opens, int lane, int lanes, int half) {
    u64 mine = opens;
    for (int i = 0; i < lanes; ++i) mine &= mine - (mine != 0);
    halves = __builtin_expect(mine != 0, 0);    // a single sequence goes straight ahead in the code
    mine = opens;
    for (int i = halves ? 2 * lane + half : lane; i; --i) mine &= mine - (mine != 0);
    first = mine ? lowest_bit(mine) : -1;
  }
};

// A step of up to Whole::kBatch rows by clusters of Whole::kSplit blocks, `lanes` for each head.
template <class Whole, class Half, class Ready>
K3_DEVICE void kda_mix_spread(const KdaMix& a, u8* smem, int head, int lane, int lanes, Ready ready) {
  static_assert(Whole::kSplit == 2 * Half::kSplit && Whole::kThreads == Half::kThreads, "halves of a cluster");
  const int block = int(cluster_rank());
  const u64 opens = KdaRowBits(a.row_slot, a.rows).opens;
  const KdaShare share(opens, lane, lanes, block / Half::kSplit);
  if (share.first < 0) {
    if (!opens && lane == 0) ready();           // a step of nothing but padding still keeps its place in the order of kernels
    if (share.halves) {                         // the other half's blocks wait for all of the cluster
      cluster_begin();
      cluster_wait();
    }
  } else if (share.halves) {
    kda_mix<Half, true>(a, *(KdaMixSmem<Half>*)smem, head, block % Half::kSplit, share.first, ready);
  } else {
    kda_mix<Whole, true>(a, *(KdaMixSmem<Whole>*)smem, head, block, share.first, ready);
  }
}
