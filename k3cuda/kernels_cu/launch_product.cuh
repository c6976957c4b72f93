// A product inside the single launch: the sums of row_core.cuh, leaf by leaf, with weights out of the block's ring.
// The leaves of a tile lie in one block or in the blocks of one cluster, equally many each; a unit is what a block does of a tile.
#pragma once
#include "launch_exchange.cuh"

constexpr u32 kNoSlot = 15;
constexpr int kSumStride = kTileRows + 4;   // floats from token to token of leaf sums: a warp's stores keep off each other's banks

// How results of a kind of phase lie in the exchange, in vectors of eight values: a row of `width` of them is written `copies` times, as far as
// `row` reaches. `in_row`: from row to row of what the phase reads.
struct LaunchLink { int in_row, width, copies, row; };

// A phase in a block's program (launch_core.cuh).
struct ProgramPhase {
  int kind, units;
  u32 in, out, clear;
  const u32* tiles;
  K3_DEVICE ProgramPhase(const u32* at) : kind(at[0] & 15), units(at[0] >> 16), in(at[0] >> 4 & 15), out(at[0] >> 8 & 15), clear(at[0] >> 12 & 15), tiles(at + 2) {}
  K3_DEVICE u32 needs() const { return ((volatile const u32*)tiles)[-1]; }
  K3_DEVICE const u32* next() const { return tiles + units; }
};

// One warp: its leaf of one tile. x: [pair][token][quarter], the leaf's.
template <class P, int kTokens, class Ring>
K3_DEVICE void leaf_chain(float (&c)[4], Ring& ring, u32 copy, const uint4* x, const Me& me, const Watch& watch, int phase) {
  K3_UNROLL
  for (int i = 0; i < 4; ++i) c[i] = 0.f;
#pragma unroll 1
  for (int chunk = 0; chunk < P::kChunks; ++chunk, copy += P::kBlockLeaves) {
    const uint4* w = (const uint4*)ring.take(copy, watch, phase) + me.lane;
    const uint4* at = x + chunk * (P::kChunkSteps / 2) * kTokens * 4 + me.lane;
    uint4 ahead[2][2], v[2] = {};   // two steps that share a load of x, while those before them multiply
    auto load = [&](int pair) {
      ahead[pair % 2][0] = w[pair * 2 * kWarpSize], ahead[pair % 2][1] = w[(pair * 2 + 1) * kWarpSize];
      if (me.lane < kTokens * 4) v[pair % 2] = at[pair * kTokens * 4];
    };
    load(0);
    K3_UNROLL
    for (int pair = 0; pair < P::kChunkSteps / 2; ++pair) {
      if (pair + 1 < P::kChunkSteps / 2) load(pair + 1);
      mma(c, ahead[pair % 2][0], v[pair % 2].x, v[pair % 2].y);
      mma(c, ahead[pair % 2][1], v[pair % 2].z, v[pair % 2].w);
    }
    ring.give(copy, kConsumers, me);
  }
}

// Leaf sums of a unit into shared memory, [leaf][token][row], by the warps that took its leaves: group `group` of kWarps, this one its number `own`.
template <int kWarps, int kTokens>
K3_DEVICE void store_leaf_sums(const float (&c)[4], float* partial, int group, int own, const Me& me) {
  K3_UNROLL
  for (int i = 0; i < 4; ++i) {
    const int token = me.lane % 4 * 2 + i % 2, row = me.lane / 4 + i / 2 * 8;
    if (token < kTokens) partial[(own * kTokens + token) * kSumStride + row] = c[i];
  }
  if constexpr (kWarps == 1) __syncwarp();
  else warps_sync(1 + group, kWarps * kWarpSize);
}

// Blocks of a cluster finish a unit together: each tells the others its sums of their vectors (a token's eight rows), which go round the
// blocks, and hears theirs one unit later, so that nobody waits for them. Every block has a vector at least, live or not: who sends for
// a unit has heard all of the one before the last, whose senders had heard all of two before that. So four inboxes in turn are enough.
constexpr int kInboxTurns = 4;

//   kLeaves_, kSteps_  leaves of K that this rank holds, k-steps in each: an even number, so that two of them share a load of x
//   kParts_            blocks of a cluster that share a tile, 1 or all
template <int kLeaves_, int kSteps_, int kParts_, int kSlotBytes>
struct LaunchProduct {
  static constexpr int kLeaves = kLeaves_, kSteps = kSteps_, kParts = kParts_;
  static constexpr int kBlockLeaves = kLeaves / kParts, kGroups = kConsumers / kBlockLeaves;   // kGroups units at a time
  static constexpr int kChunkSteps = chunk_steps(kSteps, kSlotBytes / kStepBytes, false), kChunks = kSteps / kChunkSteps;
  static constexpr int kChunkBytes = kChunkSteps * kStepBytes, kUnitCopies = kBlockLeaves * kChunks;
  static constexpr int kOwnVectors = kBlockLeaves * kSteps * 2;   // of a token, what one block reads
  static constexpr int x_vectors(int tokens, int) { return tokens * kOwnVectors; }
  static_assert(kSteps % 2 == 0 && kBlockLeaves * kParts == kLeaves && kGroups * kBlockLeaves == kConsumers, "warps take whole leaves");
  static_assert(kChunkBytes <= kSlotBytes, "a copy fits a slot");

  // Copy `j` of a unit: chunk by chunk, so that all its warps have something early.
  static K3_DEVICE size_t offset(int tile, int part, int j) {
    return ((size_t(tile) * kLeaves + part * kBlockLeaves + j % kBlockLeaves) * kSteps + j / kBlockLeaves * kChunkSteps) * kStepBytes;
  }

  template <class Block, class Producer>
  static K3_DEVICE void produce(const Block& block, Producer& producer, const ProgramPhase& p, const u8* w, int phase) {
    const int part = kParts > 1 ? block.part() : 0;
    producer.copies(p.units * kUnitCopies, kChunkBytes, kChunkBytes, phase, [](int) { return 1; },
                    [&](int i, int) { return w + offset(p.tiles[i / kUnitCopies], part, i % kUnitCopies); });
  }

  template <class Block>
  static K3_DEVICE void consume(Block& block, const ProgramPhase& p, int phase) {
    typedef typename Block::Shape S;
    const int leaf = block.me.warp % kBlockLeaves, group = block.me.warp / kBlockLeaves;
    uint4* shared = block.x();
    const int per = kParts == 1 ? block.link(p).in_row : kOwnVectors;   // of parts, a block's own; else all, though it may use less
    block.template receive<kOwnVectors * S::kTokens>(p, phase, block.a.rows, per, kParts == 1 ? 0 : block.part() * kOwnVectors, [&](int token, int k, const uint4& v) {
      if (k < kOwnVectors) shared[(k / 4 * S::kTokens + token) * 4 + k % 4] = v;
    });
    block.received(phase);
    const uint4* x = shared + leaf * (kSteps / 2) * S::kTokens * 4;
    // Kinds that clusters share divide the warps alike, so their turns count on; warps of another kind's group may have had different numbers of them.
    u32 own_turns = 0, &turns = kParts > 1 ? block.counts.turns : own_turns;
    int before = -1;   // the tile of the turn before, which this block has yet to hear of
#pragma unroll 1
    for (int u = group; u < p.units; u += kGroups, ++turns) {
      float c[4];
      leaf_chain<LaunchProduct, S::kTokens>(c, block.ring, block.counts.copies + u * kUnitCopies + leaf, x, block.me, block.a.watch, phase);
      float* partial = block.partial(turns) + group * kBlockLeaves * S::kTokens * kSumStride;
      store_leaf_sums<kBlockLeaves, S::kTokens>(c, partial, group, leaf, block.me);
      if constexpr (kParts == 1) finish(block, p, phase, partial, leaf * kWarpSize + block.me.lane, p.tiles[u]);
      else {
        tell(block, partial, leaf * kWarpSize + block.me.lane, group, turns);
        if (before >= 0) hear(block, p, phase, group, leaf, turns - 1, before);
        before = p.tiles[u];
      }
    }
    if constexpr (kParts > 1)
      if (before >= 0) hear(block, p, phase, group, leaf, turns - 1, before);
    block.counts.copies += p.units * kUnitCopies;
  }

  template <class Block>
  static K3_DEVICE void finish(Block& block, const ProgramPhase& p, int phase, const float* partial, int thread, int tile) {
    typedef typename Block::Shape S;
    const int live = block.a.rows * kTileRows;
#pragma unroll 1
    for (int i = thread; i - block.me.lane < live; i += kBlockLeaves * kWarpSize) {
      const int token = min_of(i / kTileRows, S::kTokens - 1);
      const uint4 v = pack_vector(tree_sum<kBlockLeaves>(partial + token * kSumStride + i % kTileRows, S::kTokens * kSumStride), block.me.lane);
      if (i < live) block.publish(p, phase, token, tile * 2 + i / 8 % 2, v, i % 8);
    }
  }

  // Inbox: [source][own vector][8].
  template <class Block>
  static K3_DEVICE void tell(Block& block, const float* partial, int thread, int group, u32 turn) {
    typedef typename Block::Shape S;
    constexpr int kVectors = max_of(2 * S::kTokens, kParts), kOwn = kVectors / kParts;
    static_assert(kParts == S::kCluster && kVectors % kParts == 0, "blocks own equally many vectors");
    const int at = group * kInboxTurns + turn % kInboxTurns;
    if (thread == 0) inbox_expect(block.heard(at), kOwn * 8 * 4 * kParts);
#pragma unroll 1
    for (int i = thread; i < kVectors * 8; i += kBlockLeaves * kWarpSize) {
      const int token = min_of(i / kTileRows, S::kTokens - 1), vector = i / 8;
      const float v = tree_sum<kBlockLeaves>(partial + token * kSumStride + i % kTileRows, S::kTokens * kSumStride);
      send(block.inbox(at) + (block.part() * kOwn + vector / kParts) * 8 + i % 8, vector % kParts, v, block.heard(at));
    }
  }
  template <class Block>
  static K3_DEVICE void hear(Block& block, const ProgramPhase& p, int phase, int group, int own_warp, u32 turn, int tile) {
    typedef typename Block::Shape S;
    constexpr int kOwn = max_of(2 * S::kTokens, kParts) / kParts;
    const int at = group * kInboxTurns + turn % kInboxTurns, thread = (own_warp + turn) % kBlockLeaves * kWarpSize + block.me.lane;   // warps take turns
    if (thread - block.me.lane >= kOwn * 8) return;
    for (Spin spin; !inbox_try(block.heard(at), turn / kInboxTurns & 1);) spin.turn(block.a.watch, kWaitSums, phase, turn);
#pragma unroll 1
    for (int j = thread; j - block.me.lane < kOwn * 8; j += kBlockLeaves * kWarpSize) {
      const uint4 v = pack_vector(tree_sum<kParts>(block.inbox(at) + min_of(j, kOwn * 8 - 1), kOwn * 8), block.me.lane);
      const int vector = j / 8 * kParts + block.part();
      if (j < kOwn * 8 && vector < 2 * block.a.rows) block.publish(p, phase, vector / 2, tile * 2 + vector % 2, v, j % 8);
    }
  }
};
