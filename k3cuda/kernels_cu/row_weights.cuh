// Where the weights of row_core.cuh come from: of a block's row tiles what each warp reads, and one interface with two bodies that bring it, a ring of bulk copies
// and loads of the lanes' own. start() touches nothing but weights, so it runs before grid_wait.
#pragma once
#include "exchange.cuh"
#include "row_shape.cuh"

// The row tiles of one block: `first`, then every `stride` groups of kTiles until `tiles`. Blocks before `others` do something else.
template <class S>
struct Groups {
  int tiles, first, stride;
  K3_DEVICE Groups(int n, int others) : tiles(n), first((int(blockIdx.x) - others) / S::kCS), stride((int(gridDim.x) - others) / S::kCS) {}
  K3_DEVICE int tile(int i) const { return (first + i * stride) * S::kTiles; }
  K3_DEVICE bool has(int i) const { return tile(i) < tiles; }
};

// What a warp reads: of every group of the block its tiles' run of leaves, chunk by chunk. It goes along with what was asked for last.
template <class S>
struct WeightStream {
  const uint4* w;
  int tiles, stride, first_leaf, warp_tile;   // stride: tiles from one group of the block to the next
  int tile, chunk = 0;                        // of the next chunk: its group's first tile

  K3_DEVICE WeightStream(const uint4* weights, const Groups<S>& g, int leaf, int in_group)
      : w(weights), tiles(g.tiles), stride(g.stride * S::kTiles), first_leaf(leaf), warp_tile(in_group), tile(g.tile(0)) {}
  K3_DEVICE bool has_next() const { return tile < tiles; }
  // Tile `m` of the warp's. A group that reaches past the end reads the last tile again and drops it.
  K3_DEVICE const uint4* at(int m) const {
    const u32 step = (min_of(tile + warp_tile + m, tiles - 1) * S::kLeaves + first_leaf) * S::kSteps + chunk * S::kChunkSteps;
    return w + size_t(step) * kWarpSize;
  }
  K3_DEVICE void advance() {
    if (++chunk == S::kGroupChunks) chunk = 0, tile += stride;
  }
};

// Each warp fills its own slots by bulk copies, over the ends of groups; no other warp waits for it.
template <class S>
struct RingSource {
  WeightStream<S> stream;
  u8* slots;
  u64* full;
  int slot = 0;   // in use
  u32 parity = 0;

  K3_DEVICE RingSource(const WeightStream<S>& s, u8* smem) : stream(s) {
    slots = smem + warp_id() * S::kSlots * S::kChunkBytes;
    full = (u64*)(smem + S::kBarrierAt) + warp_id() * S::kSlots;
  }
  K3_DEVICE void issue(int to) {
    if (!stream.has_next()) return;
    barrier_expect(full + to, S::kChunkBytes);
    K3_UNROLL
    for (int m = 0; m < S::kMT; ++m)
      bulk_copy(slots + to * S::kChunkBytes + m * S::kTileChunk, stream.at(m), S::kTileChunk, full + to);
    stream.advance();
  }
  K3_DEVICE void start() {
    for (int s = lane_id(); s < S::kSlots; s += kWarpSize) barrier_init(full + s, 1);
    barrier_fence_init();
    __syncwarp();
    if (lane_id() == 0) {
      K3_ROLLED
      for (int s = 0; s < S::kSlots && stream.has_next(); ++s) {
        if (S::kPaced && s > 0) barrier_wait(full + s - 1, 0);
        issue(s);
      }
    }
    __syncwarp();
  }
  K3_DEVICE void take() { barrier_wait(full + slot, parity); }
  K3_DEVICE uint4 step(int u, int m) const {
    return ((const uint4*)(slots + slot * S::kChunkBytes + m * S::kTileChunk))[u * kWarpSize + lane_id()];
  }
  K3_DEVICE void release() {
    __syncwarp();
    if (lane_id() == 0) issue(slot);
    if (++slot == S::kSlots) slot = 0, parity ^= 1;
  }
};

// Each lane loads its fragments itself, one chunk ahead.
template <class S>
struct DirectSource {
  WeightStream<S> stream;
  uint4 ahead[S::kChunkSteps][S::kMT];

  K3_DEVICE DirectSource(const WeightStream<S>& s, u8*) : stream(s) {}
  K3_DEVICE void fetch(int u, int m) {
    if (stream.has_next()) ahead[u][m] = load_weights(stream.at(m) + u * kWarpSize + lane_id());
  }
  K3_DEVICE void start() {
    K3_UNROLL
    for (int u = 0; u < S::kChunkSteps; ++u)
      K3_UNROLL
      for (int m = 0; m < S::kMT; ++m) fetch(u, m);
    stream.advance();
  }
  K3_DEVICE void take() {}
  K3_DEVICE uint4 step(int u, int m) {
    uint4 v = ahead[u][m];
    fetch(u, m);
    return v;
  }
  K3_DEVICE void release() { stream.advance(); }
};

template <class S, bool kRing> struct SourceOf { typedef RingSource<S> type; };
template <class S> struct SourceOf<S, false> { typedef DirectSource<S> type; };
