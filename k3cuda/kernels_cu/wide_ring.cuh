// What a block of a wide step's product has, and how weights come to its warps. On sm_90a four warps multiply together (wide_columns.cuh), elsewhere
// each does by itself (wide_tokens.cuh).
#pragma once
#include "mla_products.cuh"
#include "row_core.cuh"

constexpr int kWideShared = 227 * 1024, kWideTokens = 118 * 1024;   // bytes of shared memory: of a block, of its tokens at most
constexpr int kLeastWide = 16;                                       // tokens
#ifdef K3_WGMMA
constexpr bool kWideColumns = true;   // tokens are columns that the tensor cores read from shared memory
#else
constexpr bool kWideColumns = false;
#endif

//   kTotal, kLeaves, kSteps  16-row tiles of the product; leaves of K that this rank holds, and k-steps in each
//   kRows                    tokens: 16, 32 or whole groups of 64
//   kSms                     multiprocessors to fill
template <int kTotal_, int kLeaves_, int kSteps_, int kRows_, int kSms>
struct WideShape {
  static constexpr int kTotal = kTotal_, kLeaves = kLeaves_, kSteps = kSteps_, kRows = kRows_;
  static constexpr int kPairs = (kSteps + 1) / 2, kTileX = kPairs * kStepBytes;          // bytes of eight tokens' part of a leaf
  // Token tiles of a block. Short products have few weights to read twice.
  static constexpr int kNT = kLeaves > 1 && kRows % 128 == 0 && 16 * kTileX <= kWideTokens ? 16 : min_of(kRows / kTokenTile, 8);
  // Row tiles of a warp at a time (128 sums a thread at most), and of the warps that multiply together.
  static constexpr int kMT = kWideColumns ? 1 : kLeaves == 1 ? 2 : 32 / max_of(kNT, 8), kUnit = kWideColumns ? 4 : kMT;
  // Of wide_sum: fragments of a block, and lanes that share a fragment's lane.
  static constexpr int kSumFragments = 2, kSumLanes = min_of(kLeaves, 4), kSumThreads = kSumFragments * kSumLanes * kWarpSize;
  static constexpr int kTokenTiles = kRows / kTokenTile, kGroups = kTokenTiles / kNT, kX = kNT * kTileX;
  // Of every leaf and group of tokens as many blocks as the machine holds side by side. They take units in turn, and of the last round equally many tiles.
  static constexpr int kShares = max_of(1, min_of(kSms / (kLeaves * kGroups), groups_of(kTotal, kUnit)));
  static constexpr int kRounds = kTotal / (kShares * kUnit), kRest = kTotal - kRounds * kShares * kUnit, kMostUnits = kRounds + (kRest > 0);
  static constexpr int kBlocks = kLeaves * kGroups * kShares;
  // Teams of kUnit / kMT warps multiply, a warp that may have a tile has a ring; others only bring tokens.
  static constexpr int kTeams = kWideColumns ? min_of(kMostUnits, 4) : 8, kTurns = groups_of(kMostUnits, kTeams);
  static constexpr int kRings = !kWideColumns ? kTeams : kRounds == 0 || kTurns > 1 ? kTeams * kUnit : kRounds * kUnit + groups_of(kRest, kShares);
  static constexpr int kWarps = kWideColumns ? max_of(kTeams * 4, min_of(groups_of(kPairs * kNT, 12 * 4), 4) * 4) : 8, kThreads = kWarps * kWarpSize;
  // Beside a block that leaves leaf sums is room for two that add them. Where shared memory holds all of a block's weights they come in long chunks.
  static constexpr int kShared = kWideShared - (kLeaves > 1 ? 10 * 1024 : 0);
  static constexpr bool kHeld = kWideColumns && kX + kRings * kTurns * (kSteps * kStepBytes + 64) <= kShared;
  static constexpr int kChunkSteps = chunk_steps(kSteps, kHeld ? 8 : 4, kWideColumns), kLeafChunks = kSteps / kChunkSteps;
  static constexpr int kTileChunk = kChunkSteps * kStepBytes, kChunkBytes = kMT * kTileChunk;
  static constexpr int kSlots = kHeld ? kTurns * kLeafChunks : min_of(6, (kShared - kX) / (kRings * (kChunkBytes + 8)));
  // Slots filled before the wait. An SM gets what it asks for in order: behind more, the tokens come later than they are needed.
  static constexpr int kAhead = kRows > 64 || !kWideColumns ? kSlots : max_of(1, min_of(kSlots, 64 * 1024 / (kRings * kChunkBytes)));
  static constexpr int kRingAt = kX, kBarrierAt = kRingAt + kRings * kSlots * kChunkBytes;
  static constexpr int kSmem = kBarrierAt + kRings * kSlots * 8;
  static constexpr bool kFits = kX <= kWideTokens && (kHeld || kSlots >= 2);
};

// Row tiles first .. end of unit `unit` of a share.
template <class S>
struct WideUnit {
  int first, end;
  K3_DEVICE WideUnit(int unit, int share) {
    constexpr int kLast = S::kRounds * S::kShares * S::kUnit;
    const bool is_whole = unit < S::kRounds;
    first = is_whole ? (unit * S::kShares + share) * S::kUnit : kLast + S::kRest * share / S::kShares;
    end = is_whole ? first + S::kUnit : kLast + S::kRest * (share + 1) / S::kShares;
  }
};

// Blocks of the kernel that adds leaf sums.
template <class S, bool kPair>
constexpr int wide_sum_blocks() {
  return S::kLeaves == 1 ? 0 : groups_of(groups_of(S::kTotal, kPair ? 2 : 1) * S::kTokenTiles, S::kSumFragments);
}

// Chunks of weights through slots of a warp's own. Ring: gives `issue(slot)`, lane 0's next copy, if there is one.
template <class S, class Ring>
struct WarpRing {
  u8* slots;
  u64* full;
  int slot = 0;          // in use
  u32 parity = 0;

  K3_DEVICE WarpRing(u8* smem) : slots(smem + S::kRingAt + warp_id() * S::kSlots * S::kChunkBytes), full((u64*)(smem + S::kBarrierAt) + warp_id() * S::kSlots) {}
  K3_DEVICE void start(int ahead = S::kSlots) {
    if (lane_id() == 0) {
      for (int s = 0; s < S::kSlots; ++s) barrier_init(full + s, 1);
      barrier_fence_init();
    }
    fill(0, ahead);
  }
  // Slots from .. to for the first time.
  K3_DEVICE void fill(int from, int to) {
    if (lane_id() == 0)
      for (int s = from; s < to; ++s) ((Ring*)this)->issue(s);
    __syncwarp();
  }
  K3_DEVICE const uint4* take() {
    barrier_wait(full + slot, parity);
    return (const uint4*)(slots + slot * S::kChunkBytes) + lane_id();
  }
  K3_DEVICE void release() {
    __syncwarp();
    if (lane_id() == 0) ((Ring*)this)->issue(slot);
    if (++slot == S::kSlots) slot = 0, parity ^= 1;
  }
};

// A warp's tiles of every S::kTeams-th unit from `unit` on, chunk by chunk.
template <class S>
struct WideRing : WarpRing<S, WideRing<S>> {
  using WarpRing<S, WideRing>::slots, WarpRing<S, WideRing>::full;
  const uint4* w;        // of the leaf, tile 0
  const int share;
  int unit, chunk = 0;   // of the next copy

  K3_DEVICE WideRing(const uint4* w, int unit, int share, u8* smem) : WarpRing<S, WideRing>(smem), w(w), share(share), unit(unit) {}
  K3_DEVICE void issue(int to) {   // lane 0
    if (unit >= S::kMostUnits) return;
    const WideUnit<S> now(unit, share);
    const int tile = now.first + warp_id() % (S::kUnit / S::kMT), count = min_of(S::kMT, now.end - tile);
    if (count <= 0) return;   // only in the last round
    barrier_expect(full + to, count * S::kTileChunk);
    for (int m = 0; m < count; ++m)
      bulk_copy(slots + to * S::kChunkBytes + m * S::kTileChunk,
                w + (size_t(tile + m) * S::kLeaves * S::kSteps + chunk * S::kChunkSteps) * kWarpSize, S::kTileChunk, full + to);
    if (++chunk == S::kLeafChunks) chunk = 0, unit += S::kTeams;
  }
};
