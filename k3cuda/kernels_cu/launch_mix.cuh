// Between two halves of a layer, and of the routed sum, inside the single launch: the stages of norm_core.cuh as rounds of slices of rows. A block
// has the same slices in all of them, so prefix sums and closed blocks are only ever touched by their own threads.
//
//   closed   squares and scores of the closed blocks, per chunk of the tree; nothing waits for it, so it runs phases ahead of the mix
//   sums     the ranks' parts join the prefix sum; p p, p score, p c, c c per chunk. Leaves what joined and the mixture too, where its readers norm
//            for themselves (launch_normed.cuh) and there is no third round
//   out      the mixture and its norm; right behind `sums` in every program, whose values it finds in shared memory
#pragma once
#include "launch_slices.cuh"

// A round of a mix of kParts_ ranks' parts, which leaves kTaps_ taps of a row: what it shares with others is its code.
template <class Round, int kParts_, int kTaps_>
struct LaunchMixRound {
  typedef Round Code;
  static_assert(kParts_ <= 16 && (kParts_ <= 8 || kParts_ == 16), "two batches of parts at most");
  static constexpr int x_vectors(int tokens, int items) { return Round::x_vectors(tokens, items) + Round::kPartVectors * max_of(kParts_ / 8, 1); }
  static constexpr LaunchGeometry geometry(int) {
    LaunchGeometry g = {};
    g.parts = kParts_, g.taps = kTaps_, g.slices = Round::Shape::kSlices, g.slice = Round::Shape::kOwn, g.ahead = Round::kAhead;
    return g;
  }
};

template <class S, int kAhead_>
struct LaunchMixCode {
  typedef S Shape;
  static constexpr int kAhead = kAhead_, kPartVectors = 0;   // vectors of shared memory for each batch of parts
  static constexpr LaunchCounting kCounting = kCountsNothing;
};

template <class S>
struct LaunchMixClosed : LaunchMixCode<S, kAheadBlocks> {
  struct __align__(16) Room { float source[S::kRows][S::kOwn], score[S::kOwn], sums[S::kOwnLeaves][2][8]; };
  static constexpr int x_vectors(int, int) { return sizeof(Room) / 16; }
  template <class Block>
  static K3_DEVICE void consume(Block& block, const ProgramPhase& p, int phase) {
    const Consumers team;   // of this phase alone, as in launch_kda.cuh
    Room& m = *(Room*)block.x();
    block.received(phase);   // of other phases it reads nothing
#pragma unroll 1
    for (int u = 0; u < p.units; ++u) {
      const LaunchSlice<S> slice(block, p, phase, p.tiles[u]);
      keep_closed<S>(slice, m.source, m.score, team);
      for (int i = team.thread(); i < S::kOwnLeaves * 16; i += S::kThreads) (&m.sums[0][0][0])[i] = 0;   // of blocks that are not yet
      team.sync();
      closed_sums<S>(m.source, m.score, slice.a.num_blocks, [&](int leaf, int which, int j, float sum) {
        if (team.lane() == 0) m.sums[leaf][which][j] = sum;
      }, team);
      team.sync();
      if (const int i = team.thread(); i < S::kOwnLeaves * 4)
        block.publish(p, phase, slice.row, slice.own / S::kLeaf * 4 + i, floats_vector(&m.sums[0][0][0] + i * 4), 0, 0, 1);
    }
  }
};

template <class S, bool kLast = false>
struct LaunchMixSums : LaunchMixCode<S, kAheadBlocks | kAheadSum> {
  enum Field { kSums, kJoined, kMixture };
  typedef LaunchMixRoom<S> Room;
  static constexpr int kPartVectors = S::kOwn / 4;
  static constexpr int x_vectors(int, int) { return S::kUnits * sizeof(Room) / 16; }
  // Sums of up to eight parts, [batch][element]; two elements a thread, since eight whole vectors would fill the registers.
  template <class Block>
  static K3_DEVICE void receive_parts(const Block& block, const ProgramPhase& p, int phase, int row, int own, float* sums) {
    constexpr int kBatch = 8, kPairs = S::kOwn / 2;
    const Consumers team;   // of this phase alone, as in launch_kda.cuh
    const int parts = block.geometry(p).parts, batches = parts > kBatch ? 2 : 1;
    const uint2* from = (const uint2*)(block.input(p, 0) + row * block.link(p).in[0].row + own / 4);
#pragma unroll 1
    for (int i = team.thread(); i < batches * kPairs; i += S::kThreads) {
      const uint2* at = from + i / kPairs * kBatch * (S::kN / 2) + i % kPairs;
      uint2 v[kBatch] = {};
      await_all(v, block.a.watch, phase, u32(i), [&](int j) { return j < parts; }, [&](int j) { return at + j * (S::kN / 2); });
      auto sum = [&](u32 uint2::*word) {   // as tree_sum of so many
        float part[kBatch];
        K3_UNROLL
        for (int j = 0; j < kBatch; ++j) part[j] = __uint_as_float(v[j].*word);
        const float two = parts > 1 ? part[0] + part[1] : part[0], four = parts > 2 ? two + (part[2] + part[3]) : two;
        return parts > 4 ? four + tree_sum<4>(part + 4, 1) : four;
      };
      sums[i * 2] = sum(&uint2::x), sums[i * 2 + 1] = sum(&uint2::y);
    }
  }
  // c of this thread's elements where the closed blocks lay, nothing where there are none.
  template <class Block>
  static K3_DEVICE void keep_mixture(const Block& block, const ProgramPhase& p, int phase, const LaunchSlice<S>& slice, Room& m, const Consumers& team) {
    float c[S::kPer] = {}, top = 0, total = 0;
    if constexpr (S::kBlocks > 0)
      if (slice.mix) {
        const float weights = closed_weights<S>(slice.a, m.closed, top, team);
        weighted_closed<S>(slice.a.num_blocks, weights, c, total, [&](int k, int i) { return m.source[k][min_of(team.thread() + i * S::kThreads, S::kOwn - 1)]; });
      }
    K3_UNROLL
    for (int i = 0; i < S::kPer; ++i)
      if (const int e = team.thread() + i * S::kThreads; e < S::kOwn) m.source[1][e] = c[i];
    if (team.thread() == 0) m.top = top, m.total = total;
    if (!kLast || !slice.mix) return;
    const float scalars[4] = {top, total, 0, 0};
    if (slice.own == 0 && team.thread() == 0) block.publish(p, phase, slice.row, S::kLeaves, floats_vector(scalars), 0, kSums, 1);
    K3_UNROLL
    for (int i = 0; i < S::kPer; ++i) leave(block, p, phase, slice, team.thread() + i * S::kThreads, c[i], kMixture, team);
  }
  // Element `e` of the slice, which this thread has; four lanes a vector.
  template <class Block>
  static K3_DEVICE void leave(const Block& block, const ProgramPhase& p, int phase, const LaunchSlice<S>& slice, int e, float v, Field field, const Consumers& team) {
    const uint4 vector = pack_floats(v, team.lane());
    if (e < S::kOwn && e % 4 == 0) block.publish(p, phase, slice.row, (slice.own + e) / 4, vector, 0, field, 1);
  }
  template <class Block>
  static K3_DEVICE void consume(Block& block, const ProgramPhase& p, int phase) {
    const Consumers team;   // of this phase alone, as in launch_kda.cuh
    Room* rooms = (Room*)block.x();
    float* parts = (float*)(rooms + S::kUnits);
#pragma unroll 1
    for (int u = 0; u < p.units; ++u) {
      const LaunchSlice<S> slice(block, p, phase, p.tiles[u]);
      Room& m = rooms[u];
      // Everything is loaded before anything is waited for, and what follows from the closed blocks alone is made before the parts are here.
      float before[S::kPer];
      K3_UNROLL
      for (int i = 0; i < S::kPer; ++i) {
        const int e = team.thread() + i * S::kThreads;
        before[i] = slice.a.hidden && e < S::kOwn ? slice.a.hidden[slice.at() + e] : 0;
      }
      keep_closed<S>(slice, m.source, m.score, team);   // begins when all are finished with the phase before, or the slice
      if constexpr (S::kBlocks > 0)
        if (slice.mix) {
          const uint4* from = block.input(p, 1) + slice.row * block.link(p).in[1].row;
          receive_vectors<1>(team.thread(), S::kThreads, S::kLeaves * 4, block.a.watch, phase, [&](int i) { return from + i; }, [] {},
                             [&](int i, const uint4& vector) { ((uint4*)m.closed)[i] = vector; });
          team.sync();
        }
      keep_mixture(block, p, phase, slice, m, team);
      receive_parts(block, p, phase, slice.row, slice.own, parts);
      team.sync();
      join(Block(block.smem + unknown_zero()), u, before);   // which finds everything anew: what waits for the parts wants the registers
    }
  }
  // Slice `u` of the block, whose parts are here. before: this thread's elements of the prefix sum.
  template <class Block>
  static K3_DEVICE void join(const Block& block, int u, const float (&before)[S::kPer]) {
    const Consumers team = block.team();
    const ProgramPhase p = block.now();
    const int phase = block.phase_now();
    if (u == 0) block.hop(p);
    if (u + 1 == p.units) block.received(phase);
    const LaunchSlice<S> slice(block, p, phase, p.tiles[u]);
    Room* rooms = (Room*)block.x();
    Room& m = rooms[u];
    const float* parts = (const float*)(rooms + S::kUnits);
    K3_UNROLL
    for (int i = 0; i < S::kPer; ++i) {
      const int e = team.thread() + i * S::kThreads;
      float joined = parts[min_of(e, S::kOwn - 1)];
      if (block.geometry(p).parts > 8) joined += parts[S::kOwn + min_of(e, S::kOwn - 1)];
      if (slice.a.hidden) joined += before[i];
      if constexpr (kLast) leave(block, p, phase, slice, e, joined, kJoined, team);
      if (e >= S::kOwn) continue;
      m.source[0][e] = joined;
      keep_prefix(slice.a, slice.at() + e, joined);
    }
    if (block.geometry(p).taps) {
      const LaunchSlice<S> again(block, p, phase, p.tiles[u]);   // not kept meanwhile
      K3_UNROLL
      for (int i = 0; i < S::kPer; ++i)
        if (const int e = team.thread() + i * S::kThreads; e < S::kOwn) again.leave_tap(block.geometry(p), e, m.source[0][e]);
    }
    for (int i = team.thread(); i < S::kOwnLeaves * 4; i += S::kThreads) m.own[i / 4][i % 4] = 0;   // what there is no mixture for
    team.sync();
    prefix_sums<S>(m.source, m.score, slice.mix, [&](int leaf, int which, float sum) {
      if (team.lane() == 0) m.own[leaf][which] = sum;
    }, team);
    team.sync();
    if (const int leaf = team.thread(); leaf < S::kOwnLeaves) block.publish(p, phase, slice.row, slice.own / S::kLeaf + leaf, floats_vector(m.own[leaf]), 0, 0, 1);
  }
};

template <class S>
struct LaunchMixOut : LaunchMixCode<S, kAheadWeight> {
  typedef LaunchMixRoom<S> Room;
  static constexpr int x_vectors(int, int) { return 0; }   // that of the sums
  template <class Block>
  static K3_DEVICE void consume(Block& block, const ProgramPhase& p, int phase) {
    const Consumers team;
    Room* rooms = (Room*)block.x();
#pragma unroll 1
    for (int u = 0; u < p.units; ++u) {
      const LaunchSlice<S> slice(block, p, phase, p.tiles[u]);
      Room& m = rooms[u];
      float weight[S::kPer];
      K3_UNROLL
      for (int i = 0; i < S::kPer; ++i) {
        const int e = team.thread() + i * S::kThreads;
        weight[i] = e < S::kOwn ? bf16_to_float(slice.a.weight[slice.own + e]) : 0;
      }
      const uint4* from = block.input(p, 0) + slice.row * block.link(p).in[0].row;
      receive_vectors<1>(team.thread(), S::kThreads, S::kLeaves, block.a.watch, phase, [&](int i) { return from + i; }, [] {},
                         [&](int i, const uint4& vector) { ((uint4*)m.sums)[i] = vector; });
      team.sync();
      if (u + 1 == p.units) block.received(phase);
      float alpha, beta;
      const float inv = mixed<S>(slice.a, m.sums, slice.mix, m.top, m.total, alpha, beta, team);
      K3_UNROLL
      for (int i = 0; i < S::kPer; ++i) {
        const int e = team.thread() + i * S::kThreads, at = min_of(e, S::kOwn - 1);
        const uint4 vector = pack_vector(normed_value<S>(slice.mix, alpha, beta, m.source[1][at], m.source[0][at], inv, weight[i]), block.me.lane);
        if (e >= S::kOwn) continue;
        block.publish(p, phase, slice.row, (slice.own + e) / 8, vector, e % 8);
        slice.leave_tap(block.geometry(p), e, mixture_value(slice.mix, alpha, beta, m.source[1][e], m.source[0][e]));
      }
    }
  }
};
