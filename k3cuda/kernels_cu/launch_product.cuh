// A product inside the single launch: the sums of row_core.cuh, leaf by leaf, with weights out of the block's ring.
// The leaves of a tile lie in one block or in the blocks of one cluster, equally many each; a unit is what a block does of a tile.
#pragma once
#include "launch_fields.cuh"
#include "situ.cuh"

// Leaves that one copy brings.
constexpr int copy_leaves(int leaves, int leaf_bytes, int slot_bytes) { return leaves > 1 && leaves * leaf_bytes > slot_bytes ? copy_leaves(leaves / 2, leaf_bytes, slot_bytes) : leaves; }

constexpr int kSumStride = kTileRows + 4;   // floats from token to token of leaf sums: a warp's stores keep off each other's banks

// One warp: leaf `leaf` of the block's of one tile, whose first copy is `copy`. x: [pair][token][quarter], the leaf's; of an odd step at its end half as much.
template <class P, int kTokens, class Ring>
K3_DEVICE void leaf_chain(float (&c)[4], Ring& ring, u32 copy, int leaf, const uint4* x, const Me& me, const Watch& watch, int phase) {
  K3_UNROLL
  for (int i = 0; i < 4; ++i) c[i] = 0.f;
  copy += leaf / P::kCopyLeaves;
#pragma unroll 1
  for (int chunk = 0; chunk < P::kChunks; ++chunk, copy += P::kBlockLeaves / P::kCopyLeaves) {
    const uint4* w = (const uint4*)ring.take(copy, watch, phase) + leaf % P::kCopyLeaves * (P::kChunkBytes / 16) + me.lane;
    constexpr int kPairs = P::kChunkSteps / 2;
    const uint4* at = x + chunk * kPairs * kTokens * 4 + me.lane;
    if constexpr (kPairs > 0) {
      uint4 ahead[2][2], v[2] = {};   // two steps that share a load of x, while those before them multiply
      auto load = [&](int pair) {
        ahead[pair % 2][0] = w[pair * 2 * kWarpSize], ahead[pair % 2][1] = w[(pair * 2 + 1) * kWarpSize];
        if (me.lane < kTokens * 4) v[pair % 2] = at[pair * kTokens * 4];
      };
      load(0);
      K3_UNROLL
      for (int pair = 0; pair < kPairs; ++pair) {
        if (pair + 1 < kPairs) load(pair + 1);
        mma(c, ahead[pair % 2][0], v[pair % 2].x, v[pair % 2].y);
        mma(c, ahead[pair % 2][1], v[pair % 2].z, v[pair % 2].w);
      }
    }
    if constexpr (P::kSteps % 2) {   // the last one alone
      uint2 one = {};
      if (me.lane < kTokens * 4) one = ((const uint2*)(x + kPairs * kTokens * 4))[me.lane];
      mma(c, w[kPairs * 2 * kWarpSize], one.x, one.y);
    }
    ring.give(copy, kConsumers / P::kCopyLeaves, me);
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

// What a product multiplies, into shared memory as [pair][token][quarter]: BF16 as it comes. A block that has all leaves reads all of the field,
// though it may use less.
struct LaunchPlain {
  static constexpr int kUnits = 1;   // units of a block that have an x of their own; 1: it is the same of all
  static constexpr int vectors(int) { return 0; }   // of shared memory that it takes behind the rest
  template <class P, class Block>
  static K3_DEVICE void receive(Block& block, const ProgramPhase& p, int phase) {
    typedef typename Block::Shape S;
    uint4* shared = block.x();
    const bool whole = P::kParts == 1;
    block.template receive<P::kOwnVectors * S::kTokens>(p, phase, block.a.rows, whole ? block.link(p).in[0].vectors : P::kOwnVectors, whole ? 0 : block.part() * P::kOwnVectors,
      [&](int token, int k, const uint4& v) {
        if (k < P::kOwnVectors) shared[P::template x_at<S::kTokens>(token, k)] = v;
      });
  }
};

// SiTU of F32 gates and ups, whose tiles of 16 come in turn. A thread a value: eight of a vector behind one another in a few threads took 3.6
// microseconds at one row.
struct LaunchSitu {
  static constexpr int kUnits = 1;
  static constexpr int vectors(int) { return 0; }
  template <class P, class Block>
  static K3_DEVICE void receive(Block& block, const ProgramPhase& p, int phase) {
    typedef typename Block::Shape S;
    static_assert(P::kParts == 1, "a block has all of K");
    constexpr int kInputs = P::kOwnVectors * 8, kBatch = min_of(4, (kInputs * S::kTokens + Consumers::kThreads - 1) / Consumers::kThreads);
    uint4* shared = block.x();
    const u32* from = (const u32*)block.input(p, 0);
    const int row = block.link(p).in[0].row * 4;
    const Consumers team;   // of this phase alone, as in launch_kda.cuh
    team.sync();            // all are finished with the phase before
#pragma unroll 1
    for (int i = team.thread(); i < block.a.rows * kInputs; i += kBatch * Consumers::kThreads) {
      u32 v[2 * kBatch] = {};   // gates, then ups
      auto value = [&](int j) { return i + j % kBatch * Consumers::kThreads; };
      await_all(v, block.a.watch, phase, u32(i), [&](int j) { return value(j) < block.a.rows * kInputs; }, [&](int j) {
        const int token = value(j) / kInputs, k = value(j) % kInputs;
        return from + token * row + (k / kTileRows * 2 + j / kBatch) * kTileRows + k % kTileRows;
      });
      K3_UNROLL
      for (int j = 0; j < kBatch; ++j) {
        const int token = value(j) / kInputs, k = value(j) % kInputs;
        if (token < block.a.rows)
          ((bf16*)&shared[P::template x_at<S::kTokens>(token, k / 8)])[k % 8] = float_to_bf16(situ(__uint_as_float(v[j]), __uint_as_float(v[kBatch + j]), block.a.situ_beta, block.a.situ_linear_beta));
      }
    }
    team.sync();
  }
};

// What is added to a product's rows, F32: nothing, or the parts of all ranks, [part][row] in field kField_ that the phase reads. Sums of parts
// lie behind the tokens in shared memory, [unit][token][row of the tile], of kUnits_ units of a block at most.
struct LaunchNothing {
  static constexpr int floats(int) { return 0; }
  template <class Block> static K3_DEVICE void fetch(Block&, const ProgramPhase&, int, float*) {}
  static K3_DEVICE float add(float v, const float*, int) { return v; }
};
template <int kRanks, int kTiles, int kUnits_, int kField_>
struct LaunchAdd {
  static constexpr int floats(int tokens) { return kUnits_ * tokens * kTileRows; }
  template <class Block>
  static K3_DEVICE void fetch(Block& block, const ProgramPhase& p, int phase, float* sums) {
    typedef typename Block::Shape S;
    const u32* from = (const u32*)block.input(p, kField_);
    const int row = block.link(p).in[kField_].row * 4;
    const Consumers team;   // of this phase alone, as in launch_kda.cuh
    team.sync();            // all are finished with the phase before
#pragma unroll 1
    for (int i = team.thread(); i < p.units * block.a.rows * kTileRows; i += Consumers::kThreads) {
      const int unit = i / kTileRows / block.a.rows, token = i / kTileRows % block.a.rows;
      const u32* at = from + token * row + p.tiles[unit] * kTileRows + i % kTileRows;
      constexpr int kBatch = min_of(kRanks, 8);   // of loads: more of them fill the registers
      float parts[kRanks / kBatch];
      K3_UNROLL
      for (int h = 0; h < kRanks / kBatch; ++h) {
        u32 v[kBatch];
        await_all(v, block.a.watch, phase, 0, [](int) { return true; }, [&](int k) { return at + (h * kBatch + k) * kTiles * kTileRows; });
        float part[kBatch];
        K3_UNROLL
        for (int k = 0; k < kBatch; ++k) part[k] = __uint_as_float(v[k]);
        parts[h] = tree_sum<kBatch>(part, 1);
      }
      sums[(unit * S::kTokens + token) * kTileRows + i % kTileRows] = tree_sum<kRanks / kBatch>(parts, 1);
    }
  }
  static K3_DEVICE float add(float v, const float* sums, int at) { return v + sums[at]; }
};

//   kLeaves_, kSteps_  leaves of K that this rank holds, k-steps in each: two of them share a load of x, an odd one is the last of its leaf
//   kParts_            blocks of a cluster that share a tile, 1 or all
//   Out_, In_, Add_    what becomes of its rows (LaunchOut), what it multiplies, what is added to it
template <int kLeaves_, int kSteps_, int kParts_, int kSlotBytes, class Out_, class In_ = LaunchPlain, class Add_ = LaunchNothing>
struct LaunchProduct {
  typedef Out_ Out;
  typedef In_ In;
  typedef Add_ Add;
  static constexpr int kLeaves = kLeaves_, kSteps = kSteps_, kParts = kParts_;
  static constexpr LaunchCounting kCounting = kParts > 1 ? kCountsTurns : kCountsCopies;
  static constexpr int kBlockLeaves = kLeaves / kParts, kGroups = kConsumers / kBlockLeaves;   // kGroups units at a time
  static constexpr int kChunkSteps = chunk_steps(kSteps, kSlotBytes / kStepBytes, false), kChunks = kSteps / kChunkSteps;
  static constexpr int kChunkBytes = kChunkSteps * kStepBytes, kCopyLeaves = kChunks > 1 ? 1 : copy_leaves(kBlockLeaves, kChunkBytes, kSlotBytes);
  static constexpr int kCopyBytes = kCopyLeaves * kChunkBytes, kLeafCopies = kBlockLeaves / kCopyLeaves, kUnitCopies = kLeafCopies * kChunks;
  static constexpr int kOwnVectors = kBlockLeaves * kSteps * 2;   // of a token, what one block reads
  static constexpr int in_at(int tokens) { return In::kUnits * tokens * kOwnVectors + Add::floats(tokens) / 4; }
  static constexpr int x_vectors(int tokens, int) { return in_at(tokens) + In::vectors(tokens); }
  // Where vector `k` of a token's share of x lies.
  template <int kTokens> static K3_DEVICE int x_at(int token, int k) {
    if constexpr (kSteps % 2 == 0) return (k / 4 * kTokens + token) * 4 + k % 4;
    constexpr int kLeaf = kSteps * 2;   // vectors of a token
    const int own = k % kLeaf, pair = own / 4;
    return (k / kLeaf * kLeaf + pair * 4) * kTokens + token * (pair < kSteps / 2 ? 4 : 2) + own % 4;
  }
  static_assert((kSteps % 2 == 0 || kChunks == 1) && kBlockLeaves * kParts == kLeaves && kGroups * kBlockLeaves == kConsumers, "warps take whole leaves");
  static_assert(kGroups <= kParts || kParts == 1, "every group has its inboxes");
  static_assert(kCopyBytes <= kSlotBytes, "a copy fits a slot");

  // Copy `j` of a unit: chunk by chunk, so that all its warps have something early.
  static K3_DEVICE size_t offset(int tile, int part, int j) {
    return ((size_t(tile) * kLeaves + part * kBlockLeaves + j % kLeafCopies * kCopyLeaves) * kSteps + j / kLeafCopies * kChunkSteps) * kStepBytes;
  }

  template <class Block, class Producer>
  static K3_DEVICE void produce(const Block& block, Producer& producer, const ProgramPhase& p, const u8* w, int phase) {
    const int part = kParts > 1 ? block.part() : 0;
    producer.copies(p.units * kUnitCopies, kCopyBytes, kCopyBytes, phase, [](int) { return 1; },
                    [&](int i, int) { return w + offset(p.tiles[i / kUnitCopies], part, i % kUnitCopies); });
  }

  template <class Block>
  static K3_DEVICE void consume(Block& block, const ProgramPhase& p, int phase) {
    typedef typename Block::Shape S;
    const int leaf = block.me.warp % kBlockLeaves, group = block.me.warp / kBlockLeaves;
    Add::fetch(block, p, phase, added(block));
    In::template receive<LaunchProduct>(block, p, phase);
    block.received(phase);
    const uint4* x = block.x() + leaf * kSteps * 2 * S::kTokens;
    // Kinds that clusters share divide the warps alike, so their turns count on; warps of another kind's group may have had different numbers of them.
    u32 own_turns = 0, &turns = kParts > 1 ? block.counts.turns : own_turns;
    int before = -1;   // the unit of the turn before, which this block has yet to hear of
#pragma unroll 1
    for (int u = group; u < p.units; u += kGroups, ++turns) {
      float c[4];
      leaf_chain<LaunchProduct, S::kTokens>(c, block.ring, block.counts.copies + u * kUnitCopies, leaf, x + (In::kUnits > 1 ? u * S::kTokens * kOwnVectors : 0), block.me, block.a.watch, phase);
      float* partial = block.partial(turns) + group * kBlockLeaves * S::kTokens * kSumStride;
      store_leaf_sums<kBlockLeaves, S::kTokens>(c, partial, group, leaf, block.me);
      if constexpr (kParts == 1) finish(block, p, phase, partial, leaf * kWarpSize + block.me.lane, u);
      else {
        tell(block, partial, leaf * kWarpSize + block.me.lane, group, turns);
        if (before >= 0) hear(block, p, phase, group, leaf, turns - 1, before);
        before = u;
      }
    }
    if constexpr (kParts > 1)
      if (before >= 0) hear(block, p, phase, group, leaf, turns - 1, before);
    block.counts.copies += p.units * kUnitCopies;
  }

  template <class Block>
  static K3_DEVICE float* added(const Block& block) { return (float*)(block.x() + In::kUnits * Block::Shape::kTokens * kOwnVectors); }
  // Rows of half `half` of unit `u`'s tile, as LaunchOut's.
  template <class Block>
  static K3_DEVICE void put(const Block& block, const ProgramPhase& p, int phase, int token, int u, int half, float v, bool live, int lane) {
    v = Add::add(v, added(block), (u * Block::Shape::kTokens + min_of(token, Block::Shape::kTokens - 1)) * kTileRows + half * 8 + lane);
    Out::put(block, p, phase, token, p.tiles[u], half, v, live, lane);
  }

  template <class Block>
  static K3_DEVICE void finish(Block& block, const ProgramPhase& p, int phase, const float* partial, int thread, int u) {
    typedef typename Block::Shape S;
    const int live = block.a.rows * kTileRows;
#pragma unroll 1
    for (int i = thread; i - block.me.lane < live; i += kBlockLeaves * kWarpSize) {
      const int token = min_of(i / kTileRows, S::kTokens - 1);
      put(block, p, phase, token, u, i / 8 % 2, tree_sum<kBlockLeaves>(partial + token * kSumStride + i % kTileRows, S::kTokens * kSumStride), i < live, i % 8);
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
  static K3_DEVICE void hear(Block& block, const ProgramPhase& p, int phase, int group, int own_warp, u32 turn, int u) {
    typedef typename Block::Shape S;
    constexpr int kOwn = max_of(2 * S::kTokens, kParts) / kParts;
    const int at = group * kInboxTurns + turn % kInboxTurns, thread = (own_warp + turn) % kBlockLeaves * kWarpSize + block.me.lane;   // warps take turns
    if (thread - block.me.lane >= kOwn * 8) return;
    for (Spin spin; !inbox_try(block.heard(at), turn / kInboxTurns & 1);) spin.turn(block.a.watch, kWaitSums, phase, turn);
#pragma unroll 1
    for (int j = thread; j - block.me.lane < kOwn * 8; j += kBlockLeaves * kWarpSize) {
      const int vector = j / 8 * kParts + block.part();
      put(block, p, phase, vector / 2, u, vector % 2, tree_sum<kParts>(block.inbox(at) + min_of(j, kOwn * 8 - 1), kOwn * 8), j < kOwn * 8 && vector < 2 * block.a.rows, j % 8);
    }
  }
};
