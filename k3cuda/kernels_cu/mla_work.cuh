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
// Where byte `at` of a page's rows, one behind the other, lies in memory and in shared memory, so that a page is copied as it is and its fragments are
// loaded without bank conflicts (a row is an odd number of blocks): 16-byte units change places inside blocks of 64 values. Its own inverse.
template <int kSize>
K3_DEVICE u32 mla_swizzle(u32 at) { return at ^ (at >> 3 & (64 * kSize - 16)); }
// Where value `i` of the cache row of one position lies in a layer's cache: 64 bits, since a pool of pages passes 2^31 values.
template <class Stored, int kDim>
K3_DEVICE size_t mla_cache_at(int page, int position, int i) {
  constexpr int kSize = sizeof(Stored);
  return size_t(page) * (kMlaPage * kDim) + mla_swizzle<kSize>((position % kMlaPage * kDim + i) * kSize) / kSize;
}

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
  int slot[2], position[2], length[2], chunks[2], items[2] = {}, own[2][kSums], sum[2][kSums];
  u64 edges = 0;
  K3_UNROLL
  for (int h = 0; h < 2; ++h) {
    int i = lane + h * kWarpSize;
    slot[h] = i < a.rows ? a.row_slot[i] : -1;
    position[h] = i < a.rows ? a.row_position[i] : 0;
  }
  K3_UNROLL
  for (int h = 0; h < 2; ++h) {
    w.slot[lane + h * kWarpSize] = slot[h];
    w.position[lane + h * kWarpSize] = position[h];
  }
  __syncwarp();
  K3_UNROLL
  for (int h = 0; h < 2; ++h) {
    int i = lane + h * kWarpSize;
    edges |= u64(__ballot_sync(kFullWarp, i == 0 || w.slot[i - 1] != slot[h])) << (h * kWarpSize);
  }
  K3_UNROLL
  for (int h = 0; h < 2; ++h) {
    int i = lane + h * kWarpSize;
    const u64 after = edges >> i >> 1;
    length[h] = slot[h] >= 0 && (edges >> i & 1) ? (after ? __ffsll(after) : kMlaMaxRows - i) : 0;
    chunks[h] = length[h] ? mla_chunks(w.position[i + length[h] - 1] + 1) : 0;
    w.length[i] = length[h];
    w.chunks[i] = chunks[h];
    w.run[i] = 63 - __clzll(edges & (~0ull >> (63 - i)));
    K3_UNROLL
    for (int n = 0; n < 2; ++n) items[n] += chunks[h] * ((length[h] * kHeads + widths.width[n] - 1) / widths.width[n]);
  }
  K3_UNROLL
  for (int d = 1; d < kWarpSize; d *= 2)
    K3_UNROLL
    for (int n = 0; n < 2; ++n) items[n] += __shfl_xor_sync(kFullWarp, items[n], d);
  const int width = items[0] <= blocks ? widths.width[0] : items[1] <= blocks ? widths.width[1] : widths.width[2];
  if (lane == 0) w.width = width;
  K3_UNROLL
  for (int h = 0; h < 2; ++h) {
    const int groups = (length[h] * kHeads + width - 1) / width;
    const int longs = max(chunks[h] - kMlaShorts - kMlaMiddles, 0), shorts = min(chunks[h], kMlaShorts);
    own[h][0] = longs * groups;
    own[h][1] = (chunks[h] - longs - shorts) * groups;
    own[h][2] = shorts * groups;
    own[h][3] = chunks[h] * length[h] * kHeads;
    K3_UNROLL
    for (int c = 0; c < kSums; ++c) sum[h][c] = own[h][c];
  }
  // All sums side by side: what a step waits for is one shuffle.
  K3_UNROLL
  for (int d = 1; d < kWarpSize; d *= 2)
    K3_UNROLL
    for (int c = 0; c < kSums; ++c) {
      int low = __shfl_up_sync(kFullWarp, sum[0][c], d), high = __shfl_up_sync(kFullWarp, sum[1][c], d);
      if (lane >= d) sum[0][c] += low, sum[1][c] += high;
    }
  K3_UNROLL
  for (int c = 0; c < kSums; ++c) {
    const int first = __shfl_sync(kFullWarp, sum[0][c], kWarpSize - 1), second = __shfl_sync(kFullWarp, sum[1][c], kWarpSize - 1);
    w.before[c][lane] = sum[0][c] - own[0][c];
    w.before[c][lane + kWarpSize] = sum[1][c] - own[1][c] + first;
    if (lane == 0) w.total[c] = first + second;
  }
}

K3_DEVICE int mla_items(const MlaWork& w) { return w.total[0] + w.total[1] + w.total[2]; }

// Item `index`: longest chunks first, groups of a chunk side by side so that they share it in the L2 cache.
template <int kHeads>
K3_DEVICE MlaItem mla_item(const MlaWork& w, int index) {
  int c = 0;
  while (c < kMlaClasses - 1 && index >= w.total[c]) index -= w.total[c++];
  int run = 0;
  for (int step = kMlaMaxRows / 2; step; step /= 2)
    if (w.before[c][run + step] <= index) run += step;
  index -= w.before[c][run];
  const int columns = w.length[run] * kHeads, groups = (columns + w.width - 1) / w.width;
  const int group = index % groups, chunk = index / groups + (c == 0 ? kMlaShorts + kMlaMiddles : c == 1 ? kMlaShorts : 0);
  MlaItem m;
  m.run = run;
  m.slot = w.slot[run];
  m.first = group * w.width;
  m.columns = min(w.width, columns - m.first);
  m.low = w.position[run + m.first / kHeads];
  m.begin = mla_chunk_begin(chunk);
  m.end = min(mla_chunk_begin(chunk + 1), w.position[run + (m.first + m.columns - 1) / kHeads] + 1);
  m.partial = w.before[kMlaClasses][run] + chunk * columns + m.first;
  m.chunks = w.chunks[run];
  return m;
}
