// The block that runs all roles of latent attention.
#pragma once
#include "mla_score.cuh"
#include "mla_weigh.cuh"

// Registers a thread where wide groups do not fit an equal share, which is what the block is given at its start: who asks for more waits for ever.
template <int kSets, int kTiles>
struct MlaRegisters {
  static constexpr bool kOneSet = kSets == 1, kWide = kTiles > 4;
  static constexpr int kShare = kOneSet ? 128 : 96, kRest = kOneSet || !kWide ? 64 : 48, kScore = kOneSet ? 128 : 80, kWeigh = kOneSet ? 160 : kWide ? 136 : 128;
  static_assert(kRest + kSets * kScore + 2 * kWeigh <= (3 + kSets) * kShare, "no more than the block has");
};

// S::kThreads threads (By: MlaBlock in mla_core.cuh); any number of blocks, one an SM by its shared memory. `ready` returns when the step's queries and cache
// rows are written. The rows' own tables are inputs of the step and read before it, and so are, with kEarly, cache rows before the position
// of a run's first row: those of earlier steps.
template <class S, bool kEarly = true, class Ready, class By = MlaBlock>
K3_DEVICE void mla_attend(const MlaAttend& a, MlaSmem<S>& m, Ready ready, const By& by = {}) {
  const int warp = by.warp();
  if (warp == 0) {
    mla_plan<S::kHeads>(a.rows, m.work, S::widths(), by.blocks(), by.lane());
    __syncwarp();
    MlaItem first{};   // set on one path only it would keep its registers in all of a single launch
    if (by.number() < mla_items(m.work)) first = mla_item<S::kHeads>(m.work, by.number());
    if (by.lane() == 0) m.first = first;
  }
  if (by.thread() == kWarpSize) {
    for (int i = 0; i < S::kRing; ++i) {
      barrier_init(&m.full[i], 1);
      barrier_init(&m.empty[i], 8 * kWarpArrivals);
    }
    for (int i = 0; i < 2; ++i) {
      barrier_init(&m.weight_full[i], 4 * kWarpArrivals);
      barrier_init(&m.top_full[i], 4 * kWarpArrivals);
      barrier_init(&m.weight_empty[i], 9 * kWarpArrivals);
      barrier_init(&m.item_full[i], 1);
      barrier_init(&m.item_empty[i], (S::kWarps - 1) * kWarpArrivals);
      barrier_init(&m.query_full[i], 2 * kWarpArrivals);
      barrier_init(&m.query_empty[i], 4 * S::kSets * kWarpArrivals);
    }
    for (int i = 0; i < 4; ++i) barrier_init(&m.sum_full[i], kWarpArrivals);
    barrier_fence_init();
  }
  by.sync();
  const bool any = m.first.columns != 0;
  if (warp == 0 && any) {
    MlaCursor c{0, 0};
    mla_copy(a, m, m.first, c, 0, mla_ahead<S, kEarly>(m.work, m.first), by.lane());
  }
  ready();
  if (warp && any) {                                     // nobody waits for the first queries longer than for the first page
    mla_load_queries<S, (S::kColumns + S::kWarps - 2) / (S::kWarps - 1)>(a, m, m.first, 0, warp - 1, S::kWarps - 1, by);
    named_barrier(2, (S::kWarps - 1) * kWarpSize);
  }
  typedef MlaRegisters<S::kSets, S::kTiles> Registers;
  if (warp < 4) {
    if constexpr (S::kMoveRegisters) give_registers<Registers::kRest>();
    if (warp == 0) mla_produce<S, kEarly>(a, m, by);
    else if (warp < 3) mla_prepare<S>(a, m, warp - 1, by);
    else mla_sum<S>(a, m, by.lane());
  } else if (warp < S::kWeighers) {
    if constexpr (S::kMoveRegisters && Registers::kScore < Registers::kShare) give_registers<Registers::kScore>();
    mla_score<S>(m, warp / 4 - 1, warp % 4, by.lane());
  } else {
    if constexpr (S::kMoveRegisters) take_registers<Registers::kWeigh>();
    mla_weigh<S>(a, m, warp - S::kWeighers, not_before_here(by.lane()));   // a lane kept from the start was two registers too many
  }
}
