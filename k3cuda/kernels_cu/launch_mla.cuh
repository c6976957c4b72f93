// The middle of latent attention inside the single launch: a row's new cache row, then mla_attend.cuh by all blocks, then mla_combine.cuh.
//
// Cache and partial results lie in memory, as the standard path has them: how many partial results there are follows from where the rows stand, so they
// have no place in the exchange. What goes through it is that they are written: a vector for each new cache row and one of every block that attends,
// behind a fence.
#pragma once
#include "launch_heads.cuh"
#include "mla_attend.cuh"

struct LaunchInMemory {   // weights don't come through the ring
  static constexpr LaunchCounting kCounting = kCountsNothing;
};

// A unit is a row: its latent is normed and put into the cache. Rows of padding have none.
template <class Stored, int kLatent, int kLatentLeaves, int kRope>
struct LaunchMlaNorm : LaunchInMemory {
  typedef MlaLeaf<kLatent, kLatentLeaves> Leaf;
  static_assert(kRope <= Consumers::kThreads, "a value of the shared key a thread");
  static constexpr int x_vectors(int, int) { return 0; }
  template <class Block>
  static K3_DEVICE void consume(Block& block, const ProgramPhase& p, int phase) {
    const Consumers team = block.team();
    const MlaWrite& w = ((const LaunchMla*)block.a.weights[phase])->write;
    float* leaves = block.partial(0);
#pragma unroll 1
    for (int u = 0; u < p.units; ++u) {
      const int row = p.tiles[u], slot = w.rows.row_slot[row], position = w.rows.row_position[row];
      const int page = slot < 0 ? 0 : w.rows.page_table[size_t(slot) * w.rows.slot_pages + position / kMlaPage];
      float weight[Leaf::kValues], own[Leaf::kValues];
      K3_UNROLL
      for (int i = 0; i < Leaf::kValues; ++i) weight[i] = Leaf::has(i, team) ? bf16_to_float(w.latent_norm[Leaf::at(i, team)]) : 0;
      const u32* from = (const u32*)block.input(p, 0) + row * block.link(p).in[0].row * 4;
      u32 v[Leaf::kValues + 1] = {};   // and of the shared key
      await_all(v, block.a.watch, phase, u32(row), [&](int j) { return j < Leaf::kValues ? Leaf::has(j, team) : team.thread() < kRope; },
                [&](int j) { return from + (j < Leaf::kValues ? Leaf::at(j, team) : kLatent + team.thread()); });
      K3_UNROLL
      for (int i = 0; i < Leaf::kValues; ++i) own[i] = __uint_as_float(v[i]);
      const float sum = Leaf::squares(own);
      team.sync();   // all are finished with the phase or row before
      if (team.lane() == 0) leaves[team.warp()] = sum;
      team.sync();
      if (u + 1 == p.units) block.received(phase);
      if (slot >= 0) {
        const float inverse = Leaf::inverse(leaves, w.eps);
        auto to = [&](int i) { return (Stored*)w.cache + mla_cache_at<Stored, kLatent + kRope>(page, position, i); };
        K3_UNROLL
        for (int i = 0; i < Leaf::kValues; ++i)
          if (Leaf::has(i, team)) mla_store_latent(to(Leaf::at(i, team)), mla_normed(own[i], inverse, weight[i]), w.cache_scale);
        if (team.thread() < kRope) mla_store_key(to(kLatent + team.thread()), __uint_as_float(v[Leaf::kValues]), w.cache_scale);
      }
      team.sync();
      if (team.thread() == 0) {
        fence_copied_memory();
        __threadfence();
        block.publish(p, phase, row, 0, {0, 0, 0, 0}, 0, 0, 1);
      }
    }
  }
};

// What a block needs to attend, in shared memory: registers are short then.
template <class S>
struct LaunchMlaRoom {
  MlaSmem<S> m;
  MlaAttend a;
  const uint4 *queries, *written;   // fields that it reads, row 0, and from row to row
  int query_row, written_row, rows;
};

// All consumers as one that attends (MlaBlock in mla_core.cuh): blocks take items in turn, queries come by the exchange.
template <class S>
struct LaunchAttending : Consumers {
  const LaunchMlaRoom<S>& r;
  const Watch& watch;
  int phase;
  K3_DEVICE LaunchAttending(const LaunchMlaRoom<S>& room, const Watch& w, int at) : r(room), watch(w), phase(at) {}
  K3_DEVICE int number() const { return rank_block(); }
  K3_DEVICE int blocks() const { return blocks_of_rank(); }
  K3_DEVICE int next(const MlaAttend&, int index, int) const { return index + blocks(); }
  K3_DEVICE const uint4* query(int i) const { return r.queries + i / S::kHeads * r.query_row + i % S::kHeads * (S::kDim / 8); }
  template <int kUnits, int kCount, class Wants, class Query, class Unit>
  K3_DEVICE void load(const MlaAttend&, uint4 (&v)[kCount], Wants&& wants, Query&& of, Unit&& unit) const {
    K3_UNROLL
    for (int j = 0; j < kCount; ++j) v[j] = {0, 0, 0, 0};
    await_all(v, watch, phase, 0, wants, [&](int j) { return query(of(j)) + unit(j); });
  }
  // The warp that copies pages: from here on those of the step's own rows, too. Its first item's queries are about here by then.
  K3_DEVICE void await_written() const {
    const int i = lane();
    uint4 v[1] = {};
    await_all(v, watch, phase, 0, [&](int) { return i < r.rows; }, [&](int) { return r.written + i * r.written_row; });
    await_all(v, watch, phase, 0, [&](int) { return i < r.m.first.columns; }, [&](int) { return query(r.m.first.run * S::kHeads + r.m.first.first + i); });
    __threadfence();
    fence_copied_memory();
    __syncwarp();
  }
};

// Sixteen warps, results partial even where a run has one chunk. Two narrow tiles would spill over a BF16 cache.
template <class Cache, int kHeads, int kLatent, int kRope, int kTiles, int kRing>
struct LaunchMlaShape : MlaShape<Cache, kHeads, kLatent, kRope, kTiles, kRing, 1, 2> {
  static constexpr bool kPartial = true, kTight = true;
  static constexpr int kNarrow = 1;
};

// What mla_combine needs of it, behind the room.
struct LaunchMlaDone {
  MlaAttend a;
  MlaWork work;
};

// Every block has a unit: items of the step as the rows' positions make them. Its room, of which pages of the cache are the most, is in the ring's first
// slots, empty copies that the producers hand out: apart it would take half of the ring from all phases. What is left of a turn before slot 0 is skipped.
template <class S_, int kSlotBytes>
struct LaunchMlaAttend : LaunchInMemory {
  typedef S_ S;
  typedef LaunchMlaRoom<S> Room;
  static constexpr int kHeldSlots = (sizeof(Room) + kSlotBytes - 1) / kSlotBytes;
  static_assert(kHeldSlots <= kConsumers, "a slot a warp");
  static_assert(S::kThreads == Consumers::kThreads && !S::kMoveRegisters, "all consumers have a role, with the registers that they have");
  static constexpr int kDoneVectors = (sizeof(LaunchMlaDone) + 15) / 16;
  static constexpr int x_vectors(int, int) { return kDoneVectors; }
  template <class Block> static K3_DEVICE Room& room(const Block& block) { return *(Room*)block.ring.slots; }   // the first of shared memory, as the copy engine needs it
  template <class Block> static K3_DEVICE LaunchMlaDone& done(const Block& block) { return *(LaunchMlaDone*)block.x(); }
  template <class Block>
  static K3_DEVICE u32 skipped(u32 copies) {
    constexpr u32 kSlots = Block::Shape::Ring::kSlots;
    return (kSlots - copies % kSlots) % kSlots;
  }

  template <class Block, class Producer>
  static K3_DEVICE void produce(const Block&, Producer& producer, const ProgramPhase&, const u8*, int) {
    LaunchSource& s = producer.source;
    s.which = kEmptySlots, s.skipped = skipped<Block>(producer.issued), s.count = s.skipped + kHeldSlots, s.bytes = 1, s.each = 0;
  }

  template <class Block>
  static K3_DEVICE void consume(Block& block, const ProgramPhase& p, int phase) {
    begin(block, p, phase);
    attend(Block(block.smem + unknown_zero()), phase);   // which finds everything anew: products want the registers
    end(Block(block.smem + unknown_zero()), ProgramPhase(p.words()), phase);
  }
  template <class Block>
  static K3_DEVICE void begin(const Block& block, const ProgramPhase& p, int phase) {
    const Consumers team;
    Room& r = room(block);
    const u32 copies = block.kept_anew(team.me).copies, skips = skipped<Block>(copies);
    __syncwarp();
    block.take_copies(skips + kHeldSlots);
    if (team.warp() < kHeldSlots) block.ring.take(copies + skips + team.warp(), block.a.watch, phase);
    fence_copies();   // what earlier phases stored where pages land
    team.sync();      // all are finished with the phase before
    for (int i = team.thread(); i < int(sizeof(MlaAttend) / 4); i += Consumers::kThreads) ((u32*)&r.a)[i] = ((const u32*)&((const LaunchMla*)block.a.weights[phase])->attend)[i];
    if (team.thread() == 0) {
      r.queries = block.input(p, 0), r.written = block.input(p, 1);
      r.query_row = block.link(p).in[0].row, r.written_row = block.link(p).in[1].row, r.rows = block.a.rows;
    }
    team.sync();
  }
  template <class Block>
  static K3_DEVICE void attend(const Block& block, int phase) {
    Room& r = room(block);
    block.stamp(phase, kFirstCopy);
    const LaunchAttending<S> by(r, block.a.watch, phase);
    mla_attend<S>(r.a, r.m, [&] {
      if (by.warp()) return;
      by.await_written();
      block.arrived(phase);
    }, by);
  }
  template <class Block>
  static K3_DEVICE void end(const Block& block, const ProgramPhase& p, int phase) {
    const Consumers team;
    // Queries of padding: else nobody has waited for them before they are cleared away.
#pragma unroll 1
    for (int row = block.state.live + rank_block(); row < block.a.rows; row += blocks_of_rank()) {
      const uint4* from = block.input(p, 0) + row * block.link(p).in[0].row;
      receive_vectors<1>(team.thread(), Consumers::kThreads, S::kHeads * S::kDim / 8, block.a.watch, phase, [&](int i) { return from + i; }, [] {}, [](int, const uint4&) {});
    }
    team.sync();
    block.finished(phase);
    if (K3_STAMPED && team.thread() == 0) {   // pages have a ring of their own
      const MlaWork& work = room(block).m.work;
      u32 pieces = 0;
      for (int i = rank_block(); i < mla_items(work); i += blocks_of_rank()) pieces += mla_item_pieces(mla_item<S::kHeads>(work, i));
      block.stamp(phase, kProductsDone), block.stamp(phase, kLastCopy), block.copied(phase, pieces * S::kPiece);
    }
    if (team.thread() == 0) {
      __threadfence();
      block.publish(p, phase, 0, rank_block(), {0, 0, 0, 0}, 0, 0, 1);
    }
    Room& r = room(block);
    for (int i = team.thread(); i < int(sizeof(MlaAttend) / 4); i += Consumers::kThreads) ((u32*)&done(block).a)[i] = ((const u32*)&r.a)[i];
    for (int i = team.thread(); i < int(sizeof(MlaWork) / 4); i += Consumers::kThreads) ((u32*)&done(block).work)[i] = ((const u32*)&r.m.work)[i];
    for (int i = team.thread(); i < r.m.kBarriers; i += Consumers::kThreads) barrier_end(r.m.full + i);   // the place is other phases' again
    fence_slot();
    team.sync();
    if (team.warp() < kHeldSlots) block.ring.give(block.kept_anew(team.me).copies - kHeldSlots + team.warp(), kConsumers, team.me);
  }
};

// A unit is kTogether slabs of a row and head; two teams of eight warps take units in turn. Right behind mla_attend in every program, whose tables it
// finds in shared memory (LaunchMlaDone).
template <class Attend, int kTogether>
struct LaunchMlaCombine : LaunchInMemory {
  typedef typename Attend::S S;
  static constexpr int kUnit = kTogether * kMlaSlab, kUnits = S::kLatent / kUnit, kTeams = kConsumers / kMlaCombineWarps;
  static constexpr int x_vectors(int, int) { return Attend::kDoneVectors + kTeams * int(sizeof(MlaCombineSums<kTogether>)) / 16; }
  static_assert(S::kLatent % kUnit == 0 && sizeof(MlaCombineSums<kTogether>) % 16 == 0, "whole slabs");

  template <class Block>
  static K3_DEVICE void consume(Block& old, const ProgramPhase& p, int phase) {
    const Block block(old.smem + unknown_zero());   // as in mla_attend
    const LaunchMlaDone& r = Attend::done(block);
    const uint4* from = block.input(p, 0);
    const int blocks = blocks_of_rank();
    const Consumers all;   // of this phase alone, as in launch_kda.cuh
    receive_vectors<1>(all.thread(), Consumers::kThreads, blocks, block.a.watch, phase, [&](int i) { return from + i; }, [] {}, [](int, const uint4&) {});
    __threadfence();
    all.sync();
    block.received(phase);
    const WarpTeam<kMlaCombineWarps> team{};
    auto& sums = ((MlaCombineSums<kTogether>*)(block.x() + Attend::kDoneVectors))[team.number()];
    const MlaCombine a{r.a.rows, r.a.partial, r.a.top_sum, r.a.cache_scale, nullptr, nullptr};
    int turn = 0;
#pragma unroll 1
    for (int u = team.number(); u < p.units; u += kTeams) {
      const int unit = p.tiles[u], at = unit % kUnits * kUnit, head = unit / kUnits % S::kHeads, row = unit / (kUnits * S::kHeads);
      if (r.work.slot[row] < 0) {   // nobody's, but somebody waits for it
        if (team.thread() < kUnit / 8) block.publish(p, phase, row, (head * S::kLatent + at) / 8 + team.thread(), {0, 0, 0, 0}, 0, 0, 1);
        continue;
      }
      mla_combine_unit<S::kHeads, S::kLatent, kTogether, 4>(a, sums, r.work, row, head, at, turn, [&](int c, float v) {
        block.publish(p, phase, row, (head * S::kLatent + c) / 8, pack_vector(v, team.lane()), team.lane() % 8);
      }, team);
    }
  }
};
