// The weight stream of a persistent block: producer warps fill a ring of shared memory by bulk copies in the order of the block's
// program, consumer warps take single copies out of it. What is in flight is capped: loads of a hand-over would stand behind the weights
// otherwise. Every wait is bounded: who waited for what is written to host memory, then a trap
// ends the launch. Who looks again and again takes issue slots from the warps that multiply, so long waits sleep (K3_POLL, which
// launch_source.py defines, is 1: they do not).
#pragma once
#include "exchange.cuh"
#include "row_shape.cuh"

constexpr int kConsumers = 16;                                   // warps; behind them the producers' and the janitor's
constexpr u32 kTakePause = 300;                                   // nanoseconds between two looks at a copy that is not issued, a microsecond before it lands
constexpr int kAllConsumers = 15;                                 // the barrier where they all meet; groups of them have 1 to 8
constexpr int kProducers = 3, kJanitor = kConsumers + kProducers, kLaunchThreads = (kJanitor + 1) * kWarpSize;

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

// A wait that took too long, in shared memory: LaunchWait (0: none did), warp, phase, detail. One of them, if there are several.
struct __align__(16) LateWait { u32 what, warp, phase, detail; };

// Where a wait that takes too long is written: {LaunchWait, block, warp, phase, detail}, the first one only. `trouble` is the host's memory,
// which outlives the trap; `failed` is the device's, zero until then. Who waits writes `late`, its block's; the block's janitor does the rest, since
// all of it at each wait would be a tenth of the code.
struct Watch {
  u32 *failed, *trouble;
  LateWait* late;
  u32 limit, meet;   // of any wait, and of that of ranks in launches of their own for one another when they begin, in spin_clock's units
  K3_DEVICE bool is_late() const { return *(volatile u32*)&late->what != 0; }
  K3_DEVICE void fail() const {
    if (atomicCAS(failed, 0u, 1u) == 0u) {
      volatile u32* t = trouble;
      t[1] = blockIdx.x, t[2] = late->warp, t[3] = late->phase, t[4] = late->detail;
#ifndef K3_HOST_SHIM
      __threadfence_system();   // the host may look at any time, and takes t[0] for a whole record
#endif
      t[0] = late->what;
#ifndef K3_HOST_SHIM
      __threadfence_system();
#endif
    }
    // The one who writes needs its time: everybody else waits for it.
#ifdef K3_HOST_SHIM
    while (*(volatile u32*)trouble == 0) {}
    shim_trap();
#else
    for (u64 start = device_ns(); device_ns() - start < 1000000;) {}
    asm volatile("trap;");
#endif
  }
};

// Nanoseconds of a clock that also goes on under the shim.
K3_DEVICE u64 clock_ns() {
#ifdef K3_HOST_SHIM
  return shim_clock_ns();
#else
  return device_ns();
#endif
}
// The clock in units of 1,024 ns, which turns over after an hour.
K3_DEVICE u32 spin_clock() { return u32(clock_ns() >> 10); }

// One wait: turn() after every look that found nothing.
struct Spin {
  u32 start = 0, turns = 0;
  // times: of the limit. Who waits because of others waits longer (K3_PRODUCER_LIMITS, which launch_source.py defines), so that these speak first.
  K3_DEVICE void turn(const Watch& w, u32 what, u32 phase, u32 detail, u32 times = 1) {
#ifdef K3_HOST_SHIM
    shim_yield();
#endif
    if (++turns % 1024) return;
    const u32 now = spin_clock();
    if (turns == 1024) start = now;
    else if (now - start > times * w.limit) *w.late = {what, u32(Me().warp), phase, detail};
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
  static thread_local u32 count[kConsumers + 1], round[kConsumers + 1];
  const u32 now = round[id];
  shim::cur->b->progress = true;
  if (++count[id] == u32(threads)) count[id] = 0, ++round[id];
  else shim_wait(round[id], now);
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
K3_DEVICE u32 own_block() {   // asked for where it is used, as in Me
#ifdef K3_HOST_SHIM
  return blockIdx.x;
#else
  u32 n;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(n));
  return n;
#endif
}
K3_DEVICE u32 rank_block() { return K3_RANKS_HERE > 1 ? own_block() % rank_blocks() : own_block(); }
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

// Of a phase in a block: it begins, its input is here, its units are done and handed over, its slot was clean; what it cleared is clean everywhere; the producer
// came to it, issued its first copy and its last; its last product is done, before sums and stores; and the bytes that were copied, which are no time.
// launch_source.py has these names.
enum LaunchStamp { kBegins, kInputHere, kUnitsDone, kSlotClean, kCleared, kProduces, kFirstCopy, kLastCopy, kProductsDone, kCopied, kStamps };
// Where they go: [block][phase from `first` on, `phases` of them][kStamps], by the multiprocessor's own clock, which costs less to ask, but for the bytes; 0: it did
// not happen. clocks: [block][begin, end of the launch][nanoseconds, that clock], from which the host has all of them in nanoseconds. issued: [block][kIssueBins] bytes of these
// phases whose copies into the ring were issued in each kIssueCycles of that clock since the launch began; the last has all that came later.
constexpr int kIssueBins = 32768, kIssueCycles = 1024;   // 17 ms of an H200; launch_source.py has them too
struct LaunchStamps {
  u64 *words, *clocks;
  u32* issued;
  int first, phases;
};
K3_DEVICE u64 own_clock() {
#ifdef K3_HOST_SHIM
  return shim_clock_ns();
#else
  u64 t;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(t) :: "memory");
  return t;
#endif
}

// What the warps of a block tell each other, and what they know of the step's rows.
struct LaunchState {
  volatile u32 received;   // phases whose input this block has read
  volatile u32 cleaned;    // phases whose used-up slots are clean everywhere
  volatile u32 chosen;     // choices of experts that this block has made
  volatile u32 produced[kProducers];   // where in shared memory the words of each producer's phase lie
  u32 ended;               // warps that have nothing to wait for any more, but the janitor
  LateWait late;
#if K3_STAMPED
  LaunchStamps stamps;
  u64 began;               // by own_clock
#endif
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
