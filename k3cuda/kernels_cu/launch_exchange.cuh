// Hand-overs between blocks: 16-byte vectors that are their own flags. A vector whose words are not all there holds kNotThere in some of them.
// Two BF16 values never make that word, since -0 is stored as +0. As one F32 value it is -4.6e-41, whose neighbour is stored in its place.
//
// Results of a phase lie in a slot of the exchange. When every block has read a slot for the last time, all blocks clear it together,
// a slice each; both counts are kept by the janitor warp, phases before anyone writes or reads there again. So nothing on the way of
// the values fences or counts.
#pragma once
#include "launch_ring.cuh"

constexpr u32 kNotThere = 0x80008000u;
constexpr int kCounts = 8;   // places that are heard, cleared and waited for at the same time

// Counts of blocks, never reset: `launches` blocks that ended, the others phase by phase in turn.
struct LaunchCounts {
  u64 ended;
  u32 failed, pad[29];   // Watch
  struct { u32 count, pad[31]; } heard[kCounts], cleaned[kCounts];   // a cache line each
};

K3_DEVICE bool is_there(const uint4& v) { return v.x != kNotThere && v.y != kNotThere && v.z != kNotThere && v.w != kNotThere; }

#ifdef K3_HOST_SHIM
inline uint4 load_exchange(const uint4* p) {
  const u32* w = (const u32*)p;
  return {__atomic_load_n(w, __ATOMIC_ACQUIRE), __atomic_load_n(w + 1, __ATOMIC_ACQUIRE), __atomic_load_n(w + 2, __ATOMIC_ACQUIRE), __atomic_load_n(w + 3, __ATOMIC_ACQUIRE)};
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
#else
K3_DEVICE uint4 load_exchange(const uint4* p) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
K3_DEVICE void store_exchange(uint4* p, const uint4& v) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
K3_DEVICE u32 load_word(const u32* p) {
  u32 v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
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

K3_DEVICE void not_there(uint4& v) { v = {kNotThere, kNotThere, kNotThere, kNotThere}; }
K3_DEVICE void not_there(u32& v) { v = kNotThere; }

// Asks for the vectors (or F32 words) at(0) ... at(kBatch - 1) with wants(j) until they are there.
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

// One warp. Behind a phase's input it says so; when all blocks have, it clears its slice of what nobody needs any more; when all have done that, what
// lay there may be written again. Phases are in these three states side by side: one behind the other, two counts of all blocks each, they took 4
// microseconds apiece, which at one row is longer than a phase. A place is a phase's, of those with something to clear; places may be kCounts apart.
struct Janitor {
  LaunchCounts* counts;
  u64 heard, cleared, cleaned;   // places that it comes to next, since the counts began

  K3_DEVICE u32* heard_count(u64 place) const { return &counts->heard[place % kCounts].count; }
  K3_DEVICE u32* cleaned_count(u64 place) const { return &counts->cleaned[place % kCounts].count; }
  static K3_DEVICE bool is_full(u32 count, u64 place) { return int(count - u32((place / kCounts + 1) * gridDim.x)) >= 0; }

  // Whether all blocks have heard the place that it would clear, and cleared the one that it waits for: two lanes look, at the same time. Bits 0 and 1.
  K3_DEVICE u32 look(bool for_heard, bool for_cleaned) const {
    const int lane = lane_id();
    bool full = false;
    if (lane == 0 ? for_heard : lane == 1 && for_cleaned) full = is_full(count_seen(lane ? cleaned_count(cleaned) : heard_count(cleared)), lane ? cleaned : cleared);
    return __ballot_sync(kFullWarp, full);
  }
  K3_DEVICE bool may_hear() const { return heard - cleaned < kCounts; }   // who counts in a place again has seen all blocks count there before
  K3_DEVICE void hear() {
    if (lane_id() == 0) count_up(heard_count(heard));
    ++heard;
  }
  // each(f) calls f(slot, vectors) for what is to be cleared.
  template <class Each>
  K3_DEVICE void clear(Each&& each) {
    __syncwarp();
    each([&](uint4* slot, int vectors) {
      const int end = u32(vectors) * (blockIdx.x + 1) / gridDim.x;
      for (int i = u32(vectors) * blockIdx.x / gridDim.x + lane_id(); i < end; i += kWarpSize) store_exchange(slot + i, {kNotThere, kNotThere, kNotThere, kNotThere});
    });
    __threadfence();
    __syncwarp();
    if (lane_id() == 0) count_up(cleaned_count(cleared));
    ++cleared;
  }
};
