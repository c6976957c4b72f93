// Latent attention as kernels of its own, for tests and scripts/bench_mla.py.
#pragma once
#include "mla_attend.cuh"
#include "mla_combine.cuh"

// Defines NAME_attend (grid: any, S::kThreads threads, NAME_shared bytes), NAME_combine (grid: rows, heads, slabs) and NAME_write.
#define K3_BENCH_MLA(NAME, CACHE, STORED, HEADS, LATENT, ROPE, QUERY, TILES, RING)                                                        \
  using NAME##_shape = MlaShape<CACHE, HEADS, LATENT, ROPE, TILES, RING>;                                                                \
  extern "C" __constant__ int NAME##_shared = sizeof(MlaSmem<NAME##_shape>);                                                            \
  extern "C" __global__ void __launch_bounds__(NAME##_shape::kThreads, 1) NAME##_attend(const __grid_constant__ MlaAttend a) {          \
    K3_DYN_SMEM(u8, raw);                                                                                                                \
    mla_attend<NAME##_shape>(a, *(MlaSmem<NAME##_shape>*)raw, [] { grid_wait(); grid_launch_next(); });                                  \
  }                                                                                                                                      \
  extern "C" __global__ void __launch_bounds__(kMlaCombineThreads) NAME##_combine(const __grid_constant__ MlaCombine a) {               \
    __shared__ MlaCombineSmem m;                                                                                                         \
    grid_wait();                                                                                                                         \
    grid_launch_next();                                                                                                                  \
    if (blockIdx.x == 0 && blockIdx.y == 0 && blockIdx.z == 0 && threadIdx.x == 0) *a.next = 0;                                          \
    mla_combine<HEADS, LATENT, 8 * TILES>(a, m, blockIdx.x, blockIdx.y, blockIdx.z);                                                     \
  }                                                                                                                                      \
  extern "C" __global__ void __launch_bounds__(512) NAME##_write(const __grid_constant__ MlaWrite a) {                                  \
    __shared__ float leaf[2][16];                                                                                                        \
    mla_write<STORED, QUERY, QUERY % 256 ? 1 : 16, LATENT, LATENT % 256 ? 2 : 16, ROPE>(a, leaf, blockIdx.x, [] { grid_wait(); grid_launch_next(); }); \
  }
