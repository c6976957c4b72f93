// Hand-overs between blocks: 16-byte vectors that are their own flags. A vector whose words are not all there holds kNotThere in some of them.
// Two BF16 values never make that word, since -0 is stored as +0. As one F32 value it is -4.6e-41, whose neighbour is stored in its place.
//
// Results of a phase lie in a slot of the exchange. When every block has read a slot for the last time, all blocks clear it together,
// a slice each; both counts are kept by the janitor warp, phases before anyone writes or reads there again. So nothing on the way of
// the values fences or counts.
//
// Ranks (K3_RANKS, which launch_source.py defines; 1: a rank alone, which looped back stands for all) have an exchange each and write into those of all.
// A slot is written when it is clean on every rank: who clears last of a rank's blocks says so to all. Where ranks are in launches of their own, on other
// GPUs (K3_SCOPE is "sys" then, else "gpu"), these meet before the first phase, so that whoever is late is waited for in one place, and behind the last
// one, since nothing else tells a launch that the others' results have reached it.
#pragma once
#include "launch_copies.cuh"

constexpr u32 kNotThere = 0x80008000u;
constexpr int kMaxRanks = 16;
constexpr bool kRanksAway = K3_RANKS > K3_RANKS_HERE;   // in launches of their own
constexpr int kCounts = 8;   // places that are heard, cleared and waited for at the same time

// Counts of blocks, never reset: `launches` blocks that ended, the others phase by phase in turn.
struct LaunchCounts {
  u64 ended;
  u32 failed, pad[29];   // Watch
  struct { u32 count, pad[31]; } heard[kCounts], cleaned[kCounts];   // a cache line each
  u64 clean_on[kMaxRanks];   // places that a rank has cleared; it writes that itself
  u64 met_by[kMaxRanks];     // meetings that a rank has come to, two a launch
};
// What a rank gives to all.
struct LaunchPeer {
  uint4 *exchange, *result;   // as in LaunchArgs
  LaunchCounts* counts;
};

K3_DEVICE bool is_there(const uint4& v) { return v.x != kNotThere && v.y != kNotThere && v.z != kNotThere && v.w != kNotThere; }

#ifdef K3_HOST_SHIM
inline uint4 load_exchange(const uint4* p) {
  const u32* w = (const u32*)p;
  return {__atomic_load_n(w, __ATOMIC_ACQUIRE), __atomic_load_n(w + 1, __ATOMIC_ACQUIRE), __atomic_load_n(w + 2, __ATOMIC_ACQUIRE), __atomic_load_n(w + 3, __ATOMIC_ACQUIRE)};
}
inline uint2 load_exchange(const uint2* p) {
  const u32* w = (const u32*)p;
  return {__atomic_load_n(w, __ATOMIC_ACQUIRE), __atomic_load_n(w + 1, __ATOMIC_ACQUIRE)};
}
inline void store_exchange(uint4* p, const uint4& v) {
  u32* w = (u32*)p;
  for (int i = 0; i < 4; ++i) __atomic_store_n(w + i, (&v.x)[i], __ATOMIC_RELEASE);
}
inline void count_up(u32* p) { __atomic_fetch_add(p, 1u, __ATOMIC_ACQ_REL); }
inline u32 count_seen(const u32* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
inline u32 load_word(const u32* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
inline u64 ended_seen(const u64* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
inline void ended_up(u64* p) { __atomic_fetch_add(p, 1ull, __ATOMIC_ACQ_REL); }
inline u32 counted(u32* p) { return __atomic_fetch_add(p, 1u, __ATOMIC_ACQ_REL); }
inline u64 ended_counted(u64* p) { return __atomic_fetch_add(p, 1ull, __ATOMIC_ACQ_REL); }
inline u64 rank_seen(const u64* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
inline void raise_to(u64* p, u64 v) { atomicMax(p, v); }
#else
K3_DEVICE uint4 load_exchange(const uint4* p) {
  uint4 v;
  asm volatile("ld.relaxed." K3_SCOPE ".global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
K3_DEVICE uint2 load_exchange(const uint2* p) {
  uint2 v;
  asm volatile("ld.relaxed." K3_SCOPE ".global.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
  return v;
}
K3_DEVICE void store_exchange(uint4* p, const uint4& v) {
  asm volatile("st.relaxed." K3_SCOPE ".global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
K3_DEVICE u32 load_word(const u32* p) {
  u32 v;
  asm volatile("ld.relaxed." K3_SCOPE ".global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
K3_DEVICE void count_up(u32* p) { asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(p) : "memory"); }
K3_DEVICE u32 count_seen(const u32* p) {
  u32 v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
K3_DEVICE u64 ended_seen(const u64* p) {
  u64 v;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
K3_DEVICE void ended_up(u64* p) { asm volatile("red.release.gpu.global.add.u64 [%0], 1;" ::"l"(p) : "memory"); }
// Counts, and says how many had counted before.
K3_DEVICE u32 counted(u32* p) {
  u32 v;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(v) : "l"(p) : "memory");
  return v;
}
K3_DEVICE u64 ended_counted(u64* p) {
  u64 v;
  asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], 1;" : "=l"(v) : "l"(p) : "memory");
  return v;
}
// What a rank says to another: numbers that only grow, whichever of its blocks is the one to say them.
K3_DEVICE u64 rank_seen(const u64* p) {
  u64 v;
  asm volatile("ld.acquire." K3_SCOPE ".global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
K3_DEVICE void raise_to(u64* p, u64 v) { asm volatile("red.release." K3_SCOPE ".global.max.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }
#endif

// Eight neighbouring lanes have a value each: BF16, -0 as +0, and every one of them gets the vector. All lanes of the warp.
K3_DEVICE uint4 pack_vector(float v, int lane) {
  u32 bits = float_to_bf16(v).bits;
  if (bits == 0x8000u) bits = 0;
  const u32 word = bits | __shfl_down_sync(kFullWarp, bits, 1) << 16;   // right in even lanes
  const int first = lane & ~7;
  uint4 out;
  out.x = __shfl_sync(kFullWarp, word, first), out.y = __shfl_sync(kFullWarp, word, first + 2);
  out.z = __shfl_sync(kFullWarp, word, first + 4), out.w = __shfl_sync(kFullWarp, word, first + 6);
  return out;
}

K3_DEVICE u32 exchange_word(float v) {
  const u32 bits = __float_as_uint(v);
  return bits == kNotThere ? kNotThere + 1 : bits;
}
// Four neighbouring lanes have a value each: F32, and every one of them gets the vector. All lanes of the warp.
K3_DEVICE uint4 pack_floats(float v, int lane) {
  const u32 word = exchange_word(v);
  const int first = lane & ~3;
  uint4 out;
  out.x = __shfl_sync(kFullWarp, word, first), out.y = __shfl_sync(kFullWarp, word, first + 1);
  out.z = __shfl_sync(kFullWarp, word, first + 2), out.w = __shfl_sync(kFullWarp, word, first + 3);
  return out;
}
K3_DEVICE f32x4 as_floats(const uint4& v) { return {__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)}; }
K3_DEVICE u32 load_exchange(const u32* p) { return load_word(p); }
K3_DEVICE bool is_there(u32 word) { return word != kNotThere; }
K3_DEVICE bool is_there(const uint2& v) { return v.x != kNotThere && v.y != kNotThere; }

K3_DEVICE void not_there(uint4& v) { v = {kNotThere, kNotThere, kNotThere, kNotThere}; }
K3_DEVICE void not_there(uint2& v) { v = {kNotThere, kNotThere}; }
K3_DEVICE void not_there(u32& v) { v = kNotThere; }

// Asks for the vectors (or pairs or single words of them) at(0) ... at(kBatch - 1) with wants(j) until they are there.
template <int kBatch, class V, class Wants, class At>
K3_DEVICE void await_all(V (&v)[kBatch], const Watch& watch, int phase, u32 detail, Wants&& wants, At&& at) {
  K3_UNROLL
  for (int j = 0; j < kBatch; ++j)
    if (wants(j)) not_there(v[j]);
  Spin spin;
#pragma unroll 1
  for (bool all = false; !all;) {   // a turn more than it needs: the loads stand here once
    all = true;
    K3_UNROLL
    for (int j = 0; j < kBatch; ++j)
      if (wants(j) && !is_there(v[j])) v[j] = load_exchange(at(j)), all = false;
    if (!all) spin.turn(watch, kWaitVector, phase, detail);
  }
}

// Vectors at(i) for i = first, first + stride, ... below `total`, kBatch of them asked for at once: keep(i, vector) for each when it is there.
// before_keep() once, behind the first batch.
template <int kBatch, class At, class Before, class Keep>
K3_DEVICE void receive_vectors(int first, int stride, int total, const Watch& watch, int phase, At&& at, Before&& before_keep, Keep&& keep) {
  int begin = first;
  do {
    uint4 v[kBatch] = {};   // what is set on some paths only takes its registers for all of the launch
    await_all(v, watch, phase, u32(begin), [&](int j) { return begin + j * stride < total; }, [&](int j) { return at(begin + j * stride); });
    if (begin == first) before_keep();
    K3_UNROLL
    for (int j = 0; j < kBatch; ++j)
      if (begin + j * stride < total) keep(begin + j * stride, v[j]);
    begin += kBatch * stride;
  } while (begin < total);
}
