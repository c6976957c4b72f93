// What a block of the single launch has to do with other ranks: where they have what it makes, and how launches that ranks have of their own begin and end.
#pragma once
#include "launch_args.cuh"

#if defined(K3_LINK_KINDS) && defined(K3_HOST_SHIM)
extern "C" { inline u32 k3_hops[32]; }   // [kind]: how often a block went on waiting
#endif

template <class S>
struct LaunchRanks {
  const LaunchArgs& a;
  u8* smem;

  // All threads, before anyone asks for a peer.
  K3_DEVICE void find_peers() const {
    if constexpr (K3_RANKS > 1)
      if (const int i = Me().thread(); i < K3_RANKS) ((LaunchPeer*)(smem + S::kPeersAt))[i] = a.peers[(a.rank + i) % K3_RANKS];
  }
  // Number `i` of the ranks from this one on: each begins with itself, and then with another neighbour.
  K3_DEVICE const LaunchPeer& peer(int i) const { return ((const LaunchPeer*)(smem + S::kPeersAt))[i]; }
  // Where it has row `row` of what a phase makes.
  K3_DEVICE uint4* made(const ProgramPhase& p, int i, int row) const { return peer(i).exchange + size_t(p.out()) * a.slot_vectors + row * a.links[p.kind].row; }
  // All consumers, where what a phase reads of other ranks, or looped back of itself in their place, is here: in the first phase that reads something of
  // a collective a benchmark's slow link goes on waiting (K3_LINK_KINDS, K3_LINK_CYCLES; launch_source.py defines both, or neither).
  K3_DEVICE void hop(const ProgramPhase& p) const {
#ifdef K3_LINK_KINDS
    if (!(K3_LINK_KINDS >> p.kind & 1)) return;
#ifdef K3_HOST_SHIM
    if (Me().thread() == 0) atomicAdd(&k3_hops[p.kind], 1u);
    for (int turns = 0; turns < K3_LINK_CYCLES; ++turns) shim_yield();
#else
    for (long long start = clock64(); clock64() - start < K3_LINK_CYCLES;) {}
#endif
#endif
  }
  // As LaunchBlock's publish, by one thread: of a row that has a part for each rank.
  K3_DEVICE void scatter(const ProgramPhase& p, int phase, int row, int column, const uint4& v, int field) const {
    const LaunchLink& to = a.links[p.kind];
    const LaunchField& f = to.out[field];
    if (column >= f.width) return;
    if (a.record) a.record[size_t(phase) * a.record_vectors + row * to.record_row + f.own + column] = v;
    const int part = f.width / K3_RANKS;
    store_exchange(made(p, (column / part + K3_RANKS - a.rank) % K3_RANKS, row) + f.at + column % part, v);
  }

  // Launches that have ended, until a block of this one does.
  K3_DEVICE u64 launches() const { return ended_seen(&a.counts->ended) / rank_blocks(); }
  // All threads, before the first phase: no rank is a launch behind.
  K3_DEVICE void enter() const {
    if constexpr (kRanksAway) {
      if (Me().warp == 0) meet(2 * launches() + 1, rank_block() == 0, a.watch.meet, 0);
      __syncthreads();
    }
  }
  // All threads, behind the last phase: the last block of a rank waits for the others, whose results have come then.
  K3_DEVICE void leave() const {
    __syncthreads();
    if (Me().warp) return;
    const u64 before = Me().lane ? 0 : ended_counted(&a.counts->ended), launch = before / rank_blocks();
    const bool last = __any_sync(kFullWarp, Me().lane == 0 && before + 1 == (launch + 1) * rank_blocks());
    __syncwarp();   // behind what the other blocks have done
    if (last) meet(2 * __shfl_sync(kFullWarp, launch, 0) + 2, true, a.watch.limit, a.phases - 1);
  }
  // A warp, a lane a rank, when no janitor is there to speak for it: until all have come to a meeting, to which this one comes where it `tells`.
  K3_DEVICE void meet(u64 meeting, bool tells, u32 limit, int phase) const {
    if (Me().lane < K3_RANKS) {
      if (tells) raise_to(&peer(Me().lane).counts->met_by[a.rank], meeting);
      const u32 start = spin_clock();
      while (rank_seen(&a.counts->met_by[Me().lane]) < meeting) {
        pause_ns(64);
        if (spin_clock() - start <= limit) continue;
        *a.watch.late = {kWaitRank, 0, u32(phase), u32(Me().lane)};
        a.watch.fail();
      }
    }
    __syncwarp();
  }
};
