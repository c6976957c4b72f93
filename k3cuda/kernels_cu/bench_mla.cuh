// Latent attention as kernels of its own, for tests and scripts/bench_mla.py.
#pragma once
#include "mla_attend.cuh"
#include "mla_combine.cuh"

#define K3_BENCH_COMBINE(NAME, HEADS, LATENT, TOGETHER)                                                   \
  extern "C" __global__ void __launch_bounds__(kMlaCombineThreads, mla_combine_resident(TOGETHER)) NAME(const __grid_constant__ MlaCombine a) { \
    __shared__ MlaCombineSmem<TOGETHER> m;                                                                \
    grid_launch_next();                                                                                   \
    mla_combine<HEADS, LATENT, TOGETHER>(a, m, [] { grid_wait(); });                                      \
  }

// Defines NAME_attend (grid: any, NAME_threads threads, NAME_shared bytes), NAME_combine_1, _2 and _8 (slabs side by side; grid: any) and NAME_write (grid: rows). SHARED:
// bytes of shared memory a block may have.
#define K3_BENCH_MLA(NAME, CACHE, STORED, HEADS, LATENT, ROPE, QUERY, TILES, SHARED)                                                     \
  using NAME##_shape = MlaFit<CACHE, HEADS, LATENT, ROPE, TILES, SHARED>::Shape;                                                         \
  extern "C" __constant__ int NAME##_shared = sizeof(MlaSmem<NAME##_shape>), NAME##_threads = NAME##_shape::kThreads;                    \
  extern "C" __global__ void __launch_bounds__(NAME##_shape::kThreads + NAME##_shape::kBeside, 1) NAME##_attend(const __grid_constant__ MlaAttend a) {           \
    K3_DYN_SMEM(u8, raw);                                                                                                                \
    mla_attend<NAME##_shape>(a, *(MlaSmem<NAME##_shape>*)raw, [] { grid_wait(); grid_launch_next(); });                                  \
  }                                                                                                                                      \
  K3_BENCH_COMBINE(NAME##_combine_1, HEADS, LATENT, 1)                                                                                   \
  K3_BENCH_COMBINE(NAME##_combine_2, HEADS, LATENT, 2)                                                                                   \
  K3_BENCH_COMBINE(NAME##_combine_8, HEADS, LATENT, 8)                                                                                   \
  extern "C" __global__ void __launch_bounds__(512) NAME##_write(const __grid_constant__ MlaWrite a) {                                   \
    __shared__ float leaf[2][16];                                                                                                        \
    mla_write<STORED, QUERY, QUERY % 256 ? 1 : 16, LATENT, LATENT % 256 ? 2 : 16, ROPE>(a, leaf, blockIdx.x, [] { grid_wait(); grid_launch_next(); }); \
  }
