// Kernels of scripts/bench_core.py: random weights made on the device, and the cores with a plain store.
#pragma once
#include "ceiling.cuh"
#include "expert_down.cuh"
#include "many_core.cuh"

// Random BF16 pairs of magnitude 2^-6 to 2 (mode 0), random words (mode 1), or random bytes from 175 to 190 (mode 2: factor exponents).
extern "C" __global__ void fill(u32* p, size_t n, u32 seed, int mode) {
  size_t stride = size_t(gridDim.x) * blockDim.x;
  for (size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += stride) {
    u32 h = hash(u32(i) ^ hash(seed + u32(i >> 32)));
    p[i] = mode == 0 ? (h & 0x83ff83ffu) + 0x3c803c80u : mode == 1 ? h : (h & 0x0f0f0f0fu) + 0xafafafafu;
  }
}

#define K3_BENCH_ROWS(NAME, TILES, ...)                                                                                      \
  extern "C" __global__ void __launch_bounds__(__VA_ARGS__::kThreads, 1)                                                     \
      NAME(const uint4* w, int tiles, const bf16* x, int stride, int rows, float* y, int outputs) {                          \
    K3_DYN_SMEM(u8, smem);                                                                                                   \
    row_product<__VA_ARGS__>(w, tiles, x, stride, rows, smem, [&](int row, int token, float v) {                             \
      if (row < outputs) y[size_t(token) * outputs + row] = v;                                                               \
    });                                                                                                                      \
  }                                                                                                                          \
  K3_LAUNCH_INFO(NAME, TILES, K3_BENCH_SMS, __VA_ARGS__)

#define K3_BENCH_MANY(NAME, ...)                                                                                             \
  extern "C" __global__ void __launch_bounds__(__VA_ARGS__::kThreads, 1)                                                     \
      NAME(const uint4* w, int, const bf16* x, int stride, int rows, float* y, int outputs) {                                \
    K3_DYN_SMEM(u8, smem);                                                                                                   \
    many_product<__VA_ARGS__>(w, x, stride, smem, [&](int row, int token, float v) {                                         \
      if (row < outputs && token < rows) y[size_t(token) * outputs + row] = v;                                               \
    });                                                                                                                      \
  }                                                                                                                          \
  extern "C" __constant__ int NAME##_launch[4] = {__VA_ARGS__::kClusters * __VA_ARGS__::kCS, __VA_ARGS__::kThreads,   \
                                                   __VA_ARGS__::kFits ? __VA_ARGS__::kSmem : 1 << 30, __VA_ARGS__::kCS};

#define K3_BENCH_EXPERTS(NAME, MIN_UP, MIN_DOWN, UP, DOWN)                                                                   \
  extern "C" __global__ void __launch_bounds__(UP::kThreads, MIN_UP)                                                         \
      NAME##_up(const u8* w, int tile_pairs, const bf16* x, int stride, int top_k, const typename UP::List* from, float* y) { \
    K3_DYN_SMEM(u8, smem);                                                                                                   \
    int half = tile_pairs * kTileRows;                                                                                       \
    auto make_list = [&](auto& list, u8*) { grid_wait(); grid_launch_next(); load_list(list, from); };                       \
    expert_up_product<UP>(w, tile_pairs, x, stride, top_k, gridDim.x, smem, make_list, [&](int item, int row, float gate, float up) { \
      y[size_t(item) * 2 * half + row] = gate;                                                                               \
      y[size_t(item) * 2 * half + half + row] = up;                                                                          \
    });                                                                                                                      \
  }                                                                                                                          \
  extern "C" __global__ void __launch_bounds__(DOWN::kThreads, MIN_DOWN)                                                     \
      NAME##_down(const u8* w, int tiles, const bf16* x, int stride, const float* weights, int rows,                         \
                  const typename DOWN::List* from, float* y) {                                                               \
    K3_DYN_SMEM(u8, smem);                                                                                                   \
    auto make_list = [&](auto& list, u8*) { grid_wait(); grid_launch_next(); load_list(list, from); };                       \
    expert_down_product<DOWN>(w, tiles, x, stride, weights, rows, smem, make_list, [] {},                                    \
                              [&](int row, int token, float v) { y[size_t(token) * tiles * kTileRows + row] = v; });         \
  }                                                                                                                          \
  extern "C" __constant__ int NAME##_up_launch[4] = {0, UP::kThreads, UP::kSmem, 1};                                         \
  extern "C" __constant__ int NAME##_down_launch[4] = {0, DOWN::kThreads, DOWN::kSmem, 1};

#ifndef K3_HOST_SHIM
// Expands and multiplies packed weights that already lie in shared memory, as fast as one block a multiprocessor can.
// cycles[block]: clocks that `rounds` passes over the same kTiles tiles' leaves took.
template <int kGroups, int kTiles>
K3_DEVICE void expand_rate(const u8* w, float* out, long long* cycles, int rounds, u8* smem) {
  constexpr int kBytes = mxfp4_leaf_bytes(kGroups);
  for (int i = threadIdx.x; i < kTiles * kBytes / 16; i += blockDim.x) ((uint4*)smem)[i] = ((const uint4*)w)[i];
  uint4 x[kGroups];
  K3_UNROLL
  for (int i = 0; i < kGroups; ++i) x[i] = {0x3f803f80u + threadIdx.x, 0x3f803f80u, 0x40003f80u, 0x3f80bf80u};
  __syncthreads();
  float total[4] = {0.f, 0.f, 0.f, 0.f};
  long long start = clock64();
  for (int r = 0; r < rounds; ++r) {
    float sum[4];
    mxfp4_leaf<kGroups>(sum, smem + (warp_id() + r) % kTiles * kBytes, x);
    K3_UNROLL
    for (int i = 0; i < 4; ++i) total[i] += sum[i];
  }
  __syncthreads();
  long long end = clock64();
  out[blockIdx.x * blockDim.x + threadIdx.x] = total[0] + total[1] + total[2] + total[3];
  if (threadIdx.x == 0) cycles[blockIdx.x] = end - start;
}
extern "C" __global__ void __launch_bounds__(512, 1) expand_mxfp4_rate(const u8* w, float* out, long long* cycles, int rounds) {
  K3_DYN_SMEM(u8, smem);
  expand_rate<7, 48>(w, out, cycles, rounds, smem);
}
#endif
