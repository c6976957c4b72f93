// Numbers that the blocks of a cluster tell one another: written into a neighbour's shared memory and counted there by its own
// barrier, so a reader waits for the bytes themselves, one hop, not for a barrier of the whole cluster.
#pragma once
#include "prims.cuh"

struct __align__(16) f32x4 { float x, y, z, w; };
struct __align__(8) f32x2 { float x, y; };

// What a kernel of this step wrote is never loaded through the read-only path; plain loads say so.
K3_DEVICE f32x4 load4(const float* p) { return *(const f32x4*)p; }
K3_DEVICE void store4(float* p, const f32x4& v) { *(f32x4*)p = v; }

// One instruction instead of a division that branches: off by at most 1 unit in the last place (rcp) and 2 (rsqrt). 1 / infinity is 0.
K3_DEVICE float reciprocal(float x) {
#ifdef K3_HOST_SHIM
  return 1.0f / x;
#else
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
#endif
}
K3_DEVICE float inverse_sqrt(float x) {
#ifdef K3_HOST_SHIM
  return 1.0f / sqrtf(x);
#else
  float r;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
#endif
}
K3_DEVICE float sigmoid(float x) { return reciprocal(1.0f + expf(-x)); }  // expf runs to infinity below -88: the right 0

// A thread's copies of 8 or 16 bytes into shared memory, all under way at once; what lies there is its own until a barrier of the block.
#ifdef K3_HOST_SHIM
template <int kBytes> inline void copy_async(void* dst, const void* src) { std::memcpy(dst, src, kBytes); }
inline void copy_wait() {}
#else
template <int kBytes>
K3_DEVICE void copy_async(void* dst, const void* src) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(dst)), "l"(src), "n"(kBytes) : "memory");
}
K3_DEVICE void copy_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }
#endif

#ifdef K3_HOST_SHIM
template <class T>
inline void send(T* local, u32 rank, T v, u64* inbox) {
  if (shim::cluster_size() == 1) {
    *local = v;
    return;
  }
  std::lock_guard<std::mutex> alone(shim::cur->b->cluster->sends);
  *shim::in_block(local, rank) = v;
  auto* there = (HostBarrier*)shim::in_block(inbox, rank);
  there->bytes -= sizeof(T);
  barrier_check(there);
}
inline void send4(f32x4* local, u32 rank, const f32x4& v, u64* inbox) { send(local, rank, v, inbox); }
inline bool inbox_try(u64* bar, u32 parity) {
  std::lock_guard<std::mutex> alone(shim::cur->b->cluster->sends);
  return ((volatile HostBarrier*)bar)->phase != parity;
}
inline void inbox_wait(u64* bar, u32 parity) {
  if (shim::cluster_size() == 1) __syncthreads();
  else
    while (!inbox_try(bar, parity)) shim_yield();
}
inline void inbox_expect(u64* inbox, u32 bytes) {
  if (shim::cluster_size() == 1) return;
  std::lock_guard<std::mutex> alone(shim::cur->b->cluster->sends);
  barrier_expect(inbox, bytes);
}
#else
// Stores v where `local` lies in block `rank`, and counts its 4 bytes on that block's `inbox`.
K3_DEVICE void send(float* local, u32 rank, float v, u64* inbox) {
  u32 there, bar;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(local)), "r"(rank));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(bar) : "r"(shared_address(inbox)), "r"(rank));
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];"
               ::"r"(there), "r"(__float_as_uint(v)), "r"(bar) : "memory");
}
// The same of 16 bytes.
K3_DEVICE void send4(f32x4* local, u32 rank, const f32x4& v, u64* inbox) {
  u32 there, bar;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(local)), "r"(rank));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(bar) : "r"(shared_address(inbox)), "r"(rank));
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];"
               ::"r"(there), "r"(__float_as_uint(v.x)), "r"(__float_as_uint(v.y)), "r"(__float_as_uint(v.z)), "r"(__float_as_uint(v.w)), "r"(bar) : "memory");
}
// As barrier_wait, but what other blocks of the cluster sent is visible afterwards.
K3_DEVICE void inbox_wait(u64* inbox, u32 parity) {
  asm volatile("{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}"
               ::"r"(shared_address(inbox)), "r"(parity) : "memory");
}
// One thread, once a phase. Bytes may land before it: the phase ends only after both.
K3_DEVICE void inbox_expect(u64* inbox, u32 bytes) { barrier_expect(inbox, bytes); }
#endif

// A block's `kCount` inboxes, and word to its cluster that they stand: `cluster_wait` comes before whatever is sent.
template <int kCount>
K3_DEVICE void inboxes_begin(u64* inboxes) {
  if (threadIdx.x == 0) {
    K3_UNROLL
    for (int i = 0; i < kCount; ++i) barrier_init(inboxes + i, 1);
    barrier_fence_init();
  }
  __syncthreads();
  cluster_begin();
}
