// The machine's own instructions, each once: tensor product, bulk copies, barriers, grid dependency, cached loads and stores.
// Under K3_HOST_SHIM every one has a scalar body, so that what is built on them also runs (slowly) on a CPU.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct __align__(2) bf16 { u16 bits; };
// Neighbours that are loaded and stored at once.
template <class T, int kCount> struct alignas(sizeof(T) * kCount) Neighbours { T v[kCount]; };

constexpr int kWarpSize = 32;
constexpr u32 kFullWarp = 0xffffffffu;

#ifdef K3_HOST_SHIM
struct __align__(16) uint4 { u32 x, y, z, w; };
struct __align__(8) uint2 { u32 x, y; };
#define K3_DEVICE inline
#define K3_UNROLL
#define K3_ROLLED
inline u32 __float_as_uint(float v) { u32 u; std::memcpy(&u, &v, 4); return u; }
inline float __uint_as_float(u32 u) { float v; std::memcpy(&v, &u, 4); return v; }
inline u32 funnel_left(u32 lo, u32 hi, u32 s) { s &= 31; return s ? hi << s | lo >> (32 - s) : hi; }
#else
#define K3_DEVICE __device__ __forceinline__
#define K3_UNROLL _Pragma("unroll")
#define K3_ROLLED _Pragma("unroll 1")
#define K3_DYN_SMEM(T, name) extern __shared__ __align__(1024) T name[]
K3_DEVICE u32 funnel_left(u32 lo, u32 hi, u32 s) { return __funnelshift_l(lo, hi, s); }
#endif

// v, and nothing that follows from it is computed earlier. For sm_100 and later ptxas moves addresses out of loops and spills them.
K3_DEVICE int not_before_here(int v) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
  asm volatile("" : "+r"(v));
#endif
  return v;
}

// v, in a register of its own: what follows from it is not made anew, turn by turn, out of what v came from. For sm_100 and later ptxas keeps too much.
template <class T>
K3_DEVICE T kept(T v) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 1000
  if constexpr (sizeof(T) == 8) asm volatile("" : "+l"(v));
  else asm volatile("" : "+r"(v));
#endif
  return v;
}

// Nanoseconds of a clock that all multiprocessors share.
K3_DEVICE u64 device_ns() {
#ifdef K3_HOST_SHIM
  return 1;
#else
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t) :: "memory");
  return t;
#endif
}

K3_DEVICE int lane_id() { return threadIdx.x % kWarpSize; }
K3_DEVICE int warp_id() { return threadIdx.x / kWarpSize; }
// One lane of a warp whose lanes are all here. What it copies needs no loop over lanes, which a test of the lane's number leaves behind.
K3_DEVICE bool elected() {
#ifdef K3_HOST_SHIM
  return lane_id() == 0;
#else
  u32 mine;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(mine));
  return mine;
#endif
}
// The threads that do one thing together, and which of them this is: all of the block, where others do nothing else.
struct WholeBlock {
  K3_DEVICE int thread() const { return threadIdx.x; }
  K3_DEVICE int warp() const { return warp_id(); }
  K3_DEVICE int lane() const { return lane_id(); }
  K3_DEVICE void sync() const { __syncthreads(); }
};
K3_DEVICE float bf16_to_float(bf16 v) { return __uint_as_float(u32(v.bits) << 16); }

// Nearest, ties to even: the rounding of docs/numerics.md.
K3_DEVICE bf16 float_to_bf16(float v) {
#ifdef K3_HOST_SHIM
  u32 u = __float_as_uint(v);
  return bf16{u16(v != v ? 0x7fffu : (u + 0x7fffu + (u >> 16 & 1)) >> 16)};
#else
  bf16 r;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r.bits) : "f"(v));
  return r;
#endif
}

K3_DEVICE float round_bf16(float v) { return bf16_to_float(float_to_bf16(v)); }

// Two BF16 products in one register; exact where the factor is a power of two.
K3_DEVICE u32 mul_bf16x2(u32 a, u32 b) {
#ifdef K3_HOST_SHIM
  u32 lo = float_to_bf16(__uint_as_float(a << 16) * __uint_as_float(b << 16)).bits;
  return lo | u32(float_to_bf16(__uint_as_float(a & 0xffff0000u) * __uint_as_float(b & 0xffff0000u)).bits) << 16;
#else
  u32 d;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
#endif
}

// ---- tensor product: c[16 x 8] += a[16 x 16] b[16 x 8], BF16 in, F32 out; one warp ----
// Lane 4 g + q holds of a rows g, g + 8 (registers 0, 1) at columns 2q, 2q + 1 and again (2, 3) at columns + 8; of b column g at
// rows 2q, 2q + 1 and + 8; of c rows g (0, 1) and g + 8 (2, 3) at columns 2q, 2q + 1.
#ifdef K3_HOST_SHIM
// What any lane of the warp gave, by its number.
struct WarpValues {
  const u64* slot;
  explicit WarpValues(u64 mine) {
    auto* warp = &shim::cur->b->w[shim::cur->lin / 32];
    slot = (const u64*)warp->slot[shim::sync_warp(kFullWarp, mine)];
  }
  u64 operator[](int lane) const { return slot[lane]; }
};
// value(h): what 16 bits stand for.
template <class Value>
inline void shim_mma(float (&c)[4], const uint4& a, u32 b0, u32 b1, Value&& value) {
  int lane = lane_id(), g = lane / 4, q = lane % 4;
  u64 rows[2][4], cols[2][4];
  for (int half = 0; half < 2; ++half) {
    WarpValues all(half ? a.y | u64(a.w) << 32 : a.x | u64(a.z) << 32);
    for (int j = 0; j < 4; ++j) rows[half][j] = all[4 * g + j];
  }
  WarpValues all(b0 | u64(b1) << 32);
  for (int n = 0; n < 2; ++n)
    for (int j = 0; j < 4; ++j) cols[n][j] = all[4 * (2 * q + n) + j];
  for (int i = 0; i < 4; ++i)
    for (int k = 0; k < 16; ++k) {   // k = 8 half + 2 j + odd
      int shift = (k / 8) * 32 + (k % 2) * 16, j = k % 8 / 2;
      c[i] += value(u32(rows[i / 2][j] >> shift & 0xffff)) * value(u32(cols[i % 2][j] >> shift & 0xffff));
    }
}
#endif
K3_DEVICE void mma(float (&c)[4], const uint4& a, u32 b0, u32 b1) {
#ifdef K3_HOST_SHIM
  shim_mma(c, a, b0, b1, [](u32 h) { return __uint_as_float(h << 16); });
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
#endif
}

// ---- barriers in shared memory, which count arrivals and bytes, and bulk copies that complete on them ----
#ifdef K3_HOST_SHIM
// Arrivals missing of a phase's, bytes missing.
struct HostBarrier { u32 phase : 1, missing : 15, arrivals : 16; int bytes; };
static_assert(sizeof(HostBarrier) == sizeof(u64), "stands where a barrier stands");
inline void barrier_check(HostBarrier* b) {
  if (b->missing || b->bytes) return;
  b->phase ^= 1;
  b->missing = b->arrivals;
  shim::cur->b->progress = true;
}
inline void barrier_init(u64* bar, u32 arrivals) { *(HostBarrier*)bar = {0, arrivals, arrivals, 0}; }
inline void barrier_fence_init() {}
inline void barrier_arrive(u64* bar) {
  auto* b = (HostBarrier*)bar;
  --b->missing;
  barrier_check(b);
}
inline void barrier_expect(u64* bar, u32 bytes) {
  ((HostBarrier*)bar)->bytes += bytes;
  barrier_arrive(bar);
}
inline void barrier_wait(u64* bar, u32 parity) {
  for (;;) {
    const u32 word = __atomic_load_n((u32*)bar, __ATOMIC_ACQUIRE);
    if ((word & 1) != parity) return;   // `phase`
    shim_wait(*(u32*)bar, word);
  }
}
inline void bulk_copy(void* dst, const void* src, u32 bytes, u64* bar) {
  std::memcpy(dst, src, bytes);
  ((HostBarrier*)bar)->bytes -= bytes;
  barrier_check((HostBarrier*)bar);
}
#else
K3_DEVICE u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }
K3_DEVICE void barrier_init(u64* bar, u32 arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(arrivals));
}
// Makes initialised barriers visible to the copy engine.
K3_DEVICE void barrier_fence_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// What this thread wrote before is seen by who waits for the phase.
K3_DEVICE void barrier_arrive(u64* bar) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(bar)) : "memory");
}
// Arrives, and lets the phase complete once `bytes` have landed as well.
K3_DEVICE void barrier_expect(u64* bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(bar)), "r"(bytes) : "memory");
}
K3_DEVICE void barrier_wait(u64* bar, u32 parity) {
  asm volatile("{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@!done bra again;\n}"
               ::"r"(shared_address(bar)), "r"(parity) : "memory");
}
// One thread copies `bytes` (a multiple of 16, both ends 16-byte aligned) of weights from global to shared memory. They are read once a
// step, so they leave the L2 first: else 97 MB a layer push out what every layer needs again, the kernels' own instructions above all.
K3_DEVICE void bulk_copy(void* dst, const void* src, u32 bytes, u64* bar) {
  u64 once;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
               ::"r"(shared_address(dst)), "l"(src), "r"(bytes), "r"(shared_address(bar)), "l"(once) : "memory");
}
#endif

// A warp arrives, behind a __syncwarp of its own, for all of its lanes; a barrier of n warps has n * kWarpArrivals arrivals. For
// compute-sanitizer every lane does: racecheck takes an arrival for that of the thread that makes it, and a __syncwarp before it for nothing.
#ifdef K3_SANITIZE
constexpr int kWarpArrivals = kWarpSize;
K3_DEVICE void warp_arrive(u64* bar, int) { barrier_arrive(bar); }
#else
constexpr int kWarpArrivals = 1;
K3_DEVICE void warp_arrive(u64* bar, int lane) { if (lane == 0) barrier_arrive(bar); }
#endif

// ---- order between the kernels of a stream (programmatic dependent launch) ----
#ifdef K3_HOP_CYCLES
// A benchmark's slow link: a kernel that begins with K3_HOP(1) gets everything that its grid_wait guards so much later.
#define K3_HOP(behind_collective) asm volatile(".reg .u32 k3_hop; mov.u32 k3_hop, %0;" ::"n"(behind_collective))
K3_DEVICE void hop_delay() {
  u32 behind_collective;
  asm volatile("mov.u32 %0, k3_hop;" : "=r"(behind_collective));
  if (behind_collective)
    for (long long start = clock64(); clock64() - start < K3_HOP_CYCLES;) {}
}
#else
K3_DEVICE void hop_delay() {}
#endif
// Behind grid_wait every earlier kernel is complete, since each of them waits too. Before it, what may be read follows from where
// kernels call grid_launch_next (docs/kernels.md, "What may be read before grid_wait"). Nothing is written before it.
#ifdef K3_TRACE
__shared__ u64 trace_waited;   // nanoseconds at which this block's wait ended
#endif
K3_DEVICE void grid_wait() {
#ifndef K3_HOST_SHIM
  asm volatile("griddepcontrol.wait;" ::: "memory");
  hop_delay();
#endif
#ifdef K3_TRACE
  if (threadIdx.x == 0) trace_waited = device_ns();
#endif
}
// Lets blocks of the next kernel start as soon as they fit beside ours.
K3_DEVICE void grid_launch_next() {
#ifndef K3_HOST_SHIM
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- blocks of a cluster; on the host only a single launch's has more than one ----
#ifdef K3_HOST_SHIM
inline u32 cluster_rank() { return shim::cluster_rank(); }
inline void cluster_arrive() {}
inline void cluster_begin() {}
inline void cluster_wait() { shim::sync_cluster(); }
inline void store_remote(float* local, u32, float v) { *local = v; }
#else
K3_DEVICE u32 cluster_rank() { u32 r; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
// Every thread of every block arrives, then waits.
K3_DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
// The same where blocks only say that they have begun and their barriers (behind barrier_fence_init) stand: a release fences all
// memory, which takes microseconds while weights stream.
K3_DEVICE void cluster_begin() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
K3_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// Writes where `local` lies in the shared memory of block `rank` of the cluster; seen there after the next arrive and wait.
K3_DEVICE void store_remote(float* local, u32 rank, float v) {
  u32 there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(local)), "r"(rank));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(v) : "memory");
}
#endif

// ---- loads ----
// Weights: read once, so they pass by L1; never written by a kernel, so the read-only path is safe before grid_wait.
K3_DEVICE uint4 load_weights(const uint4* p) {
#ifdef K3_HOST_SHIM
  return *p;
#else
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
#endif
}
// Activations: written by an earlier kernel, so never through the read-only path, which may run before grid_wait.
K3_DEVICE uint4 load_activations(const uint4* p) {
#ifdef K3_HOST_SHIM
  return *p;
#else
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
#endif
}
K3_DEVICE uint2 load_activations(const uint2* p) {
#ifdef K3_HOST_SHIM
  return *p;
#else
  uint2 v;
  asm volatile("ld.global.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
  return v;
#endif
}
// One of many that a thread reads once: it passes by L1, where what every row needs stays.
K3_DEVICE float load_once(const float* p) {
#ifdef K3_HOST_SHIM
  return *p;
#else
  return __ldcg(p);
#endif
}

#include "trees.cuh"
