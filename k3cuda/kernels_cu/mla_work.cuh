// How latent attention is cut into work: chunks of the context, groups of queries, and which block takes what.
//
// A chunk is a fixed range of absolute positions, whole pages, the same for every row that ever sees it: short where a context is
// short, so that 8,192 tokens already keep 32 blocks busy, long where it is long, so that partial results stay few.
#pragma once
#include "prims.cuh"

constexpr int kMlaPage = 64;
constexpr int kMlaClasses = 3;                                        // chunk lengths, longest first
constexpr int kMlaShort = 256, kMlaMiddle = 512, kMlaLong = 1024;     // positions of a chunk
constexpr int kMlaMiddleFrom = 8192, kMlaLongFrom = 65536;            // position from which chunks have that length
constexpr int kMlaShorts = kMlaMiddleFrom / kMlaShort, kMlaMiddles = (kMlaLongFrom - kMlaMiddleFrom) / kMlaMiddle;

// Chunks that hold the first `length` positions.
K3_DEVICE int mla_chunks(int length) {
  if (length <= kMlaMiddleFrom) return (length + kMlaShort - 1) / kMlaShort;
  if (length <= kMlaLongFrom) return kMlaShorts + (length - kMlaMiddleFrom + kMlaMiddle - 1) / kMlaMiddle;
  return kMlaShorts + kMlaMiddles + (length - kMlaLongFrom + kMlaLong - 1) / kMlaLong;
}
// First position of chunk `j`; that of j + 1 is its end.
K3_DEVICE int mla_chunk_begin(int j) {
  if (j <= kMlaShorts) return j * kMlaShort;
  if (j <= kMlaShorts + kMlaMiddles) return kMlaMiddleFrom + (j - kMlaShorts) * kMlaMiddle;
  return kMlaLongFrom + (j - kMlaShorts - kMlaMiddles) * kMlaLong;
}
// First element of the cache row of one position: 64 bits, since a pool of pages passes 2^31 elements.
template <int kDim>
K3_DEVICE size_t mla_cache_row(int page, int position) { return (size_t(page) * kMlaPage + position % kMlaPage) * kDim; }

struct MlaRows {
  const int* row_slot;       // [rows], -1 pads; rows of a slot are neighbours, oldest first
  const int* row_position;   // [rows]
  const int* page_table;     // [slots][slot_pages]
  int slot_pages;
  int rows;                  // at most 64
};

// One chunk of one group: `columns` queries (row, head), row major, from column `first` of the run that begins at row `run`.
struct MlaItem {
  int run, slot, first, columns;
  int begin, end;            // positions
  int low;                   // position of the group's first row: what lies beyond it is not seen by all
  int partial;               // where the first column's result goes, the others behind it
  int chunks;                // of the run; 1: the result is final
  int place;                 // column of shared memory at which the queries begin
  int load;                  // 0: they lie there; 1: they can be loaded; 2: once the item before has been scored. An item is seen when
                             // that before the last is done
};

constexpr int kMlaMaxRows = 64;

// A run is the rows of one sequence. Kept in shared memory; built by one warp.
struct MlaWork {
  int slot[kMlaMaxRows], position[kMlaMaxRows];
  int run[kMlaMaxRows];                      // where the row's run begins
  int length[kMlaMaxRows];                   // rows of the run that begins here, 0 elsewhere
  int chunks[kMlaMaxRows];                   // of the run that begins here
  int before[kMlaClasses + 1][kMlaMaxRows];  // items of earlier runs, by class; last: their partial results, of every chunk, row and head
  int total[kMlaClasses + 1];
  int width;                                 // queries of a group
};

// Queries that a group may hold, rising.
struct MlaWidths { int width[3]; };

// One warp; the caller synchronises. Groups are as narrow as they can be with an item for each of `blocks`: where there are blocks without
// work, more of them read a page and each does less with it. Widths change no byte.
template <int kHeads>
K3_DEVICE void mla_plan(const MlaRows& a, MlaWork& w, const MlaWidths& widths, int blocks, int lane = lane_id()) {
  constexpr int kSums = kMlaClasses + 1;
  u64 edges = 0;
  K3_ROLLED
  for (int i = lane; i < kMlaMaxRows; i += kWarpSize) {
    const int slot = i < a.rows ? a.row_slot[i] : -1;
    w.slot[i] = slot;
    w.position[i] = i < a.rows ? a.row_position[i] : 0;
    __syncwarp();
    edges = edges >> kWarpSize | u64(__ballot_sync(kFullWarp, i == 0 || w.slot[i - 1] != slot)) << kWarpSize;
  }
  int items[2] = {};
  K3_ROLLED
  for (int i = lane; i < kMlaMaxRows; i += kWarpSize) {
    const u64 after = edges >> i >> 1;
    const int length = w.slot[i] >= 0 && (edges >> i & 1) ? (after ? __ffsll(after) : kMlaMaxRows - i) : 0;
    const int chunks = length ? mla_chunks(w.position[i + length - 1] + 1) : 0;
    w.length[i] = length;
    w.chunks[i] = chunks;
    w.run[i] = 63 - __clzll(edges & (~0ull >> (63 - i)));
    K3_UNROLL
    for (int n = 0; n < 2; ++n) items[n] += chunks * (u32(length * kHeads + widths.width[n] - 1) / u32(widths.width[n]));
  }
  K3_ROLLED
  for (int d = 1; d < kWarpSize; d *= 2)
    K3_UNROLL
    for (int n = 0; n < 2; ++n) items[n] += __shfl_xor_sync(kFullWarp, items[n], d);
  const int width = items[0] <= blocks ? widths.width[0] : items[1] <= blocks ? widths.width[1] : widths.width[2];
  if (lane == 0) w.width = width;
  int before[kSums] = {};
  K3_ROLLED
  for (int i = lane; i < kMlaMaxRows; i += kWarpSize) {
    const int length = w.length[i], chunks = w.chunks[i], groups = u32(length * kHeads + width - 1) / u32(width);
    const int longs = max(chunks - kMlaShorts - kMlaMiddles, 0), shorts = min(chunks, kMlaShorts);
    const int own[kSums] = {longs * groups, (chunks - longs - shorts) * groups, shorts * groups, chunks * length * kHeads};
    int sum[kSums];
    K3_UNROLL
    for (int c = 0; c < kSums; ++c) sum[c] = own[c];
    // All sums side by side: what a step waits for is one shuffle.
    K3_ROLLED
    for (int d = 1; d < kWarpSize; d *= 2)
      K3_UNROLL
      for (int c = 0; c < kSums; ++c) {
        const int low = __shfl_up_sync(kFullWarp, sum[c], d);
        if (lane >= d) sum[c] += low;
      }
    K3_UNROLL
    for (int c = 0; c < kSums; ++c) {
      w.before[c][i] = before[c] + sum[c] - own[c];
      before[c] += __shfl_sync(kFullWarp, sum[c], kWarpSize - 1);
    }
  }
  if (lane == 0)
    K3_UNROLL
    for (int c = 0; c < kSums; ++c) w.total[c] = before[c];
}

K3_DEVICE int mla_items(const MlaWork& w) { return w.total[0] + w.total[1] + w.total[2]; }

// Item `index`: longest chunks first, groups of a chunk side by side so that they share it in the L2 cache.
template <int kHeads>
K3_DEVICE MlaItem mla_item(const MlaWork& w, int index) {
  int c = 0;
  K3_ROLLED
  while (c < kMlaClasses - 1 && index >= w.total[c]) index -= w.total[c++];
  int run = 0;
  K3_ROLLED
  for (int step = kMlaMaxRows / 2; step; step /= 2)
    if (w.before[c][run + step] <= index) run += step;
  index -= w.before[c][run];
  const u32 columns = w.length[run] * kHeads, groups = (columns + w.width - 1) / u32(w.width), turn = u32(index) / groups;
  const int group = index - turn * groups, chunk = turn + (c == 0 ? kMlaShorts + kMlaMiddles : c == 1 ? kMlaShorts : 0);
  MlaItem m;
  m.run = run;
  m.slot = w.slot[run];
  m.first = group * w.width;
  m.columns = min(w.width, int(columns) - m.first);
  m.low = w.position[run + m.first / kHeads];
  m.begin = mla_chunk_begin(chunk);
  m.end = min(mla_chunk_begin(chunk + 1), w.position[run + (m.first + m.columns - 1) / kHeads] + 1);
  m.partial = w.before[kMlaClasses][run] + chunk * columns + m.first;
  m.chunks = w.chunks[run];
  return m;
}
