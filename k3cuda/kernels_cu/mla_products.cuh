// Tensor products of four warps: 16 rows a warp in registers, columns that all of them share in shared memory.
//
// On sm_90a a product is one wgmma, which reads the columns itself, at 1.6 times the rate of mma.sync; elsewhere each warp loads them and
// multiplies by mma.sync. Rows, columns, k and order are the same. A column's bytes don't depend on how many columns there are: one
// instruction shape along k, one chain.
//
// Columns lie in three ways, all free of bank conflicts:
//  * in cores (tokens of a wide step, wgmma alone): 8 columns of 8 k are 128 bytes, a column's 8 k a row;
//  * by k (queries): 64 values of k are a row of 128 bytes, 8 columns 1,024 bytes inside which 16-byte units are permuted (swizzle);
//  * by column (weights): 8 x 8 values are 128 bytes, a row the 8 columns of one k.
#pragma once
#include "mla_prims.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || defined(K3_SHIM_WGMMA)
#define K3_WGMMA 1
constexpr bool kMlaWgmma = true;
#else
constexpr bool kMlaWgmma = false;
#endif

constexpr u32 kColumnTile = 1024;   // bytes between tiles of 8 columns that lie by k, of 64 k
// Where byte `at` of a tile by k lies; tiles begin at multiples of 1,024.
K3_DEVICE u32 column_swizzle(u32 at) { return at ^ (at >> 3 & 0x70); }

// Batches of products of a warp that run while the rows of the next are unpacked. ptxas finds registers for a second batch of two by itself.
constexpr int mla_under_way(int batch) { return batch > 1 ? 1 : 2; }

// Nothing that the compiler does with a value passes this: neither a use nor, for an address, work done ahead that would fill registers.
#ifdef K3_HOST_SHIM
template <class T> inline void settle(T&) {}
#else
K3_DEVICE void settle(u32& v) { asm volatile("" : "+r"(v)::"memory"); }
K3_DEVICE void settle(float& v) { asm volatile("" : "+f"(v)::"memory"); }
K3_DEVICE void settle(uint4& v) { asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)::"memory"); }
template <class T, int kCount>
K3_DEVICE void settle(T (&v)[kCount]) {
  K3_UNROLL
  for (int i = 0; i < kCount; ++i) settle(v[i]);
}
#endif

#ifdef K3_WGMMA
template <int kTiles> struct Columns { u64 descriptor; };
// A shared address as descriptors have it: in a cluster the bits above say which block's it is.
K3_DEVICE u32 descriptor_address(u32 at) { return (at & 0x3ffff) >> 4; }

// `at` and `more` units of 16 bytes: where a k-step (32 bytes) of the first tile lies.
template <int kTiles>
K3_DEVICE Columns<kTiles> columns_by_k(u32 at, u32 more, int lane) { return {u64(descriptor_address(at) + more) | u64(kColumnTile >> 4 | 1u << 30) << 32}; }
// `at`: first 8 x 8 values of the 16 k; `k_stride`: bytes to those of the next 8 k.
template <int kTiles>
K3_DEVICE Columns<kTiles> columns_by_column(u32 at, u32 k_stride, int lane) { return {u64(descriptor_address(at) + (k_stride << 12)) | u64(128 >> 4) << 32}; }
// `at`: the cores of the first 8 k of a k-step, tile by tile; those of the next 8 k lie behind them.
template <int kTiles>
K3_DEVICE Columns<kTiles> columns_in_cores(u32 at) { return {u64(descriptor_address(at) + (kTiles * 128 << 12)) | u64(128 >> 4) << 32}; }

#ifdef K3_HOST_SHIM
inline void products_begin() {}
inline void products_end() {}
template <int> inline void products_wait() {}

// What the machine reads by a descriptor.
template <bool kF16, bool kByColumn, int kTiles>
inline void product(float (&c)[kTiles][4], const uint4& a, const Columns<kTiles>& b, bool keep) {
  for (int n = 0; n < kTiles; ++n) {
    u32 v[2];
    for (int h = 0; h < 2; ++h) v[h] = shim_column<kByColumn>(b.descriptor, n * 8 + lane_id() / 4, 8 * h + lane_id() % 4 * 2);
    if (!keep) c[n][0] = c[n][1] = c[n][2] = c[n][3] = 0;
    if constexpr (kF16) mma_f16(c[n], a, v[0], v[1]);
    else mma(c[n], a, v[0], v[1]);
  }
}
#else
// Registers of products that are under way belong to them: `products_begin` after the last change of any, `products_wait<n>` until at most n
// of the batches that `products_end` closed are left.
K3_DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
K3_DEVICE void products_end() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kLeft>
K3_DEVICE void products_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory"); }

#define K3_D4 "{%0,%1,%2,%3}"
#define K3_D8 "{%0,%1,%2,%3,%4,%5,%6,%7}"
#define K3_D12 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11}"
#define K3_D16 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}"
#define K3_D24 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23}"
#define K3_D32 \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}"
#define K3_D64 \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31," \
  "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}"
#define K3_C(n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define K3_PRODUCT(N, TYPE, D, A0, A1, A2, A3, B, P, T, ...)                                                                          \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE           \
               " " D ", {%" #A0 ",%" #A1 ",%" #A2 ",%" #A3 "}, %" #B ", p, 1, 1, %" #T ";\n}"                                          \
               : __VA_ARGS__ : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b.descriptor), "r"(int(keep)), "n"(int(kByColumn)) : "memory")
#define K3_PRODUCTS(TYPE)                                                                                                              \
  if constexpr (kTiles == 1) K3_PRODUCT(8, TYPE, K3_D4, 4, 5, 6, 7, 8, 9, 10, K3_C(0));                                                \
  else if constexpr (kTiles == 2) K3_PRODUCT(16, TYPE, K3_D8, 8, 9, 10, 11, 12, 13, 14, K3_C(0), K3_C(1));                             \
  else if constexpr (kTiles == 3) K3_PRODUCT(24, TYPE, K3_D12, 12, 13, 14, 15, 16, 17, 18, K3_C(0), K3_C(1), K3_C(2));                 \
  else if constexpr (kTiles == 4) K3_PRODUCT(32, TYPE, K3_D16, 16, 17, 18, 19, 20, 21, 22, K3_C(0), K3_C(1), K3_C(2), K3_C(3));        \
  else if constexpr (kTiles == 6) K3_PRODUCT(48, TYPE, K3_D24, 24, 25, 26, 27, 28, 29, 30, K3_C(0), K3_C(1), K3_C(2), K3_C(3), K3_C(4), K3_C(5));           \
  else if constexpr (kTiles == 8) K3_PRODUCT(64, TYPE, K3_D32, 32, 33, 34, 35, 36, 37, 38, K3_C(0), K3_C(1), K3_C(2), K3_C(3), K3_C(4), K3_C(5), K3_C(6),   \
                                             K3_C(7));                                                                                 \
  else K3_PRODUCT(128, TYPE, K3_D64, 64, 65, 66, 67, 68, 69, 70, K3_C(0), K3_C(1), K3_C(2), K3_C(3), K3_C(4), K3_C(5), K3_C(6), K3_C(7), K3_C(8), K3_C(9),  \
                  K3_C(10), K3_C(11), K3_C(12), K3_C(13), K3_C(14), K3_C(15))

// c = a b, plus c where `keep` says so. kTiles: 1, 2, 3, 4, 6, 8 or 16.
template <bool kF16, bool kByColumn, int kTiles>
K3_DEVICE void product(float (&c)[kTiles][4], const uint4& a, const Columns<kTiles>& b, bool keep) {
  static_assert((kTiles >= 1 && kTiles <= 4) || kTiles == 6 || kTiles == 8 || kTiles == 16, "widths that have an instruction here");
  if constexpr (kF16) { K3_PRODUCTS("f16"); }
  else { K3_PRODUCTS("bf16"); }
}
#endif

#else
template <int kTiles> struct Columns { u32 b[kTiles][2]; };

// Lane 8 i + r names row r of matrix i: k 8 (i % 2) to + 7 of tile n + i / 2.
template <int kTiles>
K3_DEVICE Columns<kTiles> columns_by_k(u32 at, u32 more, int lane) {
  Columns<kTiles> c;
  const int i = lane / 8, r = lane % 8;
  K3_UNROLL
  for (int n = 0; n < kTiles; n += 2) {
    const int last = n + 1 < kTiles ? 1 : 0, tile = n + (i / 2 < last ? i / 2 : last);
    const uint4 v = load_matrices(column_swizzle(at + more * 16 + tile * kColumnTile + r * 128 + i % 2 * 16));
    c.b[n][0] = v.x, c.b[n][1] = v.y;
    if (last) c.b[n + last][0] = v.z, c.b[n + last][1] = v.w;
  }
  return c;
}
template <int kTiles>
K3_DEVICE Columns<kTiles> columns_by_column(u32 at, u32 k_stride, int lane) {
  Columns<kTiles> c;
  const int i = lane / 8, r = lane % 8;
  K3_UNROLL
  for (int n = 0; n < kTiles; n += 2) {
    const int last = n + 1 < kTiles ? 1 : 0, tile = n + (i / 2 < last ? i / 2 : last);
    const uint4 v = load_matrices_transposed(at + i % 2 * k_stride + tile * 128 + r * 16);
    c.b[n][0] = v.x, c.b[n][1] = v.y;
    if (last) c.b[n + last][0] = v.z, c.b[n + last][1] = v.w;
  }
  return c;
}
K3_DEVICE void products_begin() {}
K3_DEVICE void products_end() {}
template <int>
K3_DEVICE void products_wait() {}

template <bool kF16, bool kByColumn, int kTiles>
K3_DEVICE void product(float (&c)[kTiles][4], const uint4& a, const Columns<kTiles>& b, bool keep) {
  K3_UNROLL
  for (int n = 0; n < kTiles; ++n) {
    if (!keep) c[n][0] = c[n][1] = c[n][2] = c[n][3] = 0;
    if constexpr (kF16) mma_f16(c[n], a, b.b[n][0], b.b[n][1]);
    else mma(c[n], a, b.b[n][0], b.b[n][1]);
  }
}
#endif

// Rows of the next batch of products, unpack(i) out of `raw`, where those of an older one lie: once that is done, `again`, and no sooner than there is room.
// At most kLeft batches stay under way.
template <int kLeft, int kBatch, class Unpack>
K3_DEVICE void next_rows(uint4 (&rows)[kBatch], uint4& raw, bool again, Unpack&& unpack) {
  if (again) {
    products_wait<kLeft>();
    settle(rows);
    settle(raw);
  }
  K3_UNROLL
  for (int i = 0; i < kBatch; ++i) rows[i] = unpack(i);
}
// Behind the last batch: what products read and what they wrote.
template <class Rows, class Sums>
K3_DEVICE void products_done(Rows& rows, Sums& sums) {
  products_wait<0>();
  settle(rows);
  settle(sums);
}
