// Random weights made on the device: what benchmarks of a rank that no checkpoint fits need.
#pragma once
#include "ceiling.cuh"

K3_DEVICE u32 hash(u64 i, u32 seed) { return hash(u32(i) ^ hash(u32(i >> 32) ^ hash(seed))); }

// Value i of those that are uniform on [low, high].
K3_DEVICE float uniform(u64 i, u32 seed, float low, float high) { return low + (high - low) * (float(hash(i, seed) >> 8) * (1.0f / 16777216.0f)); }

extern "C" __global__ void fill_bf16(bf16* p, u64 n, u32 seed, float low, float high) {
  for (u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += u64(gridDim.x) * blockDim.x) p[i] = float_to_bf16(uniform(i, seed, low, high));
}

extern "C" __global__ void fill_f32(float* p, u64 n, u32 seed, float low, float high) {
  for (u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += u64(gridDim.x) * blockDim.x) p[i] = uniform(i, seed, low, high);
}

// MXFP4 leaves in kernel order (repack.py): `words` of random codes, then `scale_words` of factor exponents lowest .. lowest + 2.
extern "C" __global__ void fill_mxfp4(u32* p, u64 n, u32 seed, int words, int scale_words, int lowest) {
  for (u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += u64(gridDim.x) * blockDim.x) {
    u32 h = hash(i, seed);
    if (int(i % u64(words + scale_words)) >= words) {
      u32 v = 0;
      for (int b = 0; b < 4; ++b) v |= (u32(lowest) + (h >> (8 * b) & 255) % 3) << (8 * b);
      h = v;
    }
    p[i] = h;
  }
}

// Random finite e4m3 codes or BF16 values for a cache of `n` words.
extern "C" __global__ void fill_cache(u32* p, u64 n, u32 seed, int fp8) {
  for (u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += u64(gridDim.x) * blockDim.x) {
    u32 h = hash(i, seed);
    p[i] = fp8 ? (h & 0x87878787u) | 0x30303030u : (h & 0x80ff80ffu) | 0x3f003f00u;   // magnitudes 0.5 to 0.94; 0.5 to 1
  }
}
