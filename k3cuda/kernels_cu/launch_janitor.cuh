// The janitor, a warp of each block of the single launch: it clears what phases have left in the exchange, brings the block's program page by page, and
// speaks for whoever waits too long.
#pragma once
#include "launch_args.cuh"
#include "launch_program.cuh"

// One warp. Behind a phase's input it says so; when all blocks have, it clears its slice of what nobody needs any more; when all have done that, what
// lay there may be written again. Phases are in these three states side by side: one behind the other, two counts of all blocks each, they took 4
// microseconds apiece, which at one row is longer than a phase. A place is a phase's, of those with something to clear; places may be kCounts apart.
struct Janitor {
  LaunchCounts* counts;
  const LaunchPeer* peers;
  int rank;
  u64 heard, cleared, cleaned;   // places that it comes to next, since the counts began

  K3_DEVICE u32* heard_count(u64 place) const { return &counts->heard[place % kCounts].count; }
  K3_DEVICE u32* cleaned_count(u64 place) const { return &counts->cleaned[place % kCounts].count; }
  static K3_DEVICE bool is_full(u32 count, u64 place) { return int(count - u32((place / kCounts + 1) * rank_blocks())) >= 0; }

  // Whether all blocks have heard the place that it would clear, and cleared the one that it waits for: two lanes look, at the same time, or one
  // and another for each rank. Bits 0 and 1.
  K3_DEVICE u32 look(bool for_heard, bool for_cleaned) const {
    const int lane = lane_id();
    bool full = false;
    if constexpr (K3_RANKS > 1) {
      if (lane == 0) full = for_heard && is_full(count_seen(heard_count(cleared)), cleared);
      else if (for_cleaned && lane <= K3_RANKS) full = rank_seen(&counts->clean_on[lane - 1]) > cleaned;
      const u32 seen = __ballot_sync(kFullWarp, full);
      __syncwarp();   // behind what every lane has seen
      return (seen & 1) | u32(seen >> 1 == (1u << K3_RANKS) - 1) << 1;
    }
    if (lane == 0 ? for_heard : lane == 1 && for_cleaned) full = is_full(count_seen(lane ? cleaned_count(cleaned) : heard_count(cleared)), lane ? cleaned : cleared);
    return __ballot_sync(kFullWarp, full);
  }
  K3_DEVICE bool may_hear() const { return heard - cleaned < kCounts; }   // who counts in a place again has seen all blocks count there before
  K3_DEVICE void hear() {
    if (lane_id() == 0) count_up(heard_count(heard));
    ++heard;
  }
  // each(f) calls f(slot, vectors) for what is to be cleared.
  template <class Each>
  K3_DEVICE void clear(Each&& each) {
    __syncwarp();
    each([&](uint4* slot, int vectors) {
      const u32 own = rank_block(), blocks = rank_blocks();
      const int end = u32(vectors) * (own + 1) / blocks;
      for (int i = u32(vectors) * own / blocks + lane_id(); i < end; i += kWarpSize) store_exchange(slot + i, {kNotThere, kNotThere, kNotThere, kNotThere});
    });
    __threadfence();
    __syncwarp();
    if constexpr (K3_RANKS == 1) {
      if (lane_id() == 0) count_up(cleaned_count(cleared));
    } else {
      const bool last = lane_id() == 0 && counted(cleaned_count(cleared)) + 1 == u32((cleared / kCounts + 1) * rank_blocks());
      const bool tells = __any_sync(kFullWarp, last);
      __syncwarp();   // behind what the others have cleared
      if (tells && lane_id() < K3_RANKS) raise_to(&peers[lane_id()].counts->clean_on[rank], cleared + 1);
    }
    ++cleared;
  }
};

// Whether nobody reads a page any more: neither the janitor, whose last place is `last`, nor consumers or the producer.
template <class Block>
K3_DEVICE bool is_left(const Block& block, int page, u32 last) {
  typedef typename Block::Shape S;
  if (S::Pages::page(last) == page) return false;
  const u32 at = lane_id() < kConsumers ? ((volatile ConsumerCounts*)(block.smem + S::kCountsAt))[lane_id()].began : block.state.produced[min_of(lane_id() - kConsumers, kProducers - 1)];
  return !__any_sync(kFullWarp, S::Pages::page(at) == page);
}

// Three places in the program: whose input this block has read next, what is cleared next, what is clean next.
template <class Block>
K3_DEVICE void tidy(const Block& block) {
  typedef typename Block::Shape S;
  const LaunchArgs& a = block.a;
  const typename S::Pages& pages = block.pages;
  const u64 before = block.launches() * a.clearings;   // nobody ends before this block has counted
  Janitor janitor{a.counts, (const LaunchPeer*)(block.smem + S::kPeersAt), a.rank, before, before, before};
  struct Place {   // what it comes to is here: consumers have read it, or it has just been brought
    const typename S::Pages& pages;
    u32 at = S::Pages::kFirst;
    int phase = 0;
    K3_DEVICE void turn() {
      if (pages.turns(at) && pages.has_next(at)) at = pages.next(at);
    }
    K3_DEVICE ProgramPhase here() const { return ProgramPhase(pages.words(at)); }
    K3_DEVICE bool clears() const { return here().clear(0) != kNoSlot; }
    K3_DEVICE void go_on() { at = pages.behind(here(), at), ++phase, turn(); }
  } heard{pages}, cleared{pages}, cleaned{pages};
  Spin spin;
  u32 page = 3;   // the next one to bring
  while (cleaned.phase < a.phases) {
    if (a.watch.is_late()) a.watch.fail();
    heard.turn(), cleared.turn(), cleaned.turn();
    if (int(page * S::Pages::kWords) <= a.words && is_left(block, page % 2 ^ 1, cleaned.at)) pages.load(block.own_words(), page % 2 ^ 1, page), ++page;
    const int received = __shfl_sync(kFullWarp, int(block.state.received), 0);
    bool moved = false;
    for (; heard.phase < received && (!heard.clears() || janitor.may_hear()); heard.go_on(), moved = true)
      if (heard.clears()) janitor.hear();
    for (; cleared.phase < heard.phase && !cleared.clears(); cleared.go_on()) moved = true;
    for (; cleaned.phase < cleared.phase && !cleaned.clears(); cleaned.go_on()) moved = true;
    const u32 full = janitor.look(cleared.phase < heard.phase, cleaned.phase < cleared.phase);
    if (full >> 1 & 1) {
      block.stamp(cleaned.phase, kCleared, lane_id() == 1);
      ++janitor.cleaned, cleaned.go_on(), moved = true;
    }
    if (lane_id() == 1) block.state.cleaned = cleaned.phase;   // the lane that has seen it
    if (full & 1) {
      const ProgramPhase p = cleared.here();
      janitor.clear([&](auto&& slice_of) {
#pragma unroll 1
        for (int i = 0; i < kMaxClears && p.clear(i) != kNoSlot; ++i) slice_of(a.exchange + size_t(p.clear(i)) * a.slot_vectors, a.links[p.cleared(i)].vectors);
      });
      cleared.go_on(), moved = true;
    }
    if (moved) spin = {};
    else if (pause_ns(64), lane_id() == 0)
      spin.turn(a.watch, cleaned.phase < cleared.phase ? kWaitCleaned : cleared.phase < heard.phase ? kWaitHeard : kWaitReceived,
                min_of(cleaned.phase, min_of(cleared.phase, heard.phase)), 0);
  }
  if (!kRanksAway && lane_id() == 0) ended_up(&a.counts->ended);
  for (; *(volatile u32*)&block.state.ended < kJanitor; pause_ns(256))   // whoever still waits may have to be spoken for
    if (a.watch.is_late()) a.watch.fail();
}
