// The router's choice for a row, and the list of chosen experts that weight-major kernels walk. Both are the work of one block;
// the list is so small that every block of an expert kernel makes its own, instead of waiting for another launch.
//
// Order of experts: falling sigmoid(logit) + bias, lower id first on equal scores, NaN last. A score becomes an unsigned key of the
// same order; key and id together are one number, larger is better, and no two are equal.
#pragma once
#include "exchange.cuh"

#ifdef K3_HOST_SHIM
inline int __popc(u32 v) { return __builtin_popcount(v); }
inline int __clz(u32 v) { return __builtin_clz(v); }
inline void atomicOr(u32* p, u32 v) { __atomic_fetch_or(p, v, __ATOMIC_ACQ_REL); }
inline u32 warp_min(u32 v) {
  for (int d = 1; d < kWarpSize; d *= 2) v = std::min(v, __shfl_xor_sync(kFullWarp, v, d));
  return v;
}
#else
K3_DEVICE u32 warp_min(u32 v) { return __reduce_min_sync(kFullWarp, v); }
#endif

K3_DEVICE u32 rising_key(float v) {
  u32 u = __float_as_uint(v + 0.0f);            // -0 equals 0
  return v != v ? 0 : u >> 31 ? ~u : u | 0x80000000u;
}
K3_DEVICE u64 candidate(u32 key, int id) { return u64(key) << 32 | (0xffffffffu - u32(id)); }
K3_DEVICE int candidate_id(u64 c) { return int(0xffffffffu - u32(c)); }

// kNear: the bias lies in shared memory too, where m.keys is, put there by each thread for itself: registers need not hold it over a wait.
template <int kExperts_, int kTopK_, int kThreads_, bool kNear_ = false>
struct RouteShape {
  static constexpr bool kNear = kNear_;
  static constexpr int kExperts = kExperts_, kTopK = kTopK_, kThreads = kThreads_, kWarps = kThreads / kWarpSize;
  static constexpr int kOwn = (kExperts + kThreads - 1) / kThreads;        // experts of a thread: kThreads apart
  static constexpr int kList = 2 * kWarpSize;
  static_assert(kTopK <= kWarpSize && kTopK <= kExperts && kTopK <= kThreads, "a choice is a lane, and the bound on it that of a thread");
};

template <class S>
struct __align__(16) RouteSmem {
  u64 list[S::kList];
  u32 best[S::kThreads], keys[S::kExperts];
  float scores[S::kExperts];
  u32 least[S::kWarps];
  int count, chosen[kWarpSize];
};

// The kTopK best of the team's keys to chosen[0..kTopK), best first, for the first warp. key: of this thread's experts.
// The kTopK-th best of the threads' best is no better than the kTopK-th best of all, so what is worse is out: some seventeen of a big
// model's experts stay, and are ranked by counting who is better. More than the list holds (many equal keys do it): one after the
// other, ten times as slow. Loops are rolled where they can be: this runs once, and its instructions come from far away.
template <class S, class Team>
K3_DEVICE void choose(const u32 (&key)[S::kOwn], RouteSmem<S>& m, const Team& team) {
  const int tid = team.thread(), lane = team.lane();
  auto has = [&](int i) { return i * S::kThreads + tid < S::kExperts; };
  u32 best = 0;
  K3_UNROLL
  for (int i = 0; i < S::kOwn; ++i) best = has(i) && key[i] > best ? key[i] : best;
  m.best[tid] = best;
  for (int i = tid; i < S::kList; i += S::kThreads) m.list[i] = 0;
  if (tid == 0) m.count = 0;
  team.sync();
  int better = 0;
#pragma unroll 8
  for (int i = 0; i < S::kThreads / 4; ++i) {
    uint4 b = ((const uint4*)m.best)[i];
    better += (b.x > best) + (b.y > best) + (b.z > best) + (b.w > best);
  }
  u32 least = warp_min(better < S::kTopK ? best : ~0u);
  if (lane == 0) m.least[team.warp()] = least;
  team.sync();
  K3_UNROLL
  for (int w = 0; w < S::kWarps; ++w) least = m.least[w] < least ? m.least[w] : least;
  K3_UNROLL
  for (int i = 0; i < S::kOwn; ++i) {
    if (!has(i) || key[i] < least) continue;
    int at = atomicAdd(&m.count, 1);            // in any order: the rank alone counts
    if (at < S::kList) m.list[at] = candidate(key[i], i * S::kThreads + tid);
  }
  team.sync();
  if (team.warp()) return;
  const int count = m.count;
  if (count <= S::kList) {
#pragma unroll 1
    for (int i = lane; i < count; i += kWarpSize) {
      u64 mine = m.list[i];
      int rank = 0;
#pragma unroll 1
      for (int first = 0; first < count; first += kWarpSize) {
#pragma unroll 8
        for (int j = 0; j < kWarpSize; ++j) rank += m.list[first + j] > mine;
      }
      if (rank < S::kTopK) m.chosen[rank] = candidate_id(mine);
    }
  } else {
    u64 below = ~u64(0);
#pragma unroll 1
    for (int place = 0; place < S::kTopK; ++place) {
      u64 top = 0;
#pragma unroll 1
      for (int id = lane; id < S::kExperts; id += kWarpSize) {
        u64 c = candidate(m.keys[id], id);
        if (c < below && c > top) top = c;
      }
#pragma unroll 1
      for (int d = 1; d < kWarpSize; d *= 2) {
        u64 other = __shfl_xor_sync(kFullWarp, top, d);
        top = other > top ? other : top;
      }
      if (lane == 0) m.chosen[place] = candidate_id(top);
      below = top;
    }
  }
  __syncwarp();
}

// One row of logits to ids and weights [kTopK], best first; weights are unbiased scores that sum to `scale`. A row that is not live is
// left alone. `ready` is called once by every thread, before logits are read; they may lie where m.scores is. The whole team, kThreads threads; its
// first warp writes the results.
template <class S, class Ready, class Team = WholeBlock>
K3_DEVICE void route_row(const float* logits, const float* bias, bool live, float scale, int* ids, float* weights, RouteSmem<S>& m, Ready ready, const Team& team = {}) {
  float own_bias[S::kOwn], logit[S::kOwn];
  auto load_bias = [&] {
    K3_UNROLL
    for (int i = 0; i < S::kOwn; ++i) {
      int e = i * S::kThreads + team.thread();
      own_bias[i] = e < S::kExperts ? bias[e] : 0;
    }
  };
  if constexpr (!S::kNear) load_bias();
  ready();
  if (!live) return;
  if constexpr (S::kNear) load_bias();
  K3_UNROLL
  for (int i = 0; i < S::kOwn; ++i) {
    int e = i * S::kThreads + team.thread();
    logit[i] = e < S::kExperts ? logits[e] : 0;
  }
  u32 key[S::kOwn];
  K3_UNROLL
  for (int i = 0; i < S::kOwn; ++i) {
    int e = i * S::kThreads + team.thread();
    float score = sigmoid(logit[i]);
    key[i] = rising_key(score + own_bias[i]);
    if (e < S::kExperts) m.scores[e] = score, m.keys[e] = key[i];
  }
  choose<S>(key, m, team);                          // its barriers show everyone's scores and keys to the first warp
  if (team.warp()) return;
  const int lane = team.lane();
  int id = lane < S::kTopK ? m.chosen[lane] : 0;
  float score = lane < S::kTopK ? m.scores[id] : 0, sum = warp_sum(score);
  if (lane < S::kTopK) ids[lane] = id, weights[lane] = score / (sum + 1e-20f) * scale;
}

// ---- which experts a step needs, and for whom ----

// kRows: rows of a step at most. kGroup: items of one entry at most.
template <int kExperts_, int kTopK_, int kRows_, int kThreads_, int kGroup_ = 8>
struct ListShape {
  static constexpr int kExperts = kExperts_, kTopK = kTopK_, kRows = kRows_, kThreads = kThreads_, kGroup = kGroup_;
  static constexpr int kWarps = kThreads / kWarpSize;
  static constexpr int kWords = (kRows + 31) / 32;
  static constexpr int kPer = (kExperts + kThreads - 1) / kThreads;        // neighbouring experts of a thread
  static constexpr bool kOneRow = kRows == 1 && kTopK <= kWarpSize;        // a warp sorts the ids; ListSmem is not used
  static_assert(kRows * kTopK < 65536 && kExperts < 65536, "counts share a word");
};

template <class S>
struct ListSmem {
  u32 rows[S::kExperts][S::kWords];             // bit r: row r chose the expert
  u16 start[S::kExperts];
  u32 warp_total[S::kWarps];
};

// Where the list goes, in shared or global memory. An item is row * kTopK + place: where its id, weight and activations are. Items stand
// by rising expert, then row. entry = expert | first item << 16, experts rising; an expert with more than kGroup items has several,
// side by side; one more entry after the last holds the number of items << 16.
struct ListOut {
  int *entries, *items;                         // how many
  u32* entry;                                   // [kRows kTopK + 1]
  u16* item;                                    // [kRows kTopK]
};

// The whole team; it is in step afterwards. `ready` is called once by every thread, before ids are read. Bits are set in any order but
// mean the same, so nothing here depends on timing. row_slot null: all rows are live.
template <class S, class Ready, class Team = WholeBlock>
K3_DEVICE void list_experts(const int* ids, const int* row_slot, int rows, const ListOut& out, ListSmem<S>& m, Ready ready, const Team& team = {}) {
  const int tid = team.thread();
  if constexpr (S::kOneRow) {   // ids of a row differ: an item stands behind as many as have smaller ones
    const bool live = !row_slot || row_slot[0] >= 0;
    ready();
    if (team.warp() == 0) {
      const bool own = live && tid < S::kTopK;
      const int id = own ? ((volatile const int*)ids)[tid] : S::kExperts;
      int rank = 0;
      K3_UNROLL
      for (int i = 0; i < S::kTopK; ++i) rank += __shfl_sync(kFullWarp, id, i) < id;
      if (own) out.entry[rank] = u32(id) | u32(rank) << 16, out.item[rank] = u16(tid);
      const int n = live ? S::kTopK : 0;
      if (tid == 0) *out.entries = *out.items = n, out.entry[n] = u32(n) << 16;
    }
    team.sync();
    return;
  }
  constexpr int kPerThread = (S::kRows * S::kTopK + S::kThreads - 1) / S::kThreads;   // items
  int id[kPerThread];                           // -1: none, or the row is not live
  K3_UNROLL
  for (int k = 0; k < kPerThread; ++k) {
    int i = k * S::kThreads + tid;
    id[k] = i < rows * S::kTopK ? (row_slot ? row_slot[i / S::kTopK] : 0) : -1;
  }
  for (int i = tid; i < S::kExperts * S::kWords; i += S::kThreads) (&m.rows[0][0])[i] = 0;
  ready();
  K3_UNROLL
  for (int k = 0; k < kPerThread; ++k)
    if (id[k] >= 0) id[k] = ((volatile const int*)ids)[k * S::kThreads + tid];
  team.sync();
  K3_UNROLL
  for (int k = 0; k < kPerThread; ++k) {
    int r = (k * S::kThreads + tid) / S::kTopK;
    if (id[k] >= 0) atomicOr(&m.rows[id[k]][r / 32], 1u << r % 32);
  }
  team.sync();
  // Running totals over the experts: items in the low half, entries in the high half.
  u32 own[S::kPer], mine = 0;
  K3_UNROLL
  for (int i = 0; i < S::kPer; ++i) {
    int e = tid * S::kPer + i, n = 0;
    if (e < S::kExperts)
      for (int w = 0; w < S::kWords; ++w) n += __popc(m.rows[e][w]);
    own[i] = u32(n) | u32((n + S::kGroup - 1) / S::kGroup) << 16;
    mine += own[i];
  }
  u32 upto = mine;
  K3_UNROLL
  for (int d = 1; d < kWarpSize; d *= 2) {
    u32 other = __shfl_up_sync(kFullWarp, upto, d);
    if (team.lane() >= d) upto += other;
  }
  if (team.lane() == kWarpSize - 1) m.warp_total[team.warp()] = upto;
  team.sync();
  u32 at = upto - mine, all = 0;
  for (int w = 0; w < S::kWarps; ++w) {
    if (w < team.warp()) at += m.warp_total[w];
    all += m.warp_total[w];
  }
  K3_UNROLL
  for (int i = 0; i < S::kPer; ++i) {
    int e = tid * S::kPer + i;
    for (int g = 0; g < int(own[i] >> 16); ++g) out.entry[(at >> 16) + g] = u32(e) | ((at & 0xffff) + g * S::kGroup) << 16;
    if (own[i]) m.start[e] = u16(at);
    at += own[i];
  }
  if (tid == 0) {
    *out.entries = all >> 16;
    *out.items = all & 0xffff;
    out.entry[all >> 16] = all << 16;
  }
  team.sync();
  K3_UNROLL
  for (int k = 0; k < kPerThread; ++k) {
    int i = k * S::kThreads + tid, r = i / S::kTopK, e = id[k];
    if (e < 0) continue;
    int before = __popc(m.rows[e][r / 32] & ((1u << r % 32) - 1));
    for (int w = 0; w < r / 32; ++w) before += __popc(m.rows[e][w]);
    out.item[m.start[e] + before] = u16(i);
  }
  team.sync();
}
