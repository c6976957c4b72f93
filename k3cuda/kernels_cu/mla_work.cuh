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
  int partial;               // where the result goes
};

// Where `mla_combine` finds a row's partial results.
struct __align__(16) MlaRowInfo { int run, partial, chunks, unused; };

constexpr int kMlaMaxRows = 64;

// A run is the rows of one sequence. Kept in shared memory; built by one warp.
struct MlaWork {
  int slot[kMlaMaxRows], position[kMlaMaxRows];
  int length[kMlaMaxRows];                   // rows of the run that begins here, 0 elsewhere
  int partial[kMlaMaxRows];
  int before[kMlaClasses][kMlaMaxRows];      // items of earlier runs, by class
  int total[kMlaClasses];
};

// Exclusive sum over 64 entries, two a lane (lane and lane + 32); `low` and `high` become the sums, the total is returned.
K3_DEVICE int scan_64(int& low, int& high) {
  int l = low, h = high;
  K3_UNROLL
  for (int d = 1; d < kWarpSize; d *= 2) {
    int a = __shfl_up_sync(kFullWarp, l, d), b = __shfl_up_sync(kFullWarp, h, d);
    if (lane_id() >= d) l += a, h += b;
  }
  int first = __shfl_sync(kFullWarp, l, kWarpSize - 1), second = __shfl_sync(kFullWarp, h, kWarpSize - 1);
  low = l - low;
  high = h - high + first;
  return first + second;
}

// kColumns: queries of a group. One warp; the caller synchronises.
template <int kHeads, int kColumns>
K3_DEVICE void mla_plan(const MlaRows& a, MlaWork& w) {
  const int lane = lane_id();
  int slot[2], counts[2][kMlaClasses], parts[2], length[2];
  u64 edges = 0;
  K3_UNROLL
  for (int h = 0; h < 2; ++h) {
    int i = lane + h * kWarpSize;
    slot[h] = i < a.rows ? a.row_slot[i] : -1;
    w.slot[i] = slot[h];
    w.position[i] = i < a.rows ? a.row_position[i] : 0;
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
    u64 after = edges >> i >> 1;
    length[h] = slot[h] >= 0 && (edges >> i & 1) ? (after ? __ffsll(after) : kMlaMaxRows - i) : 0;
    int chunks = length[h] ? mla_chunks(w.position[i + length[h] - 1] + 1) : 0;
    int groups = (length[h] * kHeads + kColumns - 1) / kColumns;
    int longs = max(chunks - kMlaShorts - kMlaMiddles, 0), shorts = min(chunks, kMlaShorts);
    counts[h][0] = longs * groups;
    counts[h][1] = (chunks - longs - shorts) * groups;
    counts[h][2] = shorts * groups;
    parts[h] = chunks * groups;
    w.length[i] = length[h];
  }
  K3_UNROLL
  for (int c = 0; c < kMlaClasses; ++c) {
    int total = scan_64(counts[0][c], counts[1][c]);
    w.before[c][lane] = counts[0][c];
    w.before[c][lane + kWarpSize] = counts[1][c];
    if (lane == 0) w.total[c] = total;
  }
  scan_64(parts[0], parts[1]);
  w.partial[lane] = parts[0];
  w.partial[lane + kWarpSize] = parts[1];
}

K3_DEVICE int mla_items(const MlaWork& w) { return w.total[0] + w.total[1] + w.total[2]; }

// Item `index`: longest chunks first, groups of a chunk side by side so that they share it in the L2 cache.
template <int kHeads, int kColumns>
K3_DEVICE MlaItem mla_item(const MlaWork& w, int index) {
  int c = 0;
  while (c < kMlaClasses - 1 && index >= w.total[c]) index -= w.total[c++];
  int run = 0;
  for (int step = kMlaMaxRows / 2; step; step /= 2)
    if (w.before[c][run + step] <= index) run += step;
  index -= w.before[c][run];
  const int columns = w.length[run] * kHeads, groups = (columns + kColumns - 1) / kColumns;
  const int group = index % groups, chunk = index / groups + (c == 0 ? kMlaShorts + kMlaMiddles : c == 1 ? kMlaShorts : 0);
  MlaItem m;
  m.run = run;
  m.slot = w.slot[run];
  m.first = group * kColumns;
  m.columns = min(kColumns, columns - m.first);
  m.low = w.position[run + m.first / kHeads];
  m.begin = mla_chunk_begin(chunk);
  m.end = min(mla_chunk_begin(chunk + 1), w.position[run + (m.first + m.columns - 1) / kHeads] + 1);
  m.partial = w.partial[run] + group * mla_chunks(w.position[run + w.length[run] - 1] + 1) + chunk;
  return m;
}

// For `mla_combine`; one thread a row.
K3_DEVICE void mla_row_info(const MlaWork& w, int row, MlaRowInfo* info) {
  int run = row;
  while (w.length[run] == 0) --run;
  info[row] = {run, w.partial[run], mla_chunks(w.position[run + w.length[run] - 1] + 1), 0};
}
