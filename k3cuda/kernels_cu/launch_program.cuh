// A block's program in shared memory: a step's words are 30 KB a block, which the ring would lack, so two pages of them are here at a time. Pages are whole
// phases; word 0 of a page is its number, from 1 on, and behind its last phase stands kTurnPage. The janitor brings a page when everybody has left the one
// that lies there, a page before anyone comes to it.
#pragma once
#include "launch_fields.cuh"

constexpr u32 kTurnPage = 0xffffffffu;

// Places are bytes from the start of shared memory, which take fewer registers than pointers.
//   kWords_  of a page
//   kAt_     where the first one lies
template <int kWords_, int kAt_>
struct LaunchPages {
  static constexpr int kWords = kWords_, kAt = kAt_, kPage = kWords * 4, kBytes = 2 * kPage, kLoads = kWords / 4 / kWarpSize;
  static constexpr u32 kFirst = kAt + 4;   // of the program's first phase
  static_assert(kWords % (4 * kWarpSize) == 0, "lanes load equally many vectors");
  u8* smem;

  K3_DEVICE const u32* words(u32 at) const { return (const u32*)(smem + at); }
  K3_DEVICE u32 behind(const ProgramPhase& p, u32 at) const { return at + (kHeadWords + p.units) * 4; }
  // Which of the two pages something lies in.
  static K3_DEVICE int page(u32 at) { return at >= u32(kAt + kPage); }
  K3_DEVICE u32 number(int page) const { return *(volatile const u32*)(smem + kAt + page * kPage); }

  // All threads, before anyone reads: of a block's words as many as two pages have.
  K3_DEVICE void begin(const u32* from, int count) const {
#pragma unroll 1
    for (int i = Me().thread(); i < min_of(count, 2 * kWords); i += kLaunchThreads) ((u32*)(smem + kAt))[i] = from[i];
  }
  K3_DEVICE bool turns(u32 at) const { return *(volatile const u32*)(smem + at) == kTurnPage; }
  K3_DEVICE bool has_next(u32 at) const { return number(page(at) ^ 1) == number(page(at)) + 1; }
  K3_DEVICE u32 next(u32 at) const { return kFirst + (page(at) ^ 1) * kPage; }
  // Where the phase stands whose words would begin at `at`.
  K3_DEVICE u32 turned(u32 at, const Watch& watch, int phase) const {
    if (!turns(at)) return at;
    for (Spin spin; !has_next(at);) spin.turn(watch, kWaitProgram, phase, 0);
    __threadfence_block();
    return next(at);
  }
  // One warp: page `number` in the place of `page`, whose words nobody reads any more.
  K3_DEVICE void load(const u32* from, int page, u32 number) const {
    const uint4* source = (const uint4*)(from + size_t(number - 1) * kWords) + lane_id();
    uint4 v[kLoads];
    K3_UNROLL
    for (int i = 0; i < kLoads; ++i) v[i] = source[i * kWarpSize];
    u32* to = (u32*)(smem + kAt + page * kPage);
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
