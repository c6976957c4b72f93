// What phases of the single launch leave in the exchange: rows of fields, each of BF16 or F32 values, and where readers find them.
#pragma once
#include "launch_exchange.cuh"

constexpr u32 kNoSlot = 15;
constexpr int kMaxInputs = 4, kMaxFields = 4, kMaxClears = 2, kHeadWords = 3;   // words of a phase before its units

// In 16-byte vectors. A field begins at vector `at` of a row of its slot; of the `width` vectors that are made `copies` are written behind one
// another, as far as `limit` reaches. Where there are several ranks, `at` is this
// one's place in the rows of `copies` of them, itself first. own: where it begins in a row of the record.
struct LaunchField { u16 at, width, limit, copies, own; };
// A field that a phase reads: where it begins in a row, from row to row, how long it is.
struct LaunchInput { u16 at, row, vectors; };
// Of a kind of phase. row: of its slot; record_row: of the record; vectors: of the slot, all rows.
struct LaunchLink {
  LaunchInput in[kMaxInputs];
  LaunchField out[kMaxFields];
  u16 row, record_row;
  int vectors;
};

// A phase in a block's program (launch_core.cuh).
struct ProgramPhase {
  int kind, units;
  const u32* tiles;
  K3_DEVICE ProgramPhase(const u32* at) : kind(at[0] & 255), units(at[0] >> 16), tiles(at + kHeadWords) {}
  K3_DEVICE const u32* words() const { return tiles - kHeadWords; }
  K3_DEVICE u32 again(int i) const { return ((volatile const u32*)tiles)[i - kHeadWords]; }   // a word that is not kept meanwhile
  K3_DEVICE int extra() const { return again(0) >> 8 & 255; }
  K3_DEVICE u32 in(int i) const { return again(1) >> 4 * i & 15; }
  K3_DEVICE u32 out() const { return again(1) >> 4 * kMaxInputs & 15; }
  K3_DEVICE u32 clear(int i) const { return again(1) >> 4 * (kMaxInputs + 1 + i) & 15; }   // a slot
  K3_DEVICE int cleared(int i) const { return again(2) >> 8 * (2 + i) & 255; }  // which kind's results lie there
  K3_DEVICE u32 needs() const { return again(2) & 0xffff; }
};

// Of the counts that go on from phase to phase (ConsumerCounts) what a kind of phase is to find and leave; w1 and w3 take their copies themselves.
enum LaunchCounting { kCountsNothing, kCountsCopies, kCountsTurns, kCountsExpertTurns };

// All consumers, as a team (WholeBlock in prims.cuh).
struct Consumers {
  static constexpr int kThreads = kConsumers * kWarpSize;
  Me me;
  K3_DEVICE int thread() const { return me.thread(); }
  K3_DEVICE int warp() const { return me.warp; }
  K3_DEVICE int lane() const { return me.lane; }
  K3_DEVICE void sync() const { warps_sync(kAllConsumers, kThreads); }
};

// Consumers as several teams of kWarps warps, by number.
template <int kWarps>
struct WarpTeam {
  Me me;
  K3_DEVICE int number() const { return me.warp / kWarps; }
  K3_DEVICE int thread() const { return warp() * kWarpSize + me.lane; }
  K3_DEVICE int warp() const { return me.warp % kWarps; }
  K3_DEVICE int lane() const { return me.lane; }
  K3_DEVICE void sync() const { warps_sync(1 + number(), kWarps * kWarpSize); }
};

// From tile kFirst_ on, rows of a product are the next field, of F32 values or BF16.
// kScattered_: each rank gets a part of a row.
template <int kFirst_, bool kF32_, bool kScattered_ = false>
struct LaunchSegment { static constexpr int kFirst = kFirst_; static constexpr bool kF32 = kF32_, kScattered = kScattered_; };

// put: eight lanes have the rows of half `half` of a tile, one each, of result row `row`. All lanes of the warp.
template <class Segment, class... More>
struct LaunchOut {
  static constexpr bool kF32 = Segment::kF32;
  template <int kField = 0, class Block>
  static K3_DEVICE void put(const Block& block, const ProgramPhase& p, int phase, int row, int tile, int half, float v, bool live, int lane) {
    if constexpr (sizeof...(More) > 0)
      if (tile >= LaunchOut<More...>::kFirst) {
        LaunchOut<More...>::template put<kField + 1>(block, p, phase, row, tile, half, v, live, lane);
        return;
      }
    if constexpr (kF32) {
      const uint4 vector = pack_floats(v, block.me.lane);
      if constexpr (Segment::kScattered && K3_RANKS > 1) {
        if (live && lane % 4 == 0) block.scatter(p, phase, row, (tile - kFirst) * 4 + half * 2 + lane / 4, vector, kField);
      } else if (live) block.template publish<4>(p, phase, row, (tile - kFirst) * 4 + half * 2 + lane / 4, vector, lane % 4, kField);
    } else {
      const uint4 vector = pack_vector(v, block.me.lane);
      if (live) block.publish(p, phase, row, (tile - kFirst) * 2 + half, vector, lane, kField);
    }
  }
  static constexpr int kFirst = Segment::kFirst;
};
