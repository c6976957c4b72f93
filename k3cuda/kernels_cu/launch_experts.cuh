// Routed experts inside the single launch: sums and results of expert_core.cuh, weights out of the block's ring. Which experts a layer reads
// is known when its choice is: the producer enters them then.
#pragma once
#include "launch_choice.cuh"
#include "launch_product.cuh"

// Leaves that one copy brings.
constexpr int copy_leaves(int leaves, int leaf_bytes, int slot_bytes) { return leaves > 1 && leaves * leaf_bytes > slot_bytes ? copy_leaves(leaves / 2, leaf_bytes, slot_bytes) : leaves; }

// w1 and w3. A unit is a pair of tiles of an entry; clusters take equal runs of them.
//   kLeaves_, kGroups_  leaves of K, 32-groups in each
//   kPairs_             pairs of tiles of an expert
//   kParts_             blocks that share a unit, by leaves: the whole cluster
template <int kLeaves_, int kGroups_, int kPairs_, int kParts_, int kSlotBytes>
struct LaunchExpertUp {
  static constexpr int kLeaves = kLeaves_, kGroups = kGroups_, kPairs = kPairs_, kParts = kParts_, kBlockLeaves = kLeaves / kParts, kLeafBytes = mxfp4_leaf_bytes(kGroups);
  static constexpr int kCopyLeaves = copy_leaves(kBlockLeaves, kLeafBytes, kSlotBytes), kCopyBytes = kCopyLeaves * kLeafBytes;
  static constexpr int kTileCopies = kBlockLeaves / kCopyLeaves, kUnitCopies = 2 * kTileCopies;
  static constexpr int kUnitWarps = 2 * kBlockLeaves, kUnits = kConsumers / kUnitWarps;   // kUnits at a time
  static constexpr int kOwnVectors = kBlockLeaves * kGroups * 4;                          // of a row
  static constexpr int x_vectors(int tokens, int) { return tokens * kOwnVectors; }
  static_assert(kUnits > 0 && kUnits * kUnitWarps == kConsumers && kBlockLeaves * kParts == kLeaves, "a warp takes a leaf of one tile");
  static_assert(kCopyBytes <= kSlotBytes, "a copy fits a slot");

  struct Run { int begin, end; };
  static K3_DEVICE Run run_of(int entries) {
    const int units = entries * kPairs, clusters = gridDim.x / kParts, own = blockIdx.x / kParts, per = units / clusters, more = units % clusters;
    const int begin = own * per + min_of(own, more);
    return {begin, begin + per + (own < more)};
  }

  template <class Block, class Producer>
  static K3_DEVICE void produce(const Block& block, Producer& producer, const ProgramPhase&, const u8* w, int phase) {
    for (Spin spin; block.state.chosen < producer.choices;) spin.turn(block.a.watch, kWaitChoice, phase, 0);
    __syncwarp();
    const auto& list = block.choice().list;
    const Run run = run_of(list.entries);
    const u8* own = w + block.part() * kBlockLeaves * kLeafBytes;
    producer.copies((run.end - run.begin) * kUnitCopies, kCopyBytes, kCopyBytes, phase, [](int) { return 1; }, [&](int i, int) {
      const int u = run.begin + i / kUnitCopies, entry = u / kPairs, pair = u - entry * kPairs, tile = i % kUnitCopies / kTileCopies, j = i % kTileCopies;
      return own + (((size_t(entry_expert(list.entry[entry])) * kPairs + pair) * 2 + tile) * kLeaves + j * kCopyLeaves) * kLeafBytes;
    });
  }

  template <class Block>
  static K3_DEVICE void consume(Block& block, const ProgramPhase& p, int phase) {
    typedef typename Block::Shape S;
    uint4* shared = block.x();
    block.template receive<kOwnVectors * S::kTokens>(p, phase, block.a.rows, kOwnVectors, block.part() * kOwnVectors, [&](int token, int k, const uint4& v) {
      shared[(k / 4 * S::kTokens + token) * 4 + k % 4] = scale_tokens(v);
    });
    block.received(phase);
    const auto& list = block.choice().list;
    const Run run = run_of(list.entries);
    const int group = block.me.warp / kUnitWarps, tile = block.me.warp % kUnitWarps / kBlockLeaves, leaf = block.me.warp % kBlockLeaves;
    const uint4* x = shared + leaf * kGroups * S::kTokens * 4 + block.me.lane % 4;
    const u32 first_copy = block.counts.copies + tile * kTileCopies + leaf / kCopyLeaves;
    u32 own_turns = 0, &turns = kParts > 1 ? block.counts.expert_turns : own_turns;
    int before = -1;   // the unit of the turn before, which this block has yet to hear of
#pragma unroll 1
    for (int u = run.begin + group; u < run.end; u += kUnits, ++turns) {
      const int entry = u / kPairs, first = entry_first(list.entry[entry]), count = entry_first(list.entry[entry + 1]) - first;
      // Columns beyond the entry's items are the last item's once more: nobody looks at them.
      const int row = list.item[first + min_of(block.me.lane / 4, count - 1)] / S::kTopK;
      uint4 held[kGroups];
      K3_UNROLL
      for (int i = 0; i < kGroups; ++i) held[i] = x[(i * S::kTokens + row) * 4];
      const u32 copy = first_copy + (u - run.begin) * kUnitCopies;
      float c[4];
      mxfp4_leaf<kGroups>(c, block.ring.take(copy, block.a.watch, phase) + leaf % kCopyLeaves * kLeafBytes, held);
      block.ring.give(copy, kConsumers / kCopyLeaves, block.me);
      float* partial = block.partial(turns) + group * kUnitWarps * S::kTokens * kSumStride;   // [tile][leaf][token][row]
      const int own = block.me.warp % kUnitWarps;
      store_leaf_sums<kUnitWarps, S::kTokens>(c, partial, group, own, block.me);
      if constexpr (kParts == 1) finish(block, p, phase, partial, own * kWarpSize + block.me.lane, u, first, count);
      else {
        tell(block, partial, own * kWarpSize + block.me.lane, group, turns, count);
        if (before >= 0) hear(block, p, phase, group, own, turns - 1, before);
        before = u;
      }
    }
    if constexpr (kParts > 1)
      if (before >= 0) hear(block, p, phase, group, block.me.warp % kUnitWarps, turns - 1, before);
    block.counts.copies += (run.end - run.begin) * kUnitCopies;
  }

  // Gate or up of value i of a unit: [token][row].
  template <int kTokens>
  static K3_DEVICE float leaves(const float* partial, int tile, int i) {
    return tree_sum<kBlockLeaves>(partial + (tile * kBlockLeaves * kTokens + i / kTileRows) * kSumStride + i % kTileRows, kTokens * kSumStride);
  }
  // A whole warp: value `i` of unit `u`, whose items begin at `first`.
  template <class Block>
  static K3_DEVICE void activate(Block& block, const ProgramPhase& p, int phase, int u, int first, int item, int half, float gate, float up, bool live, int lane) {
    const uint4 v = pack_vector(situ(gate, up, block.a.situ_beta, block.a.situ_linear_beta), block.me.lane);
    if (live) block.publish(p, phase, block.choice().list.item[first + item], u % kPairs * 2 + half, v, lane);
  }

  template <class Block>
  static K3_DEVICE void finish(Block& block, const ProgramPhase& p, int phase, const float* partial, int thread, int u, int first, int count) {
    constexpr int kTokens = Block::Shape::kTokens;
    const int live = count * kTileRows;
#pragma unroll 1
    for (int i = thread; i - block.me.lane < live; i += kUnitWarps * kWarpSize) {
      const int at = min_of(i, live - 1);
      activate(block, p, phase, u, first, at / kTileRows, at / 8 % 2, leaves<kTokens>(partial, 0, at), leaves<kTokens>(partial, 1, at), i < live, i % 8);
    }
  }

  // As in launch_product.cuh, of two tiles. Inbox: [tile][source][own vector][8].
  template <class Block>
  static K3_DEVICE void tell(Block& block, const float* partial, int thread, int group, u32 turn, int count) {
    constexpr int kTokens = Block::Shape::kTokens, kMost = max_of(2 * kTokens, kParts) / kParts;   // vectors of a block
    static_assert(kParts == Block::Shape::kCluster, "a unit is of a whole cluster");
    const int at = inbox_at(group, turn), rank = block.part(), vectors = max_of(2 * count, kParts), own = (vectors - rank + kParts - 1) / kParts;
    if (thread == 0) inbox_expect(block.heard(at), own * 8 * 4 * kParts * 2);
#pragma unroll 1
    for (int i = thread; i < vectors * 16; i += kUnitWarps * kWarpSize) {
      const int tile = i >= vectors * 8, j = i - tile * vectors * 8, vector = j / 8;
      send(block.inbox(at) + ((tile * kParts + rank) * kMost + vector / kParts) * 8 + j % 8, vector % kParts,
           leaves<kTokens>(partial, tile, min_of(j, kTokens * kTileRows - 1)), block.heard(at));
    }
  }
  template <class Block>
  static K3_DEVICE void hear(Block& block, const ProgramPhase& p, int phase, int group, int own_warp, u32 turn, int u) {
    constexpr int kMost = max_of(2 * Block::Shape::kTokens, kParts) / kParts;
    const int at = inbox_at(group, turn), thread = (own_warp + turn) % kUnitWarps * kWarpSize + block.me.lane;   // warps take turns
    if (thread - block.me.lane >= kMost * 8) return;
    const auto& list = block.choice().list;
    const int entry = u / kPairs, first = entry_first(list.entry[entry]), count = entry_first(list.entry[entry + 1]) - first;
    const float* inbox = block.inbox(at);
    for (Spin spin; !inbox_try(block.heard(at), turn / kInboxTurns & 1);) spin.turn(block.a.watch, kWaitSums, phase, turn);
#pragma unroll 1
    for (int j = thread; j - block.me.lane < kMost * 8; j += kUnitWarps * kWarpSize) {
      const int mine = min_of(j, kMost * 8 - 1), vector = mine / 8 * kParts + block.part();
      activate(block, p, phase, u, first, vector / 2, vector % 2, tree_sum<kParts>(inbox + mine, kMost * 8), tree_sum<kParts>(inbox + kParts * kMost * 8 + mine, kMost * 8),
               j < kMost * 8 && vector < 2 * count, j % 8);
    }
  }
  static K3_DEVICE int inbox_at(int group, u32 turn) { return kParts * kInboxTurns + group * kInboxTurns + turn % kInboxTurns; }   // behind those of products
};

// w2 of one leaf: a row's experts summed in rising id. A block has a pair of tiles, of every entry; warps take entries in turn.
//   kTiles_  of an expert
template <int kGroups_, int kTiles_, int kSlotBytes, class Out>
struct LaunchExpertDown {
  static constexpr int kGroups = kGroups_, kTiles = kTiles_, kLeafBytes = mxfp4_leaf_bytes(kGroups);
  static constexpr int kItemVectors = kGroups * 4, kItemStride = kItemVectors + (kGroups % 2 ? 0 : 4);   // neighbours lie in different banks
  static constexpr int x_vectors(int, int items) { return items * kItemStride; }
  static_assert(2 * kLeafBytes <= kSlotBytes, "a copy fits a slot");

  struct Own { int first, tiles, per; };   // tiles of the block; entries of a copy
  static K3_DEVICE Own own_of(const ProgramPhase& p) {
    const int first = p.tiles[0] * 2, tiles = min_of(2, kTiles - first);
    return {first, tiles, kSlotBytes / (tiles * kLeafBytes)};
  }

  template <class Block, class Producer>
  static K3_DEVICE void produce(const Block& block, Producer& producer, const ProgramPhase& p, const u8* w, int phase) {
    if (!p.units) return;
    const auto& list = block.choice().list;
    const Own own = own_of(p);
    const int entries = list.entries, each = own.tiles * kLeafBytes;
    producer.copies((entries + own.per - 1) / own.per, own.per * each, each, phase, [&](int i) { return min_of(own.per, entries - i * own.per); },
                    [&](int i, int j) { return w + (size_t(entry_expert(list.entry[i * own.per + j])) * kTiles + own.first) * kLeafBytes; });
  }

  template <class Block>
  static K3_DEVICE void consume(Block& block, const ProgramPhase& p, int phase) {
    typedef typename Block::Shape S;
    static_assert(S::kMaxItems * 2 * kTileRows <= 2 * S::kPartial, "results of all items fit");
    constexpr int kAll = kConsumers * kWarpSize;
    uint4* shared = block.x();
    block.template receive<kItemVectors * S::kMaxItems>(p, phase, block.a.rows * S::kTopK, kItemVectors, 0, [&](int item, int k, const uint4& v) {
      shared[item * kItemStride + k] = scale_tokens(v);
    });
    block.received(phase);
    const auto& choice = block.choice();
    const auto& list = choice.list;
    const Own own = own_of(p);
    const int entries = list.entries, width = own.tiles * kTileRows;
    float* results = block.partial(0);   // [list position][row of the tiles]
#pragma unroll 1
    for (int e = block.me.warp; e < entries; e += kConsumers) {
      const int first = entry_first(list.entry[e]), count = entry_first(list.entry[e + 1]) - first;
      const uint4* x = shared + list.item[first + min_of(block.me.lane / 4, count - 1)] * kItemStride + block.me.lane % 4;
      uint4 held[kGroups];
      K3_UNROLL
      for (int i = 0; i < kGroups; ++i) held[i] = x[i * 4];
      const int turn = e / own.per, in_copy = e - turn * own.per, taken = min_of(own.per, entries - turn * own.per);
      const u8* w = block.ring.take(block.counts.copies + turn, block.a.watch, phase) + in_copy * own.tiles * kLeafBytes;
      float c[2][4];
      mxfp4_leaf<kGroups>(c[0], w, held);
      mxfp4_leaf<kGroups>(c[1], w + (own.tiles - 1) * kLeafBytes, held);   // of one tile, that one again
      K3_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int token = block.me.lane % 4 * 2 + i % 2;
        if (token >= count) continue;
        float* to = results + (first + token) * width + block.me.lane / 4 + i / 2 * 8;
        to[0] = c[0][i];
        if (own.tiles == 2) to[kTileRows] = c[1][i];
      }
      block.ring.give(block.counts.copies + turn, in_copy ? kConsumers / taken : kConsumers - (taken - 1) * (kConsumers / taken), block.me);
    }
    block.counts.copies += (entries + own.per - 1) / own.per;
    warps_sync(kAllConsumers, kAll);
#pragma unroll 1
    for (int i = block.me.thread(); i - block.me.lane < block.a.rows * width; i += kAll) {
      const int at = min_of(i, block.a.rows * width - 1), row = at / width, column = at - row * width;
      float sum = 0;
#pragma unroll 8
      for (int rank = 0; rank < S::kTopK; ++rank) {
        sum = fmaf(choice.factor[row * S::kTopK + rank], results[choice.order[row * S::kTopK + rank] * width + column], sum);
      }
      Out::put(block, p, phase, row, own.first + column / kTileRows, column / 8 % 2, sum, i < block.a.rows * width, i % 8);
    }
  }
};
