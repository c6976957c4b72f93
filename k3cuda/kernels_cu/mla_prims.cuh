// Instructions that only latent attention uses: fragments, FP16 products.
#pragma once
#include "prims.cuh"

#ifdef K3_HOST_SHIM
#include "mla_shim.cuh"
#else
// Orders this thread's stores to shared memory before what the copy engine and the tensor cores do there behind a barrier.
K3_DEVICE void fence_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Orders the same of memory that the copy engine reads: by who stored, before it says so, and by who copies, once it knows.
K3_DEVICE void fence_copied_memory() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
// A barrier's place is free for other things. Nobody uses it any more.
K3_DEVICE void barrier_end(u64* bar) { asm volatile("mbarrier.inval.shared.b64 [%0];" ::"r"(shared_address(bar)) : "memory"); }
// Threads of some warps meet; id 0 is __syncthreads.
K3_DEVICE void named_barrier(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
template <int kRegs>
K3_DEVICE void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegs)); }
template <int kRegs>
K3_DEVICE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegs)); }

// Four 8 x 8 matrices of 16-bit elements; lane 8 i + r names row r of matrix i. Lane 4 g + t gets elements 2t, 2t + 1 of row g of each.
K3_DEVICE uint4 load_matrices(u32 row) {
  uint4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(row) : "memory");
  return v;
}
// The same transposed: elements (2t, g) and (2t + 1, g).
K3_DEVICE uint4 load_matrices_transposed(u32 row) {
  uint4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(row) : "memory");
  return v;
}

K3_DEVICE void mma_f16(float (&c)[4], const uint4& a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}
// Bytes 0, 1 (low) and 2, 3 (high) of four e4m3 values as FP16 pairs: exact, NaN stays NaN.
K3_DEVICE void unpack_e4m3(u32 v, u32& low, u32& high) {
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.rn.f16x2.e4m3x2 %0, l;\ncvt.rn.f16x2.e4m3x2 %1, h;\n}" : "=r"(low), "=r"(high) : "r"(v));
}
// To 2 ulp, without a branch.
K3_DEVICE float divide(float a, float b) {
  float r;
  asm("div.full.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
// 2^x, 0 where that is below the normal numbers.
K3_DEVICE float exp2_normal(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
K3_DEVICE u32 pack_f16(float lo, float hi) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
K3_DEVICE u32 pack_bf16(float lo, float hi) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
// Nearest e4m3, ties to even, saturating at 448; NaN stays NaN.
K3_DEVICE u8 float_to_e4m3(float v) {
  u16 r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(0.0f), "f"(v));
  return u8(r);
}
#endif
