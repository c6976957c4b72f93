// A collective between processes as one kernel: each rank stores its vectors into memory of every other that it has mapped, and takes
// what they stored into its own. A vector is its own flag: it has arrived when no word of it is kEmpty, so neither order nor width of the stores
// on their way matters. Nothing is added, and nothing but that word is changed: it is a NaN, as F32 and as two BF16, that no arithmetic of ours makes, and
// goes out as the NaN of the other sign.
//
// Who has taken a vector writes kEmpty in its place: nothing is reset between exchanges. The next exchange has the other turn's vectors; when
// it has ended on a rank, everyone's kernel of the one before has, and what that one cleared can be written again.
#pragma once
#include "rank_moves.cuh"

constexpr u32 kEmptyInstead = kEmpty & 0x7fffffffu;
constexpr int kBatch = 4;   // vectors that a thread waits for at a time

// A rank's own, zero before the first exchange.
struct PeerState {
  u32 turn, ended, failed, pad;   // `ended`: blocks of this launch
};

// One exchange of a group of ranks, in all of which its moves are the same. Who waits too long says so in `trouble`, in the host's memory:
// {1 + what, place of the rank that did not send}; from then on this rank's exchanges do nothing. All that is sent in an exchange lies in a turn of its own.
struct Exchange {
  RankMove move[kMostMoves];
  uint4* inbox[kMostRanks];   // of each rank of the group, as this one has mapped it: [turn][sender][capacity]
  PeerState* state;
  u32* trouble;
  u64 limit_ns;
  int moves, place, capacity, what;   // capacity: vectors that a rank can send another; place: of this rank in the group
};

#ifdef K3_HOST_SHIM
inline uint4 load_peer(const uint4* p) {
  uint4 v;
  for (int i = 0; i < 4; ++i) (&v.x)[i] = __atomic_load_n((const u32*)p + i, __ATOMIC_ACQUIRE);
  return v;
}
inline void store_peer(uint4* p, const uint4& v) {
  for (int i = 0; i < 4; ++i) __atomic_store_n((u32*)p + i, (&v.x)[i], __ATOMIC_RELEASE);
}
inline u32 load_own(const u32* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
inline u64 exchange_ns() { return shim_clock_ns(); }
inline void fence_host() {}
#else
K3_DEVICE uint4 load_peer(const uint4* p) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
K3_DEVICE void store_peer(uint4* p, const uint4& v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
K3_DEVICE u32 load_own(const u32* p) {
  u32 v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
K3_DEVICE u64 exchange_ns() { return device_ns(); }
K3_DEVICE void fence_host() { __threadfence_system(); }
#endif

K3_DEVICE bool has_arrived(const uint4& v) { return v.x != kEmpty && v.y != kEmpty && v.z != kEmpty && v.w != kEmpty; }
K3_DEVICE uint4 without_empty(uint4 v) {
  if (v.x == kEmpty) v.x = kEmptyInstead;
  if (v.y == kEmpty) v.y = kEmptyInstead;
  if (v.z == kEmpty) v.z = kEmptyInstead;
  if (v.w == kEmpty) v.w = kEmptyInstead;
  return v;
}

// To be asked after every look that found nothing.
struct PeerWait {
  u64 start = 0;
  u32 looks = 0;
  K3_DEVICE bool is_over(const Exchange& e, int sender) {
#ifdef K3_HOST_SHIM
    shim_yield();
#endif
    if (++looks % 1024) return false;
    const u64 now = exchange_ns();
    if (!start) start = now;
    if (load_own(&e.state->failed)) return true;
    if (now - start < e.limit_ns) return false;
    if (atomicCAS(&e.state->failed, 0u, 1u) == 0u) {
      volatile u32* t = e.trouble;
      t[1] = sender;
      fence_host();
      t[0] = 1 + e.what;
      fence_host();
    }
    return true;
  }
};

// Vector i is number i % part of what the rank i / part places further sends or gets: every rank begins with another neighbour, and what thread i
// of a grid waits for thread i has sent elsewhere.
K3_DEVICE void send_move(const Exchange& e, const RankMove& m, size_t turn, int first) {
  const int part = m.rank_vectors(), all = m.ranks * part;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < all; i += gridDim.x * blockDim.x) {
    const int receiver = (e.place + i / part) % m.ranks, at = i % part;
    const uint4 v = without_empty(m.load(receiver, at));
    if (receiver == e.place) m.store(e.place, at, v);
    else store_peer(e.inbox[receiver] + (turn * m.ranks + e.place) * e.capacity + first + at, v);
  }
}

// False where a rank did not send in time.
K3_DEVICE bool receive_move(const Exchange& e, const RankMove& m, size_t turn, int first) {
  const int part = m.rank_vectors(), all = m.ranks * part, stride = gridDim.x * blockDim.x;
  uint4* const mine = e.inbox[e.place] + turn * m.ranks * e.capacity + first;
  const auto is_sent = [&](int i) { return i >= part && i < all; };   // the first part is this rank's own
  const auto sender = [&](int i) { return (e.place + m.ranks - i / part) % m.ranks; };
  const auto inbox = [&](int i) { return mine + size_t(sender(i)) * e.capacity + i % part; };
  for (int begin = blockIdx.x * blockDim.x + threadIdx.x; begin < all; begin += kBatch * stride) {
    uint4 v[kBatch] = {};
    K3_UNROLL
    for (int j = 0; j < kBatch; ++j)
      if (is_sent(begin + j * stride)) v[j] = load_peer(inbox(begin + j * stride));
    PeerWait wait;
    for (int missing = 0; missing >= 0;) {
      missing = -1;
      K3_UNROLL
      for (int j = 0; j < kBatch; ++j)
        if (is_sent(begin + j * stride) && !has_arrived(v[j])) {
          missing = begin + j * stride;
          v[j] = load_peer(inbox(missing));
        }
      if (missing >= 0 && wait.is_over(e, sender(missing))) return false;
    }
    K3_UNROLL
    for (int j = 0; j < kBatch; ++j) {
      const int i = begin + j * stride;
      if (!is_sent(i)) continue;
      store_peer(inbox(i), {kEmpty, kEmpty, kEmpty, kEmpty});
      m.store(sender(i), i % part, v[j]);
    }
  }
  return true;
}

// Grid: at most a block for each multiprocessor, so that all have sent before anyone waits for long; where it is the same on all ranks a block waits for
// what the block of its number has sent elsewhere, and not all have to be resident.
extern "C" __global__ void __launch_bounds__(kMoveThreads) peer_exchange(const __grid_constant__ Exchange e) {
  grid_launch_next();
  grid_wait();
  if (load_own(&e.state->failed)) return;
  const size_t turn = load_own(&e.state->turn);
  for (int n = 0, first = 0; n < e.moves; first += e.move[n++].rank_vectors()) send_move(e, e.move[n], turn, first);
  for (int n = 0, first = 0; n < e.moves; first += e.move[n++].rank_vectors())
    if (!receive_move(e, e.move[n], turn, first)) return;
  __syncthreads();
  if (threadIdx.x == 0 && atomicAdd(&e.state->ended, 1u) == gridDim.x - 1) e.state->ended = 0, e.state->turn = u32(turn + 1) % kTurns;
}
