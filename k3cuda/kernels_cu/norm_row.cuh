// A row of norm_core.cuh spread over the blocks of a cluster, each with whole chunks of the tree. What follows from the closed blocks
// alone is made before `ready`, under the kernel before.
#pragma once
#include "norm_core.cuh"

// Blocks a row: as many as leave each 512 values and more.
constexpr int norm_spread(int size, int leaves) {
  int n = 1;
  while (2 * n <= min_of(leaves, 8) && size / (2 * n) >= 512) n *= 2;
  return n;
}

template <class S>
struct NormSmem {
  float source[S::kRows][S::kOwn], score[S::kBlocks ? S::kOwn : 1];
  float closed[S::kLeaves][2][8];               // per chunk: squares and scores of the closed blocks
  float sums[S::kLeaves][4];                    // per chunk: p p, p score, p c, c c
  u64 inbox[2];
};

// To every block of the cluster; lanes are blocks.
template <class S>
K3_DEVICE void tell(float* local, float v, u64* inbox) {
  if constexpr (S::kCluster == 1) {
    if (lane_id() == 0) *local = v;
  } else {
    if (lane_id() < S::kCluster) send(local, lane_id(), v, inbox);
  }
}

template <class S>
K3_DEVICE void hear(u64* inbox, u32 bytes) {
  if constexpr (S::kCluster == 1) {
    __syncthreads();
  } else {
    if (threadIdx.x == 0) inbox_expect(inbox, bytes);
    inbox_wait(inbox, 0);
  }
}

// body(i, e) for every run of neighbours that this thread has of a row: elements e on, in the thread's arrays i on.
template <class S, class Body>
K3_DEVICE void each_run(Body&& body) {
  K3_UNROLL
  for (int j = 0; j < S::kVectors; ++j) {
    const int e = (j * S::kThreads + int(threadIdx.x)) * S::kVector;
    if (e < S::kOwn) body(j * S::kVector, e);
  }
}

// Scores, weights and weighted sum of the closed blocks, whose elements `v` this thread has loaded. c: its elements of
// sum_j e^(s_j - top) v_j.
template <class S, class Run>
K3_DEVICE void mix_closed(const NormRow& a, NormSmem<S>& m, int own, const Run (&v)[max_of(S::kBlocks, 1)][S::kVectors], const Run (&score)[S::kVectors],
                          float (&c)[S::kPer], float& top, float& total) {
  each_run<S>([&](int i, int e) {
    *(Run*)&m.score[e] = score[i / S::kVector];
    K3_UNROLL
    for (int j = 0; j < S::kBlocks; ++j)
      if (j < a.num_blocks) *(Run*)&m.source[j][e] = v[j][i / S::kVector];
  });
  __syncthreads();
  const int first_leaf = own / S::kLeaf;
  closed_sums<S>(m.source, m.score, a.num_blocks, [&](int leaf, int which, int j, float sum) { tell<S>(&m.closed[first_leaf + leaf][which][j], sum, m.inbox); });
  hear<S>(m.inbox, 2 * a.num_blocks * S::kLeaves * sizeof(float));
  __syncthreads();   // every warp has read the closed blocks; under the kernel before it costs nothing
  const float weights = closed_weights<S>(a, m.closed, top);
  weighted_closed<S>(a.num_blocks, weights, c, total, [&](int k, int i) {
    const int at = (i / S::kVector * S::kThreads + int(threadIdx.x)) * S::kVector + i % S::kVector;
    return S::kHeld ? v[k][i / S::kVector].v[i % S::kVector] : at < S::kOwn ? m.source[k][at] : 0;
  });
}

// Block `rank` of the cluster for output row `index`. `ready` is called once by every block, when all that does not depend on this
// step's last kernels is done: it may wait for the parts and for hidden. Closed blocks are read before it.
template <class S, class Ready>
K3_DEVICE void norm_row(const NormRow& a, NormSmem<S>& m, int index, int rank, Ready ready) {
  typedef Neighbours<float, S::kVector> Run;
  const int own = rank * S::kOwn;
  const int row = a.row_map ? a.row_map[index] : index, slot = row < 0 || !a.row_slot ? row : a.row_slot[row];
  const size_t begin = size_t(row) * S::kN + own;
  // Everything is loaded before anything is looked at: each wait for memory is as long as all of them.
  Run v[max_of(S::kBlocks, 1)][S::kVectors], score[S::kVectors], p[S::kVectors];
  u32 weight[S::kVectors];                        // BF16 as they lie in memory: nothing waits for them
  float c[S::kPer] = {}, top = 0, total = 0;
  if (row >= 0)
    each_run<S>([&](int i, int e) {
      const int j = i / S::kVector;
      if constexpr (S::kNormed) weight[j] = S::kVector == 2 ? *(const u32*)(a.weight + own + e) : a.weight[own + e].bits;
      if constexpr (S::kBlocks > 0) score[j] = *(const Run*)(a.score + own + e);
      const float* closed = a.blocks + begin + e;
      K3_UNROLL
      for (int k = 0; k < S::kBlocks; ++k, closed += size_t(a.rows) * S::kN)
        if (k < a.num_blocks) v[k][j] = *(const Run*)closed;
    });
  if constexpr (S::kCluster > 1) inboxes_begin<2>(m.inbox);
  if (slot < 0) {                                 // of all blocks of the cluster
    ready();
    return;
  }
  const bool mix = S::kBlocks > 0 && a.num_blocks > 0;
  if constexpr (S::kCluster > 1) cluster_wait();  // every block's inbox stands
  if constexpr (S::kBlocks > 0)
    if (mix) mix_closed<S>(a, m, own, v, score, c, top, total);
  ready();

  each_run<S>([&](int i, int e) { p[i / S::kVector] = joined<S, S::kVector>(a, begin + e); });
  each_run<S>([&](int i, int e) {
    const Run& run = p[i / S::kVector];
    *(Run*)&m.source[0][e] = run;
    if (mix)
      K3_UNROLL
      for (int k = 0; k < S::kVector; ++k) m.source[1][e + k] = c[i + k];
    keep_prefix(a, begin + e, run);
  });
  __syncthreads();
  const int first_leaf = own / S::kLeaf, sums = mix ? 4 : 1;
  prefix_sums<S>(m.source, m.score, mix, [&](int leaf, int which, float sum) { tell<S>(&m.sums[first_leaf + leaf][which], sum, m.inbox + 1); });
  hear<S>(m.inbox + 1, sums * S::kLeaves * sizeof(float));
  float alpha, beta;
  const float inv = mixed<S>(a, m.sums, mix, top, total, alpha, beta);
  each_run<S>([&](int i, int e) {
    const int j = i / S::kVector;
    Neighbours<bf16, S::kVector> out;
    K3_UNROLL
    for (int k = 0; k < S::kVector; ++k)
      out.v[k] = float_to_bf16(normed_value<S>(mix, alpha, beta, c[i + k], p[j].v[k], inv, S::kNormed ? bf16_to_float(bf16{u16(weight[j] >> 16 * k)}) : 0));
    *(Neighbours<bf16, S::kVector>*)(a.out + size_t(index) * S::kOutStride + own + e) = out;
  });
}
