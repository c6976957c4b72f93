// What phases of the single launch leave in the exchange: rows of fields, each of BF16 or F32 values, and where readers find them.
#pragma once
#include "launch_exchange.cuh"

constexpr u32 kNoSlot = 15;
constexpr int kMaxInputs = 4, kMaxFields = 4, kMaxClears = 2, kHeadWords = 3;   // words of a phase before its units

// In 16-byte vectors. A field begins at vector `at` of a row of its slot; of the `width` vectors that are made `copies` are written behind one
// another, as far as `limit` reaches. Where there are several ranks, `at` is this
// one's place in the rows of `copies` of them, itself first; with no copies each rank gets a part of the row. own: where it begins in a row of the record.
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

// Sizes of a kind of phase. Kinds share their code, which finds these in shared memory. `leaves` is 0 where there is no product, `slices` where there is no mix.
enum LaunchMore { kMoreNothing, kMoreAdds, kMoreGates };   // what its rows are added to or multiplied with
enum LaunchAhead { kAheadBlocks = 1, kAheadSum = 2, kAheadWeight = 4 };   // what a round of a mix reads of its own: scores and closed blocks, the prefix sum, the norm's weights
struct LaunchGeometry {
  u8 code;                                                  // what runs it: LaunchKinds::visit
  u8 leaves, leaf_shift, copy_shift;                        // leaves of a block; their logarithm, and that of a copy's
  u8 chunk_steps, chunks;                                   // k-steps of a leaf that a copy brings, and how many times
  u8 odd, is_shared, has_own_x, more;                       // k-steps of a leaf if that is odd, else 0; a cluster shares the tiles; every unit has an x of its own; LaunchMore
  u8 fields, f32, to_logits, rope;                          // results: how many fields, bits of those of F32, whether they are logits, vectors behind each head's
  u16 head_tiles, first[kMaxFields];                        // tiles of a head that has such vectors; each field's first tile
  u16 own_vectors, more_at, in_at, unit_copies;             // vectors of a token of x; where in x what is added lies, and room of the input's own; copies of a unit
  u8 parts, slices, taps, ahead;                            // of a mix: ranks' parts that join, slices and taps of a row, LaunchAhead
  u32 slice;                                                // values of one
  u32 tile_bytes, part_bytes, copy_bytes, leaf_bytes;       // of a tile, a block's part of it, a copy; from one copy of the same chunk to the next
};

// From tile kFirst_ on, rows of a product are the next field, of F32 values or BF16.
template <int kFirst_, bool kF32_>
struct LaunchSegment { static constexpr int kFirst = kFirst_; static constexpr bool kF32 = kF32_; };

template <class... Segment>
struct LaunchOut {
  static constexpr void describe(LaunchGeometry& g) {
    static_assert(sizeof...(Segment) <= kMaxFields, "a field each");
    ((g.first[g.fields] = Segment::kFirst, g.f32 |= Segment::kF32 << g.fields, ++g.fields), ...);
  }
};

// Where rows of a product's tile go: worked out once for a tile, since each look at a size is a round trip to shared memory.
struct LaunchTarget {
  uint4* at;                             // column 0 of row 0 of the field; of another rank, `at` as far from its own exchange
  int row, column, width, limit, copies;   // vectors from row to row; the tile's first; as in LaunchField
  bool f32;
  const int* place;                      // [rows]: of logits; null: rows lie where they are
#if K3_RANKS > 1
  const LaunchPeer* peers;               // from this rank on
  size_t from;                           // where in an exchange the field begins
  int rank;
#endif
#if K3_PROBED
  uint4* record;
  int record_row;
#endif
  template <class Block>
  K3_DEVICE LaunchTarget(const Block& block, const ProgramPhase& p, int phase, int tile) {
    const LaunchGeometry& g = block.geometry(p);
    const LaunchLink& to = block.link(p);
    int field = 0;
    if (g.fields > 1)
#pragma unroll 1
      while (field + 1 < g.fields && tile >= g.first[field + 1]) ++field;
    tile -= g.first[field];
    const LaunchField f = to.out[field];
    f32 = g.f32 >> field & 1;
    row = to.row, width = f.width, limit = f.limit, copies = f.copies, column = f32 ? tile * 4 : tile * 2;
    if (g.rope) column += tile / g.head_tiles * g.rope;   // BF16
    at = block.slot_out(p) + f.at;
    place = g.to_logits ? block.state.place : nullptr;
#if K3_RANKS > 1
    peers = &block.peer(0), from = size_t(p.out()) * block.a.slot_vectors + f.at, rank = block.a.rank;
#endif
#if K3_PROBED
    record = block.a.record ? block.a.record + size_t(phase) * block.a.record_vectors + f.own : nullptr, record_row = to.record_row;
#endif
  }
  // Eight lanes have the rows of half `half` of the tile, one each, of result row `of`. All lanes of the warp.
  K3_DEVICE void put(int of, int half, float v, bool live, int lane) const {
    const int warp_lane = lane_id();
    uint4 vector;
    int own = column + half, lanes = 8;
    if (f32) vector = pack_floats(v, warp_lane), own += half + lane / 4, lanes = 4;
    else vector = pack_vector(v, warp_lane);
    if (!live || own >= width) return;
    lane &= lanes - 1;
#if K3_PROBED
    if (record && lane == 0) record[of * record_row + own] = vector;
#endif
    if (place) of = place[of];
    if (of < 0) return;
#if K3_RANKS > 1
    if (place) {
#pragma unroll 1
      for (int i = lane; i < K3_RANKS; i += lanes) store_exchange(peers[i].result + of * row + rank * width + own, vector);
    } else if (copies == 0) {   // each rank gets a part of the row
      const int part = width / K3_RANKS;
      if (lane == 0) store_exchange(peers[(own / part + K3_RANKS - rank) % K3_RANKS].exchange + from + of * row + own % part, vector);
    } else {
#pragma unroll 1
      for (int i = lane; i < copies; i += lanes) store_exchange(peers[i].exchange + from + of * row + own, vector);
    }
    return;
#endif
    uint4* to = at + of * row + own;
#pragma unroll 1
    for (int copy = lane; copy < copies; copy += lanes)
      if (const int shift = copy * width; own + shift < limit) store_exchange(to + shift, vector);
  }
};
