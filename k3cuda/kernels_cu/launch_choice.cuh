// Which experts a layer of the single launch reads: every block chooses for itself, from logits that all blocks read, by route_core.cuh. Nobody has
// to publish a choice, and each block's producer enters its experts as soon as the block has chosen.
#pragma once
#include "expert_core.cuh"
#include "launch_fields.cuh"
#include "route_core.cuh"

// What a step chose in a layer, and for the sum of a row's experts: of its rank-th expert the list position is order[row * top_k + rank], the
// weight factor[row * top_k + rank].
template <int kMaxItems>
struct LaunchChoice {
  ExpertList<kMaxItems> list;
  float weight[kMaxItems];   // of an item
  float factor[kMaxItems];
  u16 place[kMaxItems], order[kMaxItems];
};

// A choice whose list and weights stand: the producer may go on, and the order of each row's experts follows. All consumers, in step before and after.
template <class Block>
K3_DEVICE void finish_choice(Block& block) {
  constexpr int kTopK = Block::Shape::kTopK;
  auto& choice = block.choice();
  if (block.me.thread() == 0) block.state.chosen = block.state.chosen + 1;
#pragma unroll 1
  for (int i = block.me.thread(); i < choice.list.items; i += Consumers::kThreads) choice.place[choice.list.item[i]] = u16(i);
  block.team().sync();
#pragma unroll 1
  for (int i = choice.list.items + block.me.thread(); i < block.a.rows * kTopK; i += Consumers::kThreads) choice.order[i] = 0, choice.factor[i] = 0;   // of padding
#pragma unroll 1
  for (int i = block.me.thread(); i < choice.list.items; i += Consumers::kThreads) {   // positions rise with the expert
    const int row = i / kTopK;
    int rank = 0;
    K3_UNROLL
    for (int other = 0; other < kTopK; ++other) rank += choice.place[row * kTopK + other] < choice.place[i];
    choice.order[row * kTopK + rank] = choice.place[i];
    choice.factor[row * kTopK + rank] = choice.weight[i];
  }
  block.team().sync();
}

// A choice made beforehand: a LaunchChoice at the phase's weights. It waits for the logits as a choice of its own would.
//   kVectors  of a row that it reads
template <int kVectors>
struct LaunchForced {
  static constexpr LaunchCounting kCounting = kCountsNothing;
  static constexpr int x_vectors(int, int) { return 0; }
  template <class Block, class Producer>
  static K3_DEVICE void produce(const Block&, Producer& producer, const ProgramPhase&, const u8*, int) { ++producer.choices; }
  template <class Block>
  static K3_DEVICE void consume(Block& block, const ProgramPhase& p, int phase) {
    block.template receive<kVectors * Block::Shape::kTokens>(p, phase, block.a.rows, kVectors, 0, [](int, int, const uint4&) {});
    block.received(phase);
    auto& choice = block.choice();
    const u32* from = (const u32*)block.a.weights[phase];
#pragma unroll 1
    for (int i = block.me.thread(); i < int(sizeof(choice) / 4); i += Consumers::kThreads) ((u32*)&choice)[i] = ((volatile const u32*)from)[i];
    block.team().sync();
    finish_choice(block);
  }
};

// The choice by the router's logits, F32. Its weights: the router's bias. A team of warps a row, all rows at the same time.
template <int kExperts, int kTopK>
struct LaunchRoute {
  static constexpr int team_warps(int tokens) { return min_of(4, kConsumers / tokens); }
  static constexpr LaunchCounting kCounting = kCountsNothing;
  template <int kTokens> using Row = RouteShape<kExperts, kTopK, team_warps(kTokens) * kWarpSize, true>;
  template <int kTokens> using List = ListShape<kExperts, kTopK, kTokens, Consumers::kThreads, kEntryTokens>;
  template <int kTokens> struct Room {
    union {
      RouteSmem<Row<kTokens>> rows[kTokens];
      ListSmem<List<kTokens>> list;
    };
    int ids[kTokens * kTopK];
  };
  static constexpr int x_vectors(int tokens, int) {
    return (tokens == 1 ? int(sizeof(Room<1>)) : tokens == 2 ? int(sizeof(Room<2>)) : tokens == 4 ? int(sizeof(Room<4>)) : int(sizeof(Room<8>))) / 16 + 1;
  }
  static_assert(kExperts % 4 == 0, "logits come in vectors");

  template <class Block, class Producer>
  static K3_DEVICE void produce(const Block&, Producer& producer, const ProgramPhase&, const u8*, int) { ++producer.choices; }
  template <class Block>
  static K3_DEVICE void consume(Block& block, const ProgramPhase& p, int phase) {
    typedef typename Block::Shape S;
    static_assert(S::kTopK == kTopK, "a row has so many experts everywhere");
    constexpr int kTokens = S::kTokens;
    auto& room = *(Room<kTokens>*)block.x();
    auto& choice = block.choice();
    const WarpTeam<team_warps(kTokens)> team{block.me};
    const int row = team.number(), first = min_of(row, kTokens - 1) * kTopK;
    auto& own = room.rows[min_of(row, kTokens - 1)];
    block.team().sync();   // all are finished with the phase before
    if (row < block.a.rows) {   // the bias, where keys will be, while logits are on their way
      const float* bias = (const float*)block.a.weights[phase];
#pragma unroll 1
      for (int i = team.thread(); i < kExperts / 4; i += Row<kTokens>::kThreads) copy_async<16>(own.keys + i * 4, bias + i * 4);
    }
    auto ready = [&] {
      block.template receive<kExperts / 4 * kTokens>(p, phase, block.a.rows, kExperts / 4, 0, [&](int row, int k, const uint4& v) { ((uint4*)room.rows[row].scores)[k] = v; });
      copy_wait();
      block.team().sync();
      block.hop(p);
      block.received(phase);
    };
    route_row<Row<kTokens>>(own.scores, (const float*)own.keys, row < block.a.rows, block.a.routed_scale, room.ids + first, choice.weight + first, own, ready, team);
    block.team().sync();
    if (K3_PROBED && block.a.record && rank_block() == 0) {   // ids, then weights, of every row
      u32* to = (u32*)(block.a.record + size_t(phase) * block.a.record_vectors);
      const int i = Consumers().thread(), row = i / kTopK, place = i % kTopK;
      if (i < block.a.rows * kTopK) to[row * 2 * kTopK + place] = room.ids[i], to[(row * 2 + 1) * kTopK + place] = __float_as_uint(choice.weight[i]);
    }
    // A team anew: what it is made of is kept in registers otherwise.
    const ListOut to{&choice.list.entries, &choice.list.items, choice.list.entry, choice.list.item};
    list_experts<List<kTokens>>(room.ids, nullptr, block.state.live, to, room.list, [] {}, Consumers());
    finish_choice(block);
  }
};
