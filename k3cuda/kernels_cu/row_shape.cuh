// How a skinny product is laid over warps, blocks and clusters: sizes at compile time, and the choice by size.
#pragma once
#include "prims.cuh"

constexpr int kTileRows = 16, kTokenTile = 8;
constexpr int kStepBytes = kWarpSize * 16;   // one 16 x 16 tile of BF16

constexpr int min_of(int a, int b) { return a < b ? a : b; }
constexpr int max_of(int a, int b) { return a > b ? a : b; }

// Steps of a copy: the most that divide a leaf and fit `most`. Where x is not in registers an even number, or the whole leaf,
// so that two steps share one load of x.
constexpr int chunk_steps(int steps, int most, bool any) {
  for (int n = min_of(steps, most); n > 1; --n)
    if (steps % n == 0 && (any || n % 2 == 0 || n == steps)) return n;
  return any ? 1 : steps;
}

// Where a block keeps its share of x: registers (one token tile, short leaves), shared memory, or nowhere: it passes by L1.
enum XPlace { kXStreamed, kXRegisters, kXShared };

// How one product is laid over the machine. Nothing here changes a byte of the result.
//   kLeaves_, kSteps_  leaves of K that this rank holds, and k-steps (of 16) in each
//   kMT_, kNT_         16-row tiles and 8-token tiles of a warp
//   kWK_, kWM_         warps of a block along leaves and along row tiles
//   kCS_               blocks of a cluster, along leaves
//   kRing_             bytes of shared memory that a block fills ahead; 0: weights go straight to registers
//   kShareX_           x may take its place in shared memory
//   kChunk_            bytes of one bulk copy, at most
template <int kLeaves_, int kSteps_, int kMT_, int kNT_, int kWK_, int kWM_, int kCS_, int kRing_ = 96 * 1024,
          bool kShareX_ = true, int kChunk_ = 8192>
struct RowShape {
  static constexpr int kLeaves = kLeaves_, kSteps = kSteps_, kMT = kMT_, kNT = kNT_, kWK = kWK_, kWM = kWM_, kCS = kCS_;
  static constexpr int kWarps = kWK * kWM, kThreads = kWarps * kWarpSize;
  static constexpr int kWarpLeaves = kLeaves / (kWK * kCS), kPairs = (kSteps + 1) / 2;
  static constexpr int kTiles = kMT * kWM;                     // of a block
  static constexpr int kTokens = kNT * kTokenTile;
  static constexpr bool kRing = kRing_ > 0;
  // Few tokens: a warp's next copy starts when the one before has landed. All at once fill the queues to the memory, and what the kernels
  // before load in their chains waits behind them.
  static constexpr bool kPaced = kRing && kNT == 1;
  static constexpr int kXBytes = kWK * kWarpLeaves * kPairs * kNT * kStepBytes;   // the block's share of x
  static constexpr XPlace kX = kNT == 1 && kWarpLeaves * kSteps <= 48 ? kXRegisters
                             : kShareX_ && kXBytes <= 118 * 1024 ? kXShared : kXStreamed;
  // Where x is loaded on the way, a chunk's loads are all in flight at once: registers bound it.
  static constexpr int kChunkSteps = chunk_steps(kSteps, kRing && (kX != kXStreamed || kNT == 1) ? max_of(kChunk_ / kStepBytes, 2) : 4, kX == kXRegisters);
  static constexpr int kTileChunk = kChunkSteps * kStepBytes;  // bytes
  static constexpr int kChunkBytes = kTileChunk * kMT;
  static constexpr int kLeafChunks = kSteps / kChunkSteps, kGroupChunks = kWarpLeaves * kLeafChunks;
  static constexpr int kSlots = kRing ? max_of(1, kRing_ / (kWarps * kChunkBytes)) : 0;
  static constexpr int kTokenStride = kTileRows + 4;           // floats; 4 more keep a warp's stores off each other's banks
  static constexpr int kPartial = kTiles * kTokens * kTokenStride;              // floats of one warp row of leaf sums
  static constexpr int kOwned = (kTileRows * kTokens + kCS - 1) / kCS;          // (row, token) pairs a block of a cluster finishes
  static constexpr int kBarrierAt = kWarps * kSlots * kChunkBytes;
  static constexpr int kXAt = (kBarrierAt + kWarps * kSlots * 8 + 15) / 16 * 16;
  static constexpr int kPartialAt = kXAt + (kX == kXShared ? kXBytes : 0);
  static constexpr int kInbox = kCS > 1 ? kCS * kTiles * kOwned : 0;            // floats
  static constexpr int kInboxAt = kPartialAt + kWK * kPartial * 4;
  static constexpr int kHeardAt = kInboxAt + 2 * kInbox * 4;
  static constexpr int kSmem = kHeardAt + (kCS > 1 ? 16 : 0);
  static_assert(kWarpLeaves * kWK * kCS == kLeaves, "warps and blocks take equal runs of leaves");
};

// ---- the layout we use, by size only; docs/kernels.md has the measurements behind each rule ----

constexpr int groups_of(int tiles, int per) { return (tiles + per - 1) / per; }

// Blocks of a cluster for a product with all of K, few tokens. A model in nanoseconds: an SM is fed 37 bytes in one; a group's end costs
// 300, across blocks 700. What counts is the SM with the most groups, so a tile of all K is often too coarse a unit. Parts of the machine have 16 or 18 SMs,
// so clusters of four and eight do not get every SM: 33 of four are one too many for 132.
constexpr int cluster_for(int groups, int group_bytes, int leaves, int sms) {
  int best = 1, least = 1 << 30;
  for (int n = 1; n <= 8 && n < leaves; n *= 2) {
    int cost = groups_of(groups, max_of(1, (n > 2 && sms > 16 ? sms / 16 * 16 : sms) / n)) * (group_bytes / n / 37 + (n > 1 ? 700 : 300));
    if (cost < least) least = cost, best = n;
  }
  return best;
}

//   kTotal   16-row tiles of the product (both halves of a GLU counted)
//   kPair    two neighbouring tiles meet in one epilogue
//   kSms     multiprocessors to fill
template <int kTotal, int kLeaves, int kSteps, int kNT, bool kPair, int kSms>
struct RowChoice {
  static constexpr bool kMany = kLeaves == 16;
  static constexpr int kTileBytes = kLeaves * kSteps * kStepBytes;
  // Long products of many tokens: x passes by L1, shared by warps that take other tiles of the same leaf.
  static constexpr bool kStream = kNT > 1 && kMany && kTotal >= 150;
  static constexpr int kMT = kNT == 1 ? (kPair ? 2 : 1) : kStream ? 2 : 1;
  static constexpr int kCS = !kMany ? 1 : kNT == 1 ? cluster_for(groups_of(kTotal, kMT), kTileBytes * kMT, kLeaves, kSms) : kStream ? 8 : min_of(kNT, 8);
  static constexpr int kWK = kMany ? kLeaves / kCS : min_of(kLeaves, 8);
  static constexpr int kWM = kNT == 1 ? (kMany ? 1 : kTileBytes > 48 * 1024 ? max_of(4 / kWK, 1) : max_of(min_of(4 / kWK, 48 * 1024 / kTileBytes), kPair ? 2 : 1))
                                      : kMany ? max_of(8 / kWK, kPair ? 2 : 1) : max_of(4 / kWK, kPair ? 2 : 1);
  static constexpr int kGroupBytes = kTileBytes / kCS * kMT * kWM;
  static constexpr int kRing = min_of(kNT == 1 ? 100 * 1024 : kNT == 8 && !kStream ? 40 * 1024 : 64 * 1024, kGroupBytes);
  // Few tokens: the copy's size counts, other warps' copies are on their way meanwhile; one after the other (kPaced), so what a warp reads of a tile comes in
  // one where it is no more than that. More: the warp works long enough on one copy for the next to be there.
  static constexpr int kMostBytes = 8192;
  static constexpr int kChunk = kNT == 1 && kTileBytes / (kCS * kWK) <= kMostBytes ? kMostBytes
                              : max_of(2048, min_of(kMostBytes, kRing / ((kNT == 1 ? 3 : 2) * kWK * kWM * kMT)));
  typedef RowShape<kLeaves, kSteps, kMT, kNT, kWK, kWM, kCS, kRing, !kStream, kChunk> Shape;
};
template <int kTotal, int kLeaves, int kSteps, int kNT, bool kPair = false, int kSms = 132>
using RowAuto = typename RowChoice<kTotal, kLeaves, kSteps, kNT, kPair, kSms>::Shape;

// Blocks to launch: every group at once where they fit side by side, else one wave of whole clusters that walks over them.
// 128: registers of a thread, at most, of the shapes that RowChoice makes for one token tile.
template <class S>
constexpr int row_blocks(int tiles, int sms) {
  constexpr int kResident = max_of(1, min_of(227 * 1024 / (S::kSmem + 1024), 65536 / (128 * S::kThreads)));
  int all = groups_of(tiles, S::kTiles) * S::kCS;
  return S::kNT > 1 || all <= kResident * sms ? all : kResident * sms / S::kCS * S::kCS;
}

// What the host must know to launch kernel NAME: blocks, threads, dynamic shared memory, blocks of a cluster.
#define K3_LAUNCH_INFO(NAME, TILES, SMS, ...) \
  extern "C" __constant__ int NAME##_launch[4] = {row_blocks<__VA_ARGS__>(TILES, SMS), __VA_ARGS__::kThreads, __VA_ARGS__::kSmem, __VA_ARGS__::kCS};
