// The list of chosen experts of a wide step, made once by several blocks: each counts what every expert has, and writes what belongs to its own.
// Same list as list_experts makes. And the piece of it that a block of a weight-major kernel needs.
#pragma once
#include "expert_core.cuh"
#include "route_core.cuh"

// kBlocks: of the grid, each with an equal run of experts. kGroup: items of one entry at most.
template <int kExperts_, int kTopK_, int kRows_, int kBlocks_, int kThreads_, int kGroup_>
struct WideListShape {
  static constexpr int kExperts = kExperts_, kTopK = kTopK_, kRows = kRows_, kBlocks = kBlocks_, kThreads = kThreads_, kGroup = kGroup_;
  static constexpr int kOwn = (kExperts + kBlocks - 1) / kBlocks, kWords = (kRows + 31) / 32, kWarps = kThreads / kWarpSize;
  static constexpr int kPer = (kExperts + kThreads - 1) / kThreads;        // neighbouring experts of a thread
  static constexpr int kItems = kRows * kTopK, kEach = (kItems + kThreads - 1) / kThreads;   // of a thread
  static_assert(kItems < 65536 && kExperts < 65536, "counts share a word");
  static_assert(kWords <= kWarpSize, "a warp counts the rows of an expert");
};

template <class S>
struct WideListSmem {
  u32 count[S::kExperts];                       // rows of each
  u32 rows[S::kOwn][S::kWords];                 // bit r: row r chose this block's expert
  u16 before[S::kOwn][S::kWords];               // rows in earlier words
  u16 start[S::kOwn];
  u32 warp_total[S::kWarps];
};

// The whole block; `ready` comes before anything is read. Counts and bits are set in any order but mean the same.
template <class S, class Ready>
K3_DEVICE void list_wide(const int* ids, const int* row_slot, const ListOut& out, WideListSmem<S>& m, Ready ready) {
  const int tid = threadIdx.x, first = int(blockIdx.x) * S::kOwn, own = min_of(S::kOwn, S::kExperts - first);   // none where blocks are more than experts
  for (int i = tid; i < S::kExperts; i += S::kThreads) m.count[i] = 0;
  for (int i = tid; i < S::kOwn * S::kWords; i += S::kThreads) (&m.rows[0][0])[i] = 0;
  ready();
  __syncthreads();
  int expert[S::kEach];                         // of this thread's items; -1: not live
  K3_UNROLL
  for (int j = 0; j < S::kEach; ++j) {
    const int i = tid + j * S::kThreads;
    expert[j] = i < S::kItems && row_slot[i / S::kTopK] >= 0 ? ids[i] : -1;
  }
  auto each = [&](auto&& f) {
    K3_UNROLL
    for (int j = 0; j < S::kEach; ++j)
      if (expert[j] >= 0) f(tid + j * S::kThreads, expert[j]);
  };
  each([&](int i, int e) {
    atomicAdd(&m.count[e], 1u);
    const int row = i / S::kTopK;
    if (e >= first && e < first + own) atomicOr(&m.rows[e - first][row / 32], 1u << row % 32);
  });
  __syncthreads();
  for (int e = warp_id(); e < own; e += S::kWarps) {
    const u32 n = lane_id() < S::kWords ? __popc(m.rows[e][lane_id()]) : 0;
    u32 upto = n;
    K3_UNROLL
    for (int d = 1; d < kWarpSize; d *= 2) {
      const u32 other = __shfl_up_sync(kFullWarp, upto, d);
      if (lane_id() >= d) upto += other;
    }
    if (lane_id() < S::kWords) m.before[e][lane_id()] = u16(upto - n);
  }
  // Running totals over the experts: items in the low half, entries in the high half.
  u32 mine = 0;
  auto of = [&](int i) {
    const int e = tid * S::kPer + i;
    const u32 n = e < S::kExperts ? m.count[e] : 0;
    return n | (n + S::kGroup - 1) / S::kGroup << 16;
  };
  K3_UNROLL
  for (int i = 0; i < S::kPer; ++i) mine += of(i);
  u32 upto = mine;
  K3_UNROLL
  for (int d = 1; d < kWarpSize; d *= 2) {
    const u32 other = __shfl_up_sync(kFullWarp, upto, d);
    if (lane_id() >= d) upto += other;
  }
  if (lane_id() == kWarpSize - 1) m.warp_total[warp_id()] = upto;
  __syncthreads();
  u32 at = upto - mine, all = 0;
  for (int w = 0; w < S::kWarps; ++w) {
    if (w < warp_id()) at += m.warp_total[w];
    all += m.warp_total[w];
  }
  K3_UNROLL
  for (int i = 0; i < S::kPer; ++i) {
    const int e = tid * S::kPer + i;
    const u32 n = of(i);
    if (e >= first && e < first + own) {
      for (int g = 0; g < int(n >> 16); ++g) out.entry[(at >> 16) + g] = u32(e) | ((at & 0xffff) + g * S::kGroup) << 16;
      m.start[e - first] = u16(at);
    }
    at += n;
  }
  if (blockIdx.x == 0 && tid == 0) {
    *out.entries = all >> 16;
    *out.items = all & 0xffff;
    out.entry[all >> 16] = all << 16;
  }
  __syncthreads();
  each([&](int i, int e) {
    if (e < first || e >= first + own) return;
    const int row = i / S::kTopK;
    const int before = m.before[e - first][row / 32] + __popc(m.rows[e - first][row / 32] & ((1u << row % 32) - 1));
    out.item[m.start[e - first] + before] = u16(i);
  });
}

// Entries of an ExpertList from `from` on, with the items that belong to them; a first item counts from those here.
//   kEntries, kTokens  at most: entries, and items of each
template <int kEntries, int kTokens>
struct ExpertSlice {
  static constexpr int kMost = kEntries;
  int entries, from;                            // entries: of the whole list
  u32 entry[kEntries + 1];
  u16 item[kEntries * kTokens];
};

// What this block, one of `blocks`, needs for its run of units, of which an entry has `each`. Ends with the block in step.
template <class Slice, class List>
K3_DEVICE void load_slice(Slice& to, const List& list, int each, int blocks) {
  const int entries = list.entries;
  const UnitRun run = unit_run(entries * each, blocks);
  const int from = run.begin / each, count = run.begin < run.end ? (run.end - 1) / each + 1 - from : 0;
  if (threadIdx.x == 0) to.entries = entries, to.from = from;
  if (count) {
    const int first = entry_first(list.entry[from]), items = entry_first(list.entry[from + count]) - first;
    for (int i = threadIdx.x; i <= count; i += blockDim.x) to.entry[i] = list.entry[from + i] - (u32(first) << 16);
    for (int i = threadIdx.x; i < items; i += blockDim.x) to.item[i] = list.item[first + i];
  }
  __syncthreads();
}
