// Scalar bodies of mla_prims.cuh for K3_HOST_SHIM: shared addresses are offsets from the block's dynamic shared memory.
#pragma once
#include "prims.cuh"

#ifndef __CUDA_RUNTIME_H__
struct __align__(8) float2 { float x, y; };
struct __align__(16) float4 { float x, y, z, w; };
inline int max(int a, int b) { return a > b ? a : b; }
inline int min(int a, int b) { return a < b ? a : b; }
#endif
inline int __ffsll(u64 v) { return __builtin_ffsll(v); }
inline int __clzll(u64 v) { return v ? __builtin_clzll(v) : 64; }
inline u32 __byte_perm(u32 a, u32 b, u32 s) {
  u64 both = a | u64(b) << 32;
  u32 r = 0;
  for (int i = 0; i < 4; ++i) r |= u32(both >> 8 * (s >> 4 * i & 7) & 0xff) << 8 * i;
  return r;
}

// As on the machine, bits above an address inside the block say which block of the cluster it is.
inline u32 shared_address(const void* p) { return u32((const u8*)p - shim::cur->b->dyn) | (shim::cluster_size() > 1 ? shim::cluster_rank() << 24 : 0); }
inline u8* shared_pointer(u32 at) { return shim::cur->b->dyn + (at & 0xffffff); }

inline void fence_copies() {}
inline void fence_copied_memory() {}
inline void barrier_end(u64*) {}
template <int> inline void give_registers() {}
template <int> inline void take_registers() {}
inline void named_barrier(int id, int threads) {
  static thread_local u32 count[16], turn[16];
  const u32 now = turn[id];
  shim::cur->b->progress = true;
  if (++count[id] == u32(threads)) count[id] = 0, ++turn[id];
  else shim_wait(turn[id], now);
}

// Values k and k + 1 (k even) of column n, where wgmma finds them by a descriptor of 16-bit values: by column or in cores without swizzle, or by k
// in rows of 128 bytes with it (PTX ISA, canonical layouts).
template <bool kByColumn>
inline u32 shim_column(u64 descriptor, int n, int k) {
  const u32 start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4, stride = (descriptor >> 32 & 0x3fff) << 4;
  const bool swizzled = descriptor >> 62 == 1;
  if (descriptor >> 62 > 1 || (kByColumn && swizzled)) std::abort();
  u32 r = 0;
  for (int i = 0; i < 2; ++i, ++k) {
    u32 at = start + n / 8 * stride;
    if (swizzled) at += n % 8 * 128 + k * 2, at ^= at >> 3 & 0x70;
    else at += k / 8 * leading + (kByColumn ? k % 8 * 16 + n % 8 * 2 : n % 8 * 16 + k % 8 * 2);
    u16 v;
    std::memcpy(&v, shared_pointer(at), 2);
    r |= u32(v) << 16 * i;
  }
  return r;
}

inline uint4 load_matrices(u32 row) {
  u32 r[4];
  WarpValues rows(row);
  for (int i = 0; i < 4; ++i) std::memcpy(&r[i], shared_pointer(u32(rows[8 * i + lane_id() / 4]) + lane_id() % 4 * 4), 4);
  return {r[0], r[1], r[2], r[3]};
}
inline uint4 load_matrices_transposed(u32 row) {
  u32 r[4];
  WarpValues rows(row);
  const int g = lane_id() / 4, t = lane_id() % 4;
  for (int i = 0; i < 4; ++i) {
    u16 two[2];
    for (int n = 0; n < 2; ++n) std::memcpy(&two[n], shared_pointer(u32(rows[8 * i + 2 * t + n]) + 2 * g), 2);
    r[i] = two[0] | u32(two[1]) << 16;
  }
  return {r[0], r[1], r[2], r[3]};
}
inline float half_value(u32 h) {
  const u32 e = h >> 10 & 31, m = h & 1023;
  const float v = e == 31 ? (m ? NAN : INFINITY) : e ? __uint_as_float((e + 112) << 23 | m << 13) : float(m) * 0x1p-24f;
  return h & 0x8000 ? -v : v;
}
inline u32 half_bits(float v) {
  u32 sign = __float_as_uint(v) >> 16 & 0x8000;
  v = std::fabs(v);
  if (v != v) return 0x7fff;
  if (v >= 65520.0f) return sign | 0x7c00;
  int e;
  std::frexp(v, &e);
  e = v == 0 || e < -13 ? -13 : e;                                  // of the last place: 2^(e - 11)
  u32 m = u32(std::nearbyint(std::ldexp(v, 11 - e)));
  return sign | (m < 1024 ? m : u32(e + 14) * 1024 + m - 1024);
}
inline float divide(float a, float b) { return a / b; }
inline float exp2_normal(float x) { return x < -126 ? 0 : exp2f(x); }
inline u32 pack_f16(float lo, float hi) { return half_bits(lo) | half_bits(hi) << 16; }
inline u32 pack_bf16(float lo, float hi) { return float_to_bf16(lo).bits | u32(float_to_bf16(hi).bits) << 16; }
inline u32 e4m3_half(u32 b) {
  int e = b >> 3 & 15, m = b & 7;
  float v = e == 15 && m == 7 ? NAN : e ? std::ldexp(float(8 + m), e - 10) : std::ldexp(float(m), -9);
  return half_bits(b & 0x80 ? -v : v);
}
inline u8 float_to_e4m3(float v) {
  const u8 sign = __float_as_uint(v) >> 24 & 0x80;
  v = std::fabs(v);
  if (v != v) return sign | 0x7f;
  if (v >= 464.0f) return sign | 0x7e;                              // half way to what would follow 448
  int e;
  std::frexp(v, &e);
  e = v == 0 || e < -5 ? -5 : e;                                    // of the last place: 2^(e - 4)
  u32 m = u32(std::nearbyint(std::ldexp(v, 4 - e)));
  return sign | (m < 8 ? m : std::min(u32(e + 6) * 8 + m - 8, 0x7eu));
}
inline void unpack_e4m3(u32 v, u32& low, u32& high) {
  low = e4m3_half(v & 0xff) | e4m3_half(v >> 8 & 0xff) << 16;
  high = e4m3_half(v >> 16 & 0xff) | e4m3_half(v >> 24) << 16;
}
inline void mma_f16(float (&c)[4], const uint4& a, u32 b0, u32 b1) { shim_mma(c, a, b0, b1, half_value); }
