// The middle of KDA inside the single launch: kda_core.cuh by a block a head and sequence. What kda_in left comes by the exchange; states, windows
// and the records that a commit replays lie in memory, as the standard path has them.
#pragma once
#include "kda_core.cuh"
#include "launch_mix.cuh"

// Of at most kTokens rows. A unit is a head of the sequence that a row opens; of other rows it is nothing. Fields: low-rank decay, BF16; betas before the sigmoid, F32; q, k and v
// before the conv, BF16; output gates, F32.
template <int kDim, int kWidth, int kTokens>
struct LaunchKdaShape : KdaShape<kDim, kWidth, 1, 2, Consumers::kThreads, kTokens> {
  static constexpr int kHeldTiles = 1;   // f_b lies in slots of the ring that the producer hands out empty, a tile each: its warp fills and reads it
};

// f_b of a unit: tile 0 in the slot of copy `first`, counted from the launch's first.
template <class S, class Ring>
struct LaunchKdaTiles {
  const Ring& ring;
  u32 first;
  typedef uint4 Tile[S::kSteps][kWarpSize];
  static_assert(sizeof(Tile) <= Ring::kSlotBytes && S::kTiles <= kConsumers, "a slot has room for a tile, a warp has one");
  template <class M> K3_DEVICE Tile& operator()(M&, int tile) const { return *(Tile*)(ring.slots + (first + tile) % Ring::kSlots * Ring::kSlotBytes); }
};

template <int kDim, int kWidth, int kHeads, int kTokens>
struct LaunchKdaRows {
  typedef LaunchKdaShape<kDim, kWidth, kTokens> S;
  static_assert(S::kThreads == Consumers::kThreads && S::kHolders == S::kThreads, "all consumers hold state");
  struct __align__(16) Room {
    KdaMix a;
    alignas(16) KdaMixSmem<S> m;
    float gate[S::kBatch][S::kDim];
    int first, head, rows, slot;   // of the unit
  };
  static constexpr int kVectors = (sizeof(Room) + 15) / 16;
  static constexpr int kChannels = kHeads * kDim;
  enum Field { kLowRank, kBeta, kInputs, kGate };

  // Inputs of `n` rows from `first` on into shared memory; what a commit needs of them into its records.
  template <class Block>
  static K3_DEVICE void receive(const Block& block, const ProgramPhase& p, int phase, Room& room, int head, int first, int n, const Consumers& team) {
    constexpr int kGates = kDim / 4, kRow = S::kRowVectors + kGates;
    const KdaMix& a = room.a;
    auto field = [&](Field f, int row) { return block.input(p, f) + (first + row) * block.link(p).in[f].row; };
#pragma unroll 1
    for (int i = team.thread(); i < n * kRow; i += Consumers::kThreads) {
      const int row = i / kRow, v = i % kRow;
      const size_t conv = kda_vector_at<S>(v, kChannels, head, 0);   // of conv inputs
      const uint4* at = v < S::kConvVectors ? field(kInputs, row) + conv / 8 : v < S::kRowVectors ? field(kLowRank, row) + v - S::kConvVectors
                                            : field(kGate, row) + head * kGates + v - S::kRowVectors;
      uint4 vector[1];
      await_all(vector, block.a.watch, phase, u32(i), [](int) { return true; }, [&](int) { return at; });
      if (v >= S::kRowVectors) *(uint4*)&room.gate[row][(v - S::kRowVectors) * 4] = vector[0];
      else *(uint4*)&room.m.inputs[row + S::kHistory][v * 8] = vector[0];
      if (v < S::kConvVectors) *(uint4*)((bf16*)a.qkv + size_t(first + row) * 3 * kChannels + conv) = vector[0];
    }
    if (const int row = team.thread(); row < n) {
      u32 word[1];
      await_all(word, block.a.watch, phase, u32(row), [](int) { return true; }, [&](int) { return (const u32*)field(kBeta, row) + head; });
      const float beta = sigmoid(__uint_as_float(word[0]));
      room.m.beta[row] = beta;
      ((float*)a.beta)[size_t(first + row) * kHeads + head] = beta;
    }
  }

  // Weights, window and state into the L2, phases before the block comes there, and room for f_b.
  template <class Block, class Producer>
  static K3_DEVICE void produce(const Block& block, Producer& producer, const ProgramPhase& p, const u8* w, int phase) {
    constexpr int kRows = kDim * kDim / kWarpSize;   // values of a lane's share of a matrix
    const KdaMix& a = *(const KdaMix*)w;
    const int lane = lane_id();
#pragma unroll 1
    for (int u = 0; u < p.units; ++u) {
      const int first = p.tiles[u] / kHeads, head = p.tiles[u] % kHeads, channel = head * kDim;
      if (first > 0 && a.row_slot[first - 1] == a.row_slot[first]) continue;
      LaunchSource& s = producer.source;
      s.which = kEmptySlots, s.count += S::kTiles, s.bytes = 1, s.each = 0;
      if (producer.number) continue;
      const int slot = max_of(a.row_slot[first], 0);
      bulk_prefetch(a.state + (size_t(slot) * kHeads + head) * kDim * kDim + lane * kRows, kRows * 4);
      bulk_prefetch(a.f_b + size_t(channel) * kDim + lane * kRows, kRows * 2);
      if (lane < 3) bulk_prefetch((lane == 0 ? a.q_conv : lane == 1 ? a.k_conv : a.v_conv) + channel * kWidth, kDim * kWidth * 4);
      else if (lane == 3) bulk_prefetch(a.dt_bias + channel, kDim * 4);
      else if (lane - 4 < 3 * S::kHistory) bulk_prefetch(a.conv_state + (size_t(slot) * 3 * S::kHistory + lane - 4) * kChannels + channel, kDim * 2);
    }
  }

  template <class Block>
  static K3_DEVICE void consume(Block& block, const ProgramPhase&, int) {
    block.team().sync();   // all are finished with the phase before
    Room& room = *(Room*)block.x();
    for (int i = block.me.thread(); i < int(sizeof(KdaMix) / 4); i += Consumers::kThreads) ((u32*)&room.a)[i] = ((const u32*)block.a.weights[block.phase_now()])[i];
#pragma unroll 1
    for (int u = 0; u < block.now().units; ++u) {
      const ProgramPhase p = block.now();
      const int phase = block.phase_now();
      block.team().sync();
      const int first = p.tiles[u] / kHeads, head = p.tiles[u] % kHeads, slot = room.a.row_slot[first];
      if (first > 0 && room.a.row_slot[first - 1] == slot) {
        if (u + 1 == p.units) block.received(phase);
        continue;
      }
      const int n = kda_sequence_rows(room.a.row_slot, block.a.rows, first, slot);
      block.counts.copies += S::kTiles;
      const int state = max_of(slot, 0);   // rows of padding have results too, of anyone's: somebody waits for them
      if (block.me.thread() == 0) room.first = first, room.head = head, room.rows = n, room.slot = state;
      gates(block, p, phase, room, first, head, state, n, u);
      recur(Block(block.smem + unknown_zero()));   // which finds everything anew: the state wants the registers
    }
  }

  // Conv, decay and norms of a unit's rows: what needs no state.
  template <class Block>
  static K3_DEVICE void gates(const Block& block, const ProgramPhase& p, int phase, Room& room, int first, int head, int slot, int n, int u) {
    const Consumers team;   // of this unit alone: what follows from it would be kept from unit to unit
    auto& m = room.m;
    const KdaMix& a = room.a;
    const LaunchKdaTiles<S, typename Block::Shape::Ring> f_b{block.ring, block.counts.copies - S::kTiles};
    const u32 own = f_b.first + S::kWarps - 1 - team.warp();   // as kda_load_weights gives tiles to warps
    const bool has_tile = team.warp() >= S::kWarps - S::kTiles;
    if (has_tile) block.ring.take(own, block.a.watch, phase);
    kda_load_weights<S>(a, m, head, 0, team, f_b);
    kda_load_window<S>(m, a.conv_state + size_t(slot) * 3 * S::kHistory * kChannels, kChannels * S::kHistory, kChannels, head, 0, team);
    const float scale = expf(a.a_log[head]);
    receive(block, p, phase, room, head, first, n, team);
    copy_wait();
    team.sync();
    block.hop(p);   // in each unit: a block has one of them, but for models with many heads a rank
    if (u + 1 == p.units) block.received(phase);
    else block.arrived(phase);
    if (n == 1) kda_conv<S, 1>(a, m, head, 0, first, 0, n, team);
    else kda_conv<S, 4>(a, m, head, 0, first, 0, n, team);
    kda_low_rank<S>(m, 0, n, team, f_b);
    if (has_tile) {
      fence_slot();
      block.ring.give(own, kConsumers, block.me);
    }
    team.sync();
    kda_decay<S>(a, m, scale, head, 0, first, n, team);
    kda_l2norm<S>(a, m, head, 0, first, n, team);
  }
  template <class Block>
  static K3_DEVICE void recur(const Block& block) {
    const Consumers team = block.team();
    Room& room = *(Room*)block.x();
    {
      KdaState<S> state;
      state.load(state_of(room, room.slot, room.head));
      team.sync();
      kda_recur<S>(state, room.m, room.rows);
    }
    team.sync();
    float gate[S::kGates];
    K3_UNROLL
    for (int i = 0; i < S::kGates; ++i) gate[i] = (&room.gate[0][0])[team.thread() + i * S::kThreads];
    const int first = room.first, head = room.head, phase = block.phase_now();
    const ProgramPhase p = block.now();
    kda_gated_norm<S>(room.a, room.m, gate, 0, room.rows, 0, [&](int row, int c, float v) {   // a warp is of one row
      block.publish(p, phase, first + row, (head * kDim + c) / 8, pack_vector(v, team.lane()), team.lane() % 8);
    }, team);
  }
  static K3_DEVICE const float* state_of(const Room& room, int slot, int head) { return room.a.state + (size_t(slot) * kHeads + head) * kDim * kDim; }
};

template <int kDim, int kWidth, int kHeads>
struct LaunchKda {
  template <int kTokens> using Rows = LaunchKdaRows<kDim, kWidth, kHeads, kTokens>;
  static constexpr int kHeldSlots = Rows<1>::S::kTiles + 1;   // all tiles of a head are in the ring at once, and what is copied next
  static constexpr int x_vectors(int tokens, int) { return tokens == 1 ? Rows<1>::kVectors : tokens == 2 ? Rows<2>::kVectors : tokens == 4 ? Rows<4>::kVectors : Rows<8>::kVectors; }
  template <class Block, class Producer>
  static K3_DEVICE void produce(const Block& block, Producer& producer, const ProgramPhase& p, const u8* w, int phase) { Rows<Block::Shape::kTokens>::produce(block, producer, p, w, phase); }
  template <class Block>
  static K3_DEVICE void consume(Block& block, const ProgramPhase& p, int phase) { Rows<Block::Shape::kTokens>::consume(block, p, phase); }
};
