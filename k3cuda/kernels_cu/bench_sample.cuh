// The sampler as kernels of its own, for tests and scripts/bench_sample.py.
#pragma once
#include "sample_core.cuh"

// Defines NAME_full and NAME_greedy; grid: rows * CLUSTER blocks in clusters of CLUSTER.
#define K3_BENCH_SAMPLE(NAME, VOCAB, CLUSTER, WARPS)                                                                            \
  using NAME##_shape = SampleShape<VOCAB, CLUSTER, WARPS>;                                                                     \
  extern "C" __global__ void __launch_bounds__(NAME##_shape::kThreads, 1) NAME##_full(const __grid_constant__ SampleArgs a) {  \
    __shared__ SampleSmem<NAME##_shape> m;                                                                                     \
    grid_wait();                                                                                                               \
    sample_row<NAME##_shape, true>(a, m, blockIdx.x / CLUSTER);                                                                \
  }                                                                                                                            \
  extern "C" __global__ void __launch_bounds__(NAME##_shape::kThreads, 1) NAME##_greedy(const __grid_constant__ SampleArgs a) { \
    __shared__ SampleSmem<NAME##_shape> m;                                                                                     \
    grid_wait();                                                                                                               \
    sample_row<NAME##_shape, false>(a, m, blockIdx.x / CLUSTER);                                                               \
  }
