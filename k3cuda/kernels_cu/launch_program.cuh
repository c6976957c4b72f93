// A block's program in shared memory: a step's words are 30 KB a block, which the ring would lack, so two pages of them are here at a time. Pages are whole
// phases; word 0 of a page is its number, from 1 on, and behind its last phase stands kTurnPage. The janitor brings a page when everybody has left the one
// that lies there, a page before anyone comes to it.
#pragma once
#include "launch_fields.cuh"

constexpr u32 kTurnPage = 0xffffffffu;

template <int kWords_>   // of a page
struct LaunchPages {
  static constexpr int kWords = kWords_, kBytes = 2 * kWords * 4, kLoads = kWords / 4 / kWarpSize;
  static_assert(kWords % (4 * kWarpSize) == 0, "lanes load equally many vectors");
  u32* words;

  K3_DEVICE const u32* first() const { return words + 1; }
  // In which of the two places something lies.
  K3_DEVICE int place(const u32* at) const { return at - words >= kWords; }
  K3_DEVICE u32 number(int place) const { return ((volatile const u32*)words)[place * kWords]; }

  // All threads, before anyone reads: as many words as a block has, at most two pages.
  K3_DEVICE void begin(const u32* from, int count) const {
    for (int i = threadIdx.x; i < min_of(count, 2 * kWords); i += kLaunchThreads) words[i] = from[i];
  }
  K3_DEVICE bool turns(const u32* at) const { return *(volatile const u32*)at == kTurnPage; }
  K3_DEVICE bool has_next(const u32* at) const { return number(place(at) ^ 1) == number(place(at)) + 1; }
  K3_DEVICE const u32* next(const u32* at) const { return words + (place(at) ^ 1) * kWords + 1; }
  // Where the phase stands whose words would begin at `at`.
  K3_DEVICE const u32* turned(const u32* at, const Watch& watch, int phase) const {
    if (!turns(at)) return at;
    for (Spin spin; !has_next(at);) spin.turn(watch, kWaitProgram, phase, 0);
    __threadfence_block();
    return next(at);
  }
  // One warp: page `number` into `place`, whose words nobody reads any more.
  K3_DEVICE void load(const u32* from, int place, u32 number) const {
    const uint4* source = (const uint4*)(from + size_t(number - 1) * kWords) + lane_id();
    uint4 v[kLoads];
    K3_UNROLL
    for (int i = 0; i < kLoads; ++i) v[i] = source[i * kWarpSize];
    u32* to = words + place * kWords;
    K3_UNROLL
    for (int i = 0; i < kLoads; ++i) {
      const int at = (i * kWarpSize + lane_id()) * 4;
      if (at) to[at] = v[i].x;   // the number last
      to[at + 1] = v[i].y, to[at + 2] = v[i].z, to[at + 3] = v[i].w;
    }
    __syncwarp();
    __threadfence_block();
    if (lane_id() == 0) *(volatile u32*)to = number;
  }
};
