// What a block of a wide step's product has, and how weights come to its warps. On sm_90a four warps multiply together (wide_columns.cuh), elsewhere
// each does by itself (wide_tokens.cuh).
#pragma once
#include "mla_products.cuh"
#include "row_core.cuh"

constexpr int kWideShared = 227 * 1024, kWideTokens = 118 * 1024;   // bytes of shared memory: of a block, of its tokens at most
#ifdef K3_WGMMA
constexpr bool kWideColumns = true;   // tokens are columns that the tensor cores read from shared memory
#else
constexpr bool kWideColumns = false;
#endif

//   kTotal, kLeaves, kSteps  16-row tiles of the product; leaves of K that this rank holds, and k-steps in each
//   kRows                    tokens, whole groups of 64
template <int kTotal_, int kLeaves_, int kSteps_, int kRows_>
struct WideShape {
  static constexpr int kTotal = kTotal_, kLeaves = kLeaves_, kSteps = kSteps_, kRows = kRows_;
  static constexpr int kPairs = (kSteps + 1) / 2, kTileX = kPairs * kStepBytes;          // bytes of eight tokens' part of a leaf
  // Token tiles of a block. Short products have few weights to read twice.
  static constexpr int kNT = kLeaves > 1 && kRows % 128 == 0 && 16 * kTileX <= kWideTokens ? 16 : 8;
  // Row tiles of a warp at a time (128 sums a thread at most), and of the warps that multiply together.
  static constexpr int kMT = kWideColumns ? 1 : kLeaves == 1 ? 2 : 32 / kNT, kUnit = kWideColumns ? 4 : kMT;
  static constexpr int kWarps = kWideColumns ? 16 : 8, kThreads = kWarps * kWarpSize;
  // Of wide_sum: fragments of a block, and lanes that share a fragment's lane.
  static constexpr int kSumFragments = 2, kSumLanes = min_of(kLeaves, 4), kSumThreads = kSumFragments * kSumLanes * kWarpSize;
  static constexpr int kTokenTiles = kRows / kTokenTile, kGroups = kTokenTiles / kNT, kX = kNT * kTileX;
  static constexpr int kChunkSteps = chunk_steps(kSteps, 4, kWideColumns), kLeafChunks = kSteps / kChunkSteps;
  static constexpr int kTileChunk = kChunkSteps * kStepBytes, kChunkBytes = kMT * kTileChunk;
  static constexpr int kSlots = min_of(6, (kWideShared - kX) / (kWarps * (kChunkBytes + 8)));
  static constexpr int kRingAt = kX, kBarrierAt = kRingAt + kWarps * kSlots * kChunkBytes;
  static constexpr int kSmem = kBarrierAt + kWarps * kSlots * 8;
  static constexpr bool kFits = kX <= kWideTokens && kSlots >= 2;
};

// Blocks of the product: of every leaf and group of tokens as many as the machine holds side by side.
template <class S>
constexpr int wide_blocks(int sms) {
  return S::kLeaves * S::kGroups * max_of(1, min_of(sms / (S::kLeaves * S::kGroups), groups_of(S::kTotal, S::kUnit)));
}
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
  K3_DEVICE void start() {
    if (lane_id() == 0) {
      for (int s = 0; s < S::kSlots; ++s) barrier_init(full + s, 1);
      barrier_fence_init();
      for (int s = 0; s < S::kSlots; ++s) ((Ring*)this)->issue(s);
    }
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

// A warp's tiles from `first` on, S::kMT neighbours at a time and `next` from these to the next ones, chunk by chunk.
template <class S>
struct WideRing : WarpRing<S, WideRing<S>> {
  using WarpRing<S, WideRing>::slots, WarpRing<S, WideRing>::full;
  const uint4* w;        // of the leaf, tile 0
  int tile, chunk = 0;   // of the next copy
  const int next;

  K3_DEVICE WideRing(const uint4* w, int first, int next, u8* smem) : WarpRing<S, WideRing>(smem), w(w), tile(first), next(next) {}
  K3_DEVICE void issue(int to) {   // lane 0
    if (tile >= S::kTotal) return;
    int count = min_of(S::kMT, S::kTotal - tile);
    barrier_expect(full + to, count * S::kTileChunk);
    for (int m = 0; m < count; ++m)
      bulk_copy(slots + to * S::kChunkBytes + m * S::kTileChunk,
                w + (size_t(tile + m) * S::kLeaves * S::kSteps + chunk * S::kChunkSteps) * kWarpSize, S::kTileChunk, full + to);
    if (++chunk == S::kLeafChunks) chunk = 0, tile += next;
  }
};
