// Products inside the single launch: the sums of row_core.cuh, leaf by leaf, with weights out of the block's ring.
// The leaves of a tile lie in one block or in the blocks of one cluster, equally many each; a unit is what a block does of a tile.
//
// An SM keeps 128 KB of code; what a layer runs beyond that comes from the L2 again in every layer, 59 ns for eight instructions while weights stream. So all
// products share one loop, product_units, which reads their sizes from shared memory (LaunchGeometry), and a kind has no code but what its input needs.
#pragma once
#include "launch_inputs.cuh"

// Leaves that one copy brings.
constexpr int copy_leaves(int leaves, int leaf_bytes, int slot_bytes) { return leaves > 1 && leaves * leaf_bytes > slot_bytes ? copy_leaves(leaves / 2, leaf_bytes, slot_bytes) : leaves; }

constexpr int kSumStride = kTileRows + 4;   // floats from token to token of leaf sums: a warp's stores keep off each other's banks

// One warp: a leaf of the block's of one tile, whose first copy is `copy`. x: [pair][token][quarter], the leaf's; of an odd step at its end half as much.
//   steps  of a chunk; if odd there is one chunk. shift  logarithm of the leaves of a copy. next: copies from chunk to chunk
template <int kTokens, class Ring>
K3_DEVICE void leaf_chain(float (&c)[4], const Ring& ring, u32 copy, int leaf, const uint4* x, int steps, int chunks, int shift, u32 next, const Me& me, const Watch& watch, int phase) {
  K3_UNROLL
  for (int i = 0; i < 4; ++i) c[i] = 0.f;
  copy += leaf >> shift;
  const int in_copy = (leaf & ((1 << shift) - 1)) * steps * (kStepBytes / 16) + me.lane;
  const uint4* at = x + me.lane;
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk, copy += next) {
    const uint4* w = (const uint4*)ring.take(copy, watch, phase) + in_copy;
    uint4 ahead[2][3] = {};   // pairs of steps, which share a load of x: while one multiplies the next comes
    auto load = [&](int i) {
      ahead[i][0] = w[0], ahead[i][1] = w[kWarpSize];
      if (me.lane < kTokens * 4) ahead[i][2] = *at;
      w += 2 * kWarpSize, at += kTokens * 4;
    };
    auto multiply = [&](int i) {
      mma(c, ahead[i][0], ahead[i][2].x, ahead[i][2].y);
      mma(c, ahead[i][1], ahead[i][2].z, ahead[i][2].w);
    };
    if (steps > 1) {
      load(0);
      int left = steps / 2 - 1;
#pragma unroll 1
      for (; left >= 2; left -= 2) {
        load(1), multiply(0);
        load(0), multiply(1);
      }
      if (left) load(1);
      multiply(0);
      if (left) multiply(1);
    }
    if (steps & 1) {
      uint2 one = {};
      if (me.lane < kTokens * 4) one = ((const uint2*)(at - me.lane))[me.lane];
      mma(c, w[0], one.x, one.y);
    }
    ring.give(copy, kConsumers >> shift, me);
  }
}

// Sum over the leaves that a block has of a value, as tree_sum: 1, 2, 4, 8 or 16 floats `stride` apart.
K3_DEVICE float sum_of_leaves(const float* v, int stride, int leaves) {
  if (leaves < 4) return leaves == 1 ? v[0] : v[0] + v[stride];
  float fours[4];
  K3_UNROLL
  for (int i = 0; i < 4; ++i) fours[i] = i * 4 < leaves ? tree_sum<4>(v + i * 4 * stride, stride) : 0;
  const float low = leaves > 4 ? fours[0] + fours[1] : fours[0];
  return leaves > 8 ? low + (fours[2] + fours[3]) : low;
}

// Blocks of a cluster finish a unit together: each tells the others its sums of their vectors (a token's eight rows), which go round the
// blocks, and hears theirs one unit later, so that nobody waits for them. Every block has a vector at least, live or not: who sends for
// a unit has heard all of the one before the last, whose senders had heard all of two before that. So four inboxes in turn are enough.
constexpr int kInboxTurns = 4;

//   kLeaves_, kSteps_  leaves of K that this rank holds, k-steps in each: two of them share a load of x, an odd one is the last of its leaf
//   kParts_            blocks of a cluster that share a tile, 1 or all
//   Out_, In_, Add_    what becomes of its rows (LaunchOut), what it multiplies, what is added to it
template <int kLeaves_, int kSteps_, int kParts_, int kSlotBytes, class Out_, class In_ = LaunchPlain, class Add_ = LaunchNothing>
struct LaunchProduct {
  typedef In_ In;
  typedef Add_ Add;
  static constexpr int kLeaves = kLeaves_, kSteps = kSteps_, kParts = kParts_, kBlockLeaves = kLeaves / kParts;
  static constexpr int kChunkSteps = chunk_steps(kSteps, kSlotBytes / kStepBytes, false), kChunks = kSteps / kChunkSteps;
  static constexpr int kChunkBytes = kChunkSteps * kStepBytes, kCopyLeaves = kChunks > 1 ? 1 : copy_leaves(kBlockLeaves, kChunkBytes, kSlotBytes);
  static constexpr int kOwnVectors = kBlockLeaves * kSteps * 2;   // of a token, what one block reads
  static constexpr int in_at(int tokens) { return In::kUnits * tokens * kOwnVectors + Add::floats(tokens) / 4; }
  static constexpr int x_vectors(int tokens, int) { return in_at(tokens) + In::vectors(tokens); }
  static_assert((kSteps % 2 == 0 || kChunks == 1) && kBlockLeaves * kParts == kLeaves && kConsumers % kBlockLeaves == 0, "warps take whole leaves");
  static_assert(kConsumers / kBlockLeaves <= kParts || kParts == 1, "every group has its inboxes");
  static_assert(kCopyLeaves * kChunkBytes <= kSlotBytes, "a copy fits a slot");
  typedef LaunchProductInput<typename In::template Of<LaunchProduct>, Add> Code;

  static constexpr LaunchGeometry geometry(int tokens) {
    LaunchGeometry g = {};
    g.leaves = kBlockLeaves, g.leaf_shift = log2_of(kBlockLeaves), g.copy_shift = log2_of(kCopyLeaves), g.chunk_steps = kChunkSteps, g.chunks = kChunks;
    g.odd = kSteps % 2 ? kSteps : 0, g.is_shared = kParts > 1, g.has_own_x = In::kUnits > 1, g.more = Add::kMore;
    g.own_vectors = kOwnVectors, g.more_at = In::kUnits * tokens * kOwnVectors, g.in_at = in_at(tokens), g.unit_copies = kBlockLeaves / kCopyLeaves * kChunks;
    g.tile_bytes = kLeaves * kSteps * kStepBytes, g.part_bytes = kBlockLeaves * kSteps * kStepBytes, g.copy_bytes = kCopyLeaves * kChunkBytes;
    g.leaf_bytes = kCopyLeaves * kSteps * kStepBytes;
    Out_::describe(g);
    return g;
  }
};

// The copies of a phase: unit by unit, of a unit chunk by chunk, so that all its warps have something early.
template <class Block, class Producer>
K3_DEVICE void produce_product(const Block& block, Producer& producer, const ProgramPhase& p, const u8* w) {
  const LaunchGeometry& g = block.geometry(p);
  LaunchSource& s = producer.source;
  s.which = kTilesOfPhase, s.list = p.tiles, s.weights = w + (g.is_shared ? block.part() * g.part_bytes : 0);
  s.count = p.units * g.unit_copies, s.bytes = s.each = g.copy_bytes, s.unit_copies = g.unit_copies;
  s.tile_bytes = g.tile_bytes, s.leaf_shift = g.leaf_shift - g.copy_shift, s.leaf_bytes = g.leaf_bytes, s.chunk_bytes = g.chunk_steps * kStepBytes;
}

// All units of a block, whose input is in shared memory. Groups of as many warps as a block has leaves take units in turn.
template <class Block>
struct LaunchUnits {
  typedef typename Block::Shape S;
  const Block block;
  const ProgramPhase p;
  const int phase, shift, leaves, leaf, group;   // shift: logarithm of the leaves
  const bool is_shared;

  K3_DEVICE LaunchUnits(const Block& b)
      : block(b), p(b.now()), phase(b.kept().phase), shift(b.geometry(p).leaf_shift), leaves(1 << shift), leaf(b.me.warp & (leaves - 1)), group(b.me.warp >> shift),
        is_shared(S::kCluster > 1 && b.geometry(p).is_shared) {}
  // The same, found anew: chains want the registers.
  K3_DEVICE LaunchUnits anew() const { return LaunchUnits(Block(block.smem + unknown_zero())); }

  K3_DEVICE void run() const {
    const LaunchGeometry& g = block.geometry(p);
    const int units = p.units, unit_copies = g.unit_copies, steps = g.chunk_steps, chunks = g.chunks, copy_shift = g.copy_shift, own_x = g.has_own_x ? S::kTokens * g.own_vectors : 0;
    const u32 copies = block.take_copies(units * unit_copies), next = u32(leaves) >> copy_shift;
    const uint4* x = block.x() + leaf * (g.own_vectors >> shift) * S::kTokens;
    // Kinds that clusters share divide the warps alike, so their turns count on; warps of another kind's group may have had different numbers of them.
    u32 turns = is_shared ? block.kept().turns : 0;
    int before = -1;   // the unit of the turn before, which this block has yet to hear of
#pragma unroll 1
    for (int u = group;; u += kConsumers >> shift, ++turns) {
      const bool more = u < units;
      if (more) {
        float c[4];
        leaf_chain<S::kTokens>(c, block.ring, copies + u * unit_copies, leaf, x + u * own_x, steps, chunks, copy_shift, next, block.me, block.a.watch, phase);
        block.stamp(phase, kProductsDone, block.me.lane == 0);
        store(c, turns);
        if (is_shared) anew().tell(turns);
      }
      if (const int done = is_shared ? before : more ? u : -1; done >= 0) anew().finish(turns - is_shared, done);   // once: it is all of a product's code behind its chains
      before = u;
      if (!more) break;
    }
    __syncwarp();
    if (const Me again; is_shared && again.lane == 0) block.kept().turns = turns;
  }

  // Leaf sums of a unit: [leaf][token][row].
  K3_DEVICE float* partial(u32 turn) const { return block.partial(turn) + (group << shift) * S::kTokens * kSumStride; }
  K3_DEVICE int thread() const { return leaf * kWarpSize + block.me.lane; }
  // By the warps that took its leaves, which meet behind it.
  K3_DEVICE void store(const float (&c)[4], u32 turn) const {
    float* to = partial(turn) + leaf * S::kTokens * kSumStride;
    K3_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int token = block.me.lane % 4 * 2 + i % 2, row = block.me.lane / 4 + i / 2 * 8;
      if (token < S::kTokens) to[token * kSumStride + row] = c[i];
    }
    if (leaves == 1) __syncwarp();
    else warps_sync(1 + group, leaves * kWarpSize);
  }
  K3_DEVICE float sum(const float* sums, int i) const {
    const int token = min_of(i / kTileRows, S::kTokens - 1);
    return sum_of_leaves(sums + token * kSumStride + i % kTileRows, S::kTokens * kSumStride, leaves);
  }

  // Inbox: [source][own vector][8].
  static constexpr int kVectors = max_of(2 * S::kTokens, S::kCluster), kOwn = kVectors / S::kCluster;
  static_assert(kVectors % S::kCluster == 0, "blocks own equally many vectors");
  K3_DEVICE int inbox(u32 turn) const { return group * kInboxTurns + turn % kInboxTurns; }
  K3_DEVICE void tell(u32 turn) const {
    const int at = inbox(turn), rank = block.part();
    const float* sums = partial(turn);
    if (thread() == 0) inbox_expect(block.heard(at), kOwn * 8 * 4 * S::kCluster);
#pragma unroll 1
    for (int i = thread(); i < kVectors * 8; i += leaves * kWarpSize) {
      const int vector = i / 8;
      send(block.inbox(at) + (rank * kOwn + vector / S::kCluster) * 8 + i % 8, vector % S::kCluster, sum(sums, i), block.heard(at));
    }
  }
  // Rows of unit `u`: of all vectors, or of the cluster's those of this block, of which the others tell. What they go with is added or multiplied.
  K3_DEVICE void finish(u32 turn, int u) const {
    const int first = (is_shared ? (leaf + turn) & (leaves - 1) : leaf) * kWarpSize + block.me.lane;   // warps take turns
    const int rows = block.a.rows, values = is_shared ? kOwn * 8 : rows * kTileRows, own = is_shared ? S::kCluster : 1, rank = is_shared ? block.part() : 0;
    if (first - block.me.lane >= values) return;
    const LaunchTarget target(block, p, phase, p.tiles[u]);
    const LaunchMore which = LaunchMore(block.geometry(p).more);
    const float* more = (const float*)(block.x() + block.geometry(p).more_at) + u * S::kTokens * kTileRows;
    const float* sums = is_shared ? block.inbox(inbox(turn)) : partial(turn);
    if (is_shared)
      for (Spin spin; !inbox_try(block.heard(inbox(turn)), turn / kInboxTurns & 1);) spin.turn(block.a.watch, kWaitSums, phase, turn);
#pragma unroll 1
    for (int i = first; i - block.me.lane < values; i += leaves * kWarpSize) {
      const int vector = i / 8 * own + rank, row = vector / 2, half = vector % 2;
      float v = is_shared ? tree_sum<S::kCluster>(sums + min_of(i, kOwn * 8 - 1), kOwn * 8) : sum(sums, i);
      if (which) {
        const float with = more[min_of(row, S::kTokens - 1) * kTileRows + half * 8 + i % 8];
        v = which == kMoreAdds ? v + with : v * with;
      }
      target.put(row, half, v, i < values && row < rows, i % 8);
    }
  }
};
