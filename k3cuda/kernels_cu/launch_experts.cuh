// Routed experts inside the single launch: sums and results of expert_core.cuh, weights out of the block's ring. Which experts a layer reads
// is known when its choice is: the producer enters them then.
#pragma once
#include "launch_choice.cuh"
#include "launch_product.cuh"

// w1 and w3. A unit is a pair of tiles of an entry; clusters take equal runs of them. A group of warps takes a unit, up to four leaves of one tile a
// warp; its warps meet only through two buffers of leaf sums, so that each runs ahead of the slowest by up to two units.
//   kLeaves_, kGroups_  leaves of K, 32-groups in each
//   kPairs_             pairs of tiles of an expert
//   kParts_             blocks that share a unit, by leaves: 1 or the whole cluster
template <int kLeaves_, int kGroups_, int kPairs_, int kParts_, int kSlotBytes>
struct LaunchExpertUp {
  static constexpr int kLeaves = kLeaves_, kGroups = kGroups_, kPairs = kPairs_, kParts = kParts_, kBlockLeaves = kLeaves / kParts, kLeafBytes = mxfp4_leaf_bytes(kGroups);
  static constexpr int kCopyLeaves = copy_leaves(kBlockLeaves, kLeafBytes, kSlotBytes), kCopyBytes = kCopyLeaves * kLeafBytes;
  static constexpr int kTileCopies = kBlockLeaves / kCopyLeaves, kUnitCopies = 2 * kTileCopies;
  static constexpr int kWarpLeaves = min_of(4, kCopyLeaves), kTileWarps = kBlockLeaves / kWarpLeaves, kUnitWarps = 2 * kTileWarps;
  static constexpr int kUnits = kConsumers / kUnitWarps;          // at a time
  static constexpr LaunchCounting kCounting = kCountsExpertTurns;
  static constexpr int kOwnVectors = kBlockLeaves * kGroups * 4;  // of a row
  static constexpr int x_vectors(int tokens, int) { return tokens * kOwnVectors; }
  static_assert(kUnits > 0 && kUnits * kUnitWarps == kConsumers && kBlockLeaves * kParts == kLeaves, "warps take equal runs of leaves");
  static_assert(kCopyBytes <= kSlotBytes, "a copy fits a slot");

  template <class Block> static K3_DEVICE int part(const Block& block) { return kParts > 1 ? block.part() : 0; }
  struct Run { int begin, end; };
  static K3_DEVICE Run run_of(int entries) {
    const int units = entries * kPairs, clusters = blocks_of_rank() / kParts, own = rank_block() / kParts, per = units / clusters, more = units % clusters;
    const int begin = own * per + min_of(own, more);
    return {begin, begin + per + (own < more)};
  }

  template <class Block, class Producer>
  static K3_DEVICE void produce(const Block& block, Producer& producer, const ProgramPhase&, const u8* w, int phase) {
    for (Spin spin; block.state.chosen < producer.choices;) spin.turn(block.a.watch, kWaitChoice, phase, 0);
    __syncwarp();
    const auto& list = block.choice().list;
    const Run run = run_of(list.entries);
    const u8* own = w + part(block) * kBlockLeaves * kLeafBytes;
    LaunchSource& s = producer.source;
    s.which = kPairsOfEntries, s.weights = own, s.list = list.entry, s.first = run.begin, s.pairs = kPairs;
    s.count = (run.end - run.begin) * kUnitCopies, s.bytes = s.each = kCopyBytes, s.unit_copies = kUnitCopies;
    s.tile_bytes = 2 * kLeaves * kLeafBytes, s.leaf_shift = log2_of(kTileCopies), s.leaf_bytes = kCopyBytes, s.chunk_bytes = kLeaves * kLeafBytes;
  }

  template <class Block>
  static K3_DEVICE void consume(Block& block, const ProgramPhase& p, int phase) {
    typedef typename Block::Shape S;
    uint4* shared = block.x();
    block.template receive<kOwnVectors * S::kTokens>(p, phase, block.a.rows, kOwnVectors, part(block) * kOwnVectors, [&](int token, int k, const uint4& v) {
      shared[(k / 4 * S::kTokens + token) * 4 + k % 4] = scale_tokens(v);
    });
    block.received(phase);
    const auto& list = block.choice().list;
    const Run run = run_of(list.entries);
    const int group = block.me.warp / kUnitWarps, own = block.me.warp % kUnitWarps;
    u32 copy = block.take_copies((run.end - run.begin) * kUnitCopies) + group * kUnitCopies + own / kTileWarps * kTileCopies + own % kTileWarps * kWarpLeaves / kCopyLeaves;
    u32& turns = block.counts.expert_turns;
#pragma unroll 1
    for (int u = run.begin + group; u < run.end; u += kUnits, copy += kUnits * kUnitCopies, ++turns) unit(Block(block.smem + unknown_zero()), u, copy, turns);
  }

  // Unit `u`, whose copy for this warp is `copy`, in turn `turn`; finds everything else anew: expansion wants the registers.
  template <class Block>
  static K3_DEVICE void unit(const Block& block, int u, u32 copy, u32 turn) {
    typedef typename Block::Shape S;
    const auto& list = block.choice().list;
    block.stress(block.phase_now(), turn);
    float c[4] = {};   // what is added to zero here is never -0
    {
      const int leaf = block.me.warp % kTileWarps * kWarpLeaves;
      // Columns beyond the entry's items are the last item's once more: nobody looks at them.
      const uint4* x = block.x() + leaf * kGroups * S::kTokens * 4 + block.me.lane % 4
                       + list.item[min_of(entry_first(list.entry[u / kPairs]) + block.me.lane / 4, entry_first(list.entry[u / kPairs + 1]) - 1)] / S::kTopK * 4;
      const u8* w = block.ring.take(copy, block.a.watch, block.phase_now()) + leaf % kCopyLeaves * kLeafBytes;
#pragma unroll 1
      for (int pair = 0; pair < kWarpLeaves; pair += 2) {
        float both[4] = {};
#pragma unroll 1
        for (int i = pair; i < min_of(pair + 2, kWarpLeaves); ++i) {   // neither is unrolled: all x at once would take too many registers
          float sum[4];
          mxfp4_leaf_with<kGroups>(sum, w + i * kLeafBytes, [&](int g) { return x[(i * kGroups + g) * S::kTokens * 4]; });
          K3_UNROLL
          for (int j = 0; j < 4; ++j) both[j] += sum[j];
        }
        K3_UNROLL
        for (int j = 0; j < 4; ++j) c[j] += both[j];
      }
    }
    block.ring.give(copy, kConsumers * kWarpLeaves / kCopyLeaves, block.me);
    const Me me;   // again: not kept meanwhile
    const int group = me.warp / kUnitWarps, own = me.warp % kUnitWarps, phase = block.phase_now();
    block.stamp(phase, kProductsDone, me.lane == 0);
    met(block, block.added(group, turn), turn / 2 & 1 ^ 1, phase, turn);
    float* partial = block.partial(turn) + group * kUnitWarps * S::kTokens * kSumStride;   // [tile][warp][token][row]
    K3_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int token = me.lane % 4 * 2 + i % 2, row = me.lane / 4 + i / 2 * 8;
      if (token < S::kTokens) partial[(own * S::kTokens + token) * kSumStride + row] = c[i];
    }
    arrive(block, block.stored(group, turn));
    const int first = entry_first(list.entry[u / kPairs]), count = entry_first(list.entry[u / kPairs + 1]) - first;   // again: not kept meanwhile
    // As many warps as a unit has values for finish it, other ones each time.
    const int thread = (own + turn) % kUnitWarps * kWarpSize + me.lane;
    const ProgramPhase p = block.now();
    if constexpr (kParts == 1) finish(block, p, phase, partial, thread, group, turn, u, first, count);
    else {
      tell(block, phase, partial, thread, group, turn, count);
      hear(block, p, phase, thread, group, turn, u, first, count);
    }
  }

  // Warps of a group meet: all have arrived at `bar`, for the time of which `parity` tells.
  template <class Block>
  static K3_DEVICE void met(const Block& block, u64* bar, u32 parity, int phase, u32 turn) {
    for (Spin spin; !barrier_try(bar, parity);) spin.turn(block.a.watch, kWaitLeafSums, phase, turn);
  }
  template <class Block>
  static K3_DEVICE void arrive(const Block& block, u64* bar) {
    __syncwarp();
    if (block.me.lane == 0) barrier_arrive_times(bar, kConsumers / kUnitWarps);
  }

  // Gate or up of value i of a unit: [token][row].
  template <int kTokens>
  static K3_DEVICE float leaves(const float* partial, int tile, int i) {
    return tree_sum<kTileWarps>(partial + (tile * kTileWarps * kTokens + i / kTileRows) * kSumStride + i % kTileRows, kTokens * kSumStride);
  }
  // A whole warp: eight lanes have a vector of unit `u`, half `half` of the rows of its item `item`, whose items begin at `first`.
  template <class Block>
  static K3_DEVICE void activate(const Block& block, const ProgramPhase& p, int phase, int u, int first, int item, int half, float gate, float up, bool live, int lane) {
    const uint4 v = pack_vector(situ(gate, up, block.a.situ_beta, block.a.situ_linear_beta), not_before_here(block.me.lane));
    if (live) block.publish(p, phase, block.choice().list.item[first + item], u % kPairs * 2 + half, v, lane);
  }

  template <class Block>
  static K3_DEVICE void finish(const Block& block, const ProgramPhase& p, int phase, const float* partial, int thread, int group, u32 turn, int u, int first, int count) {
    constexpr int kTokens = Block::Shape::kTokens;
    const int live = count * kTileRows;
    if (thread - block.me.lane < live) {
      met(block, block.stored(group, turn), turn / 2 & 1, phase, turn);
      block.stress(phase, ~turn);
#pragma unroll 1
      for (int i = thread; i - block.me.lane < live; i += kUnitWarps * kWarpSize) {
        const int at = min_of(i, live - 1);
        activate(block, p, phase, u, first, at / kTileRows, at / 8 % 2, leaves<kTokens>(partial, 0, at), leaves<kTokens>(partial, 1, at), i < live, i % 8);
      }
    }
    arrive(block, block.added(group, turn));
  }

  // As in launch_product.cuh, but a block hears at once: other groups work meanwhile. Who sends for a unit has heard all of the one before, whose
  // senders had heard all of the one before that, so two inboxes are enough. Inbox: [tile][source][own vector][8].
  template <class Block>
  static K3_DEVICE void tell(const Block& block, int phase, const float* partial, int thread, int group, u32 turn, int count) {
    constexpr int kTokens = Block::Shape::kTokens, kMost = max_of(2 * kTokens, kParts) / kParts;   // vectors of a block
    static_assert(kParts == Block::Shape::kCluster && kUnits <= 2 * kParts, "a unit is of a whole cluster, and every group has its inboxes");
    const int at = inbox_at(group, turn), rank = block.part(), vectors = max_of(2 * count, kParts);
    if (thread - block.me.lane < vectors * 8) {
      met(block, block.stored(group, turn), turn / 2 & 1, phase, turn);
      block.stress(phase, ~turn);
      if (thread == 0) inbox_expect(block.heard(at), own_vectors(count, rank) * 8 * 4 * kParts * 2);
#pragma unroll 1
      for (int i = thread; i < vectors * 8; i += kUnitWarps * kWarpSize) {
        const int vector = i / 8, value = min_of(i, kTokens * kTileRows - 1);
        float* to = block.inbox(at) + (rank * kMost + vector / kParts) * 8 + i % 8;
        send(to, vector % kParts, leaves<kTokens>(partial, 0, value), block.heard(at));
        send(to + kParts * kMost * 8, vector % kParts, leaves<kTokens>(partial, 1, value), block.heard(at));
      }
    }
    arrive(block, block.added(group, turn));
  }
  template <class Block>
  static K3_DEVICE void hear(const Block& block, const ProgramPhase& p, int phase, int thread, int group, u32 turn, int u, int first, int count) {
    constexpr int kMost = max_of(2 * Block::Shape::kTokens, kParts) / kParts;
    const int at = inbox_at(group, turn), values = own_vectors(count, block.part()) * 8;
    if (thread - block.me.lane >= values) return;
    const float* inbox = block.inbox(at);
    for (Spin spin; !inbox_try(block.heard(at), turn / 2 & 1);) spin.turn(block.a.watch, kWaitSums, phase, turn);
#pragma unroll 1
    for (int i = thread; i - block.me.lane < values; i += kUnitWarps * kWarpSize) {
      const int mine = min_of(i, values - 1), vector = mine / 8 * kParts + block.part();
      activate(block, p, phase, u, first, vector / 2, vector % 2, tree_sum<kParts>(inbox + mine, kMost * 8), tree_sum<kParts>(inbox + kParts * kMost * 8 + mine, kMost * 8),
               i < values && vector < 2 * count, i % 8);
    }
  }
  // Vectors of a unit that block `rank` hears of: every block of one at least, live or not.
  static K3_DEVICE int own_vectors(int count, int rank) { return (max_of(2 * count, kParts) - rank + kParts - 1) / kParts; }
  static K3_DEVICE int inbox_at(int group, u32 turn) { return kParts * kInboxTurns + (group * 2 + int(turn % 2)) * 2; }   // two a turn, behind those of products
};

// w2: a row's experts summed in rising id inside a leaf, then the tree over leaves. A block has a pair of tiles, of every entry; warps take entries in turn,
// all of them in one leaf before the next: activations of all leaves would leave the ring no room.
//   kLeaves_, kGroups_  leaves of K, 32-groups in each
//   kTiles_             of an expert
template <int kLeaves_, int kGroups_, int kTiles_, int kSlotBytes, class Out>
struct LaunchExpertDown {
  static constexpr int kLeaves = kLeaves_, kGroups = kGroups_, kTiles = kTiles_, kLeafBytes = mxfp4_leaf_bytes(kGroups), kTileBytes = kLeaves * kLeafBytes;
  static constexpr int kItemVectors = kGroups * 4, kItemStride = kItemVectors + (kGroups % 2 ? 0 : 4);   // neighbours lie in different banks
  static constexpr int kRowsOut = 2 * kTileRows;
  static constexpr int x_vectors(int tokens, int items) { return items * kItemStride + (kLeaves > 1 ? kLeaves * tokens * kRowsOut / 4 : 0); }
  static constexpr LaunchGeometry geometry(int) {
    LaunchGeometry g = {};
    Out::describe(g);
    return g;
  }
  static_assert(2 * kLeafBytes <= kSlotBytes, "a copy fits a slot");

  struct Own { int first, tiles, per; };   // tiles of the block; entries of a copy
  static K3_DEVICE Own own_of(const ProgramPhase& p) {
    const int first = p.tiles[0] * 2, tiles = kTiles % 2 ? min_of(2, kTiles - first) : 2;
    return {first, tiles, tiles == 2 ? kSlotBytes / (2 * kLeafBytes) : kSlotBytes / kLeafBytes};
  }

  template <class Block, class Producer>
  static K3_DEVICE void produce(const Block& block, Producer& producer, const ProgramPhase& p, const u8* w, int phase) {
    if (!p.units) return;
    const auto& list = block.choice().list;
    const Own own = own_of(p);
    const int entries = list.entries, of_leaf = (entries + own.per - 1) / own.per;
    const int shift = kLeaves > 1 ? own.tiles / 2 : 0, each = (own.tiles >> shift) * kLeafBytes;   // of one leaf neighbouring tiles are one piece
    LaunchSource& s = producer.source;
    s.which = kEntries, s.weights = w + own.first * kTileBytes, s.list = list.entry, s.entries = entries, s.per = own.per, s.of_leaf = of_leaf, s.tile_shift = shift;
    s.count = kLeaves * of_leaf, s.each = each, s.bytes = (own.per << shift) * each;
    s.expert_bytes = kTiles * kTileBytes, s.tile_bytes = kTileBytes, s.leaf_bytes = kLeafBytes;
  }

  template <class Block>
  static K3_DEVICE void consume(Block& block, const ProgramPhase& p, int phase) {
    typedef typename Block::Shape S;
    static_assert(S::kMaxItems * kRowsOut <= 2 * S::kPartial, "results of all items fit");
    constexpr int kAll = kConsumers * kWarpSize;
    uint4* shared = block.x();
    const auto& choice = block.choice();
    const auto& list = choice.list;
    float* results = block.partial(0);   // [list position][row of the tiles]
    float* sums = (float*)(shared + S::kMaxItems * kItemStride);   // [leaf][row of the step][row of the tiles], each its own thread's
#pragma unroll 1
    for (int leaf = 0; leaf < kLeaves; ++leaf) {
      block.template receive<kItemVectors * S::kMaxItems>(p, phase, block.state.live * S::kTopK, kItemVectors, leaf * kItemVectors, [&](int item, int k, const uint4& v) {
        shared[item * kItemStride + k] = scale_tokens(v);
      });
      if (leaf + 1 == kLeaves) block.received(phase);
      const Own own = own_of(p);
      const int entries = list.entries, width = own.tiles * kTileRows;
#pragma unroll 1
      for (int e = block.me.warp; e < entries; e += kConsumers) {
        const int first = entry_first(list.entry[e]), count = entry_first(list.entry[e + 1]) - first;
        const uint4* x = shared + list.item[first + min_of(block.me.lane / 4, count - 1)] * kItemStride + block.me.lane % 4;
        const int turn = own.tiles == 2 ? e / (kSlotBytes / (2 * kLeafBytes)) : e / (kSlotBytes / kLeafBytes), in_copy = e - turn * own.per, taken = min_of(own.per, entries - turn * own.per);
        const u8* weights = block.ring.take(block.counts.copies + turn, block.a.watch, phase) + in_copy * own.tiles * kLeafBytes;
#pragma unroll 1
        for (int tile = 0; tile < own.tiles; ++tile) {
          float c[4];
          mxfp4_leaf_with<kGroups>(c, weights + tile * kLeafBytes, [&](int g) { return x[g * 4]; });
          K3_UNROLL
          for (int i = 0; i < 4; ++i) {
            const int token = block.me.lane % 4 * 2 + i % 2;
            if (token < count) results[(first + token) * width + tile * kTileRows + block.me.lane / 4 + i / 2 * 8] = c[i];
          }
        }
        block.ring.give(block.counts.copies + turn, in_copy ? 1 : kConsumers - (taken - 1), block.me);
      }
      block.counts.copies += (entries + own.per - 1) / own.per;
      block.stamp(phase, kProductsDone, block.me.lane == 0);
      warps_sync(kAllConsumers, kAll);
      const LaunchTarget target(block, p, phase, own.first);
#pragma unroll 1
      for (int i = block.me.thread(); i - block.me.lane < block.a.rows * width; i += kAll) {
        const int at = min_of(i, block.a.rows * width - 1), row = at / width, column = at - row * width;
        float sum = 0;
#pragma unroll 8
        for (int rank = 0; rank < S::kTopK; ++rank) {
          sum = fmaf(choice.factor[row * S::kTopK + rank], results[choice.order[row * S::kTopK + rank] * width + column], sum);
        }
        if constexpr (kLeaves > 1) {
          sums[leaf * S::kTokens * kRowsOut + at] = sum;
          if (leaf + 1 < kLeaves) continue;
          sum = tree_sum<kLeaves>(sums + at, S::kTokens * kRowsOut);
        }
        target.put(row, column / 8, sum, i < block.a.rows * width, i % 8);
      }
    }
  }
};
