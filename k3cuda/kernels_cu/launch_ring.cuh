// The weight stream of a persistent block: one producer thread fills a ring of shared memory by bulk copies in the order of the block's
// program, consumer warps take single copies out of it. What is in flight is capped: loads of a hand-over would stand behind the weights
// otherwise. Every wait is bounded: who waited for what is written to host memory, then a trap
// ends the launch. Who looks again and again takes issue slots from the warps that multiply, so long waits sleep (K3_POLL, which
// launch_source.py defines, is 1: they do not).
#pragma once
#include "exchange.cuh"
#include "row_shape.cuh"

constexpr int kConsumers = 16;                                   // warps; behind them the producer's and the janitor's
constexpr u32 kTakePause = 300;                                   // nanoseconds between two looks at a copy that is not issued, a microsecond before it lands
constexpr int kAllConsumers = 15;                                 // the barrier where they all meet; groups of them have 1 to 8
constexpr int kProducer = kConsumers, kJanitor = kConsumers + 1, kLaunchThreads = (kConsumers + 2) * kWarpSize;

// What a wait waits for. `detail` says which copy, vector, round or turn, but is 0 where all registers are taken and a number kept for it would
// spill: kWaitClean, and kWaitVector of LaunchAdd.
enum LaunchWait { kWaitWeights = 1, kWaitRoom, kWaitVector, kWaitSums, kWaitHeard, kWaitCleaned, kWaitClean, kWaitReceived, kWaitChoice, kWaitLeafSums, kWaitProgram,
                  kWaitRank };

// Which thread of the block this is, unknown to the compiler: what follows from it for one kind of phase is not kept
// through all others.
struct Me {
  int warp, lane;
  K3_DEVICE Me() {
#ifdef K3_HOST_SHIM
    const u32 thread = threadIdx.x;
#else
    u32 thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
#endif
    warp = thread / kWarpSize, lane = thread % kWarpSize;
  }
  K3_DEVICE int thread() const { return warp * kWarpSize + lane; }
};

// Where a wait that takes too long is written: {LaunchWait, block, warp, phase, detail}, the first one only. `trouble` is the host's memory,
// which outlives the trap; `failed` is the device's, zero until then.
struct Watch {
  u32 *failed, *trouble;
  u64 limit_ns;
  K3_DEVICE void fail(int what, int phase, u32 detail) const {
    if (atomicCAS(failed, 0u, u32(what)) == 0u) {
      volatile u32* t = trouble;
      t[0] = what, t[1] = blockIdx.x, t[2] = Me().warp, t[3] = phase, t[4] = detail;
#ifndef K3_HOST_SHIM
      __threadfence_system();
#endif
    }
#ifdef K3_HOST_SHIM
    shim_trap();
#else
    // The one who writes needs its time: everybody else waits for it.
    for (u64 start = device_ns(); device_ns() - start < 1000000;) {}
    asm volatile("trap;");
#endif
  }
};

K3_DEVICE u64 spin_ns() {
#ifdef K3_HOST_SHIM
  return shim_clock_ns();
#else
  return device_ns();
#endif
}

// One wait: turn() after every look that found nothing.
struct Spin {
  u64 start = 0;
  u32 turns = 0;
  K3_DEVICE void turn(const Watch& w, int what, int phase, u32 detail) {
#ifdef K3_HOST_SHIM
    shim_yield();
#endif
    if (++turns % 1024) return;
    u64 now = spin_ns();
    if (!start) start = now;
    else if (now - start > w.limit_ns) w.fail(what, phase, detail);
  }
};

#ifdef K3_HOST_SHIM
inline bool barrier_try(u64* bar, u32 parity) { return ((volatile HostBarrier*)bar)->phase != parity; }
inline bool barrier_test(u64* bar, u32 parity) { return barrier_try(bar, parity); }
inline void barrier_arrive_times(u64* bar, u32 times) { while (times--) barrier_arrive(bar); }
inline void bulk_prefetch(const void*, u32) {}
inline void fence_slot() {}
inline int first_lane(u32 mask) { return __builtin_ffs(mask) - 1; }
inline void pause_ns(u32 ns) {
  for (; ns >= 32; ns -= 32) shim_yield();
}
// Some warps of the block meet; all fibers of a block run on one thread.
inline void warps_sync(int id, int threads) {
  static thread_local int count[kConsumers + 1], round[kConsumers + 1];
  int now = round[id];
  shim::cur->b->progress = true;
  if (++count[id] == threads) count[id] = 0, ++round[id];
  else
    while (round[id] == now) shim_yield();
  shim::cur->b->progress = true;
}
#else
#define K3_IS_OVER(NAME, WAIT)                                                                                    \
  K3_DEVICE bool NAME(u64* bar, u32 parity) {                                                                     \
    u32 done;                                                                                                     \
    asm volatile("{\n.reg .pred p;\nmbarrier." WAIT ".b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"                 \
                 : "=r"(done) : "r"(shared_address(bar)), "r"(parity) : "memory");                                \
    return done;                                                                                                  \
  }
// Whether a barrier's phase is over. The first may sleep a while, the second only looks, the third sees what other blocks of the cluster have sent.
K3_IS_OVER(barrier_try, "try_wait.parity.shared")
K3_IS_OVER(barrier_test, "test_wait.parity.shared")
K3_IS_OVER(inbox_try, "try_wait.parity.acquire.cluster.shared::cta")
#undef K3_IS_OVER
K3_DEVICE void barrier_arrive_times(u64* bar, u32 times) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0], %1;" ::"r"(shared_address(bar)), "r"(times) : "memory");
}
K3_DEVICE int first_lane(u32 mask) { return __ffs(mask) - 1; }   // -1: none
K3_DEVICE void bulk_prefetch(const void* p, u32 bytes) { asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(bytes) : "memory"); }
// Behind a thread's own stores to a slot: bulk copies into it come later.
K3_DEVICE void fence_slot() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
K3_DEVICE void pause_ns(u32 ns) { __nanosleep(ns); }
K3_DEVICE void warps_sync(int id, int threads) {
  __syncwarp();
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
#endif

// Which block of its cluster this is, unknown to the compiler as in Me.
K3_DEVICE int my_cluster_rank() {
#ifdef K3_HOST_SHIM
  return cluster_rank();
#else
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
#endif
}

// Zero, unknown to the compiler. Added to an address in shared memory: the pointer itself would no longer be known to point there.
K3_DEVICE u32 unknown_zero() {
  u32 zero = 0;
#ifndef K3_HOST_SHIM
  asm volatile("" : "+r"(zero));
#endif
  return zero;
}

// A launch may have several ranks (K3_RANKS_HERE, which launch_source.py defines), groups of as many blocks behind one another. Blocks of this one's
// rank, and this block's number in it.
K3_DEVICE u32 rank_blocks() { return gridDim.x / K3_RANKS_HERE; }
K3_DEVICE u32 rank_block() { return K3_RANKS_HERE > 1 ? blockIdx.x % rank_blocks() : blockIdx.x; }
// The first, asked for where it is used: else it is kept through all of the launch.
K3_DEVICE int blocks_of_rank() {
#ifdef K3_HOST_SHIM
  return int(rank_blocks());
#else
  int n;
  asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(n));
  return n / K3_RANKS_HERE;
#endif
}

constexpr int kMaxRows = 8;   // of a launch

// What the warps of a block tell each other, and what they know of the step's rows.
struct LaunchState {
  volatile u32 received;   // phases whose input this block has read
  volatile u32 cleaned;    // phases whose used-up slots are clean everywhere
  volatile u32 chosen;     // choices of experts that this block has made
  volatile u32 produced;   // where in shared memory the words of the producer's phase lie
  int live;                // rows that choose experts: those behind them are padding
  int place[kMaxRows];     // of a row's among those whose logits are wanted; -1: they are not
};

template <int kSlots_, int kSlotBytes_>
struct LaunchRing {
  static constexpr int kSlots = kSlots_, kSlotBytes = kSlotBytes_, kBytes = kSlots * kSlotBytes, kBarrierBytes = 2 * kSlots * 8 + (kSlots + 1) / 2 * 8;
  u8* slots;
  u64 *full, *empty;
  volatile u32* issued;   // of every slot the copy that it was given last, plus 1

  K3_DEVICE LaunchRing(u8* memory, u64* barriers) : slots(memory), full(barriers), empty(barriers + kSlots), issued((volatile u32*)(barriers + 2 * kSlots)) {}
  K3_DEVICE void init() {   // one thread
    for (int i = 0; i < kSlots; ++i) barrier_init(full + i, 1), barrier_init(empty + i, kConsumers), issued[i] = 0;
  }
  // Copy `n` of the block's program, counted from the launch's first. Before it is issued the slot may stand two turns back, where its
  // barrier looks as if the copy were there.
  K3_DEVICE const u8* take(u32 n, const Watch& watch, int phase) const {
    const u32 slot = n % kSlots, parity = n / kSlots & 1;
    for (Spin spin; issued[slot] != n + 1 || !barrier_try(full + slot, parity); spin.turn(watch, kWaitWeights, phase, n))
      if (!K3_POLL && issued[slot] != n + 1) pause_ns(kTakePause);
    return slots + slot * kSlotBytes;
  }
  // A whole warp; shares of the warps that take a copy add up to kConsumers.
  K3_DEVICE void give(u32 n, u32 share, const Me& me) const {
    __syncwarp();
    if (me.lane == 0) barrier_arrive_times(empty + n % kSlots, share);
  }
};

// The producer's end, one warp. A lane a copy: a single thread would take as long to issue one as the memory to bring it. What it does for a copy sets
// the pace where the L2 has the bytes, so there is little of it: where the next copies lie is worked out while these wait.
template <class Ring>
struct LaunchProducer {
  // Lanes go as they can, none more than kLanes ahead. What a lane looks back to must not have left its slot by then: its barrier would look as
  // if it had never landed.
  static constexpr int kLanes = min_of(8, Ring::kSlots / 2), kMostAhead = Ring::kSlots - kLanes;
  static constexpr u32 kIdleTurns = 2;   // looks at a full ring for each copy that is brought into the L2: about what the memory gives a block
  Ring& ring;
  const Watch& watch;
  u32 window;                   // bytes in flight at most
  int prefetch;                 // copies of the same phase that are brought into the L2 while the ring is full, at most
  u32 issued = 0, choices = 0;  // copies; choices of experts that it has come by

  // A copy whose barrier must have passed before another is issued; none if the count has not come so far.
  struct Before {
    int at;
    u32 parity;
    K3_DEVICE bool passed(u64* barriers) const { return at < 0 || barrier_test(barriers + at, parity); }
  };
  static K3_DEVICE Before before(u32 n) { return {int(n) < 0 ? -1 : int(n % Ring::kSlots), n / Ring::kSlots & 1}; }
  // Until the first lane with a copy to issue may go on: until a barrier of its passes, counted from the first full one.
  K3_DEVICE void sleep(bool mine, int barrier, u32 parity) const {
    const int first = first_lane(__ballot_sync(kFullWarp, mine));
    if (first < 0) return;
    barrier = __shfl_sync(kFullWarp, barrier, first), parity = __shfl_sync(kFullWarp, parity, first);
    barrier_try(ring.full + barrier, parity);
  }

  // Copies 0 to count - 1 of a phase, most of them of `bytes`: a slot gets pieces(i) copies of `each` bytes, number j from from(i, j).
  template <class Pieces, class From>
  K3_DEVICE void copies(int count, u32 bytes, u32 each, int phase, Pieces&& pieces, From&& from) {
    const u32 most = max_of(1, min_of(kMostAhead, window / bytes));
    int fetched = 0;
    u32 idle = 0;
    const int end = lane_id() < kLanes ? count : 0;
    int next = lane_id();
    const u8* next_source = next < end ? from(next, 0) : nullptr;
    for (int first = 0; first < count; first += kLanes) {
      const int i = next, parts = i < end ? pieces(i) : 0;
      const u8* source = next_source;
      bool mine = i < end;
      const u32 n = issued + lane_id(), slot = n % Ring::kSlots;
      const Before room = before(n - Ring::kSlots), landed = before(n - most);
      next += kLanes;
      if (next < end) next_source = from(next, 0);
      Spin spin;
      while (__any_sync(kFullWarp, mine)) {
        const bool may = mine && landed.passed(ring.full), fits = may && room.passed(ring.empty);
        if (fits) {
          barrier_expect(ring.full + slot, parts * each);
          for (int j = 0; j < parts; ++j) bulk_copy(ring.slots + slot * Ring::kSlotBytes + j * each, j ? from(i, j) : source, each, ring.full + slot);
          ring.issued[slot] = n + 1;
          mine = false;
        } else if (mine) spin.turn(watch, kWaitRoom, phase, n);
        if (!K3_POLL && !prefetch && !__any_sync(kFullWarp, fits)) sleep(mine, may ? Ring::kSlots + room.at : landed.at, may ? room.parity : landed.parity);
        if (prefetch && __any_sync(kFullWarp, may && !fits) && ++idle % kIdleTurns == 0) {
          fetched = max_of(fetched, first + kLanes);
          if (fetched < min_of(count, first + kLanes + prefetch)) {
            if (lane_id() < pieces(fetched)) bulk_prefetch(from(fetched, lane_id()), each);
            ++fetched;
          }
        }
      }
      issued += min_of(kLanes, count - first);
    }
  }
};
