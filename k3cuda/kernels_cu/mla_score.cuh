// Latent attention's scores and weights: sets of four warps.
#pragma once
#include "mla_core.cuh"

// Clears what not all of the group's rows see in a page's pieces: rows behind the last position, and what is not finite in the rows
// before it. Their weight is 0, and 0 times NaN would reach everyone. Rows that do see it have NaN weights by then, so they stay NaN.
template <class S>
K3_DEVICE void mla_clear_hidden(MlaSmem<S>& m, const MlaCursor& c, int page, const MlaItem& item, int thread) {
  constexpr int kUnits = S::kRowBytes / 16;
  const int first = max(item.low + 1 - page, 0), rows = mla_pieces(page, item.end) * 16 - first;
  K3_ROLLED
  for (int i = thread; i < rows * kUnits; i += 128) {
    const int row = first + i / kUnits, at = c.at + row / 16;
    u8* piece = m.ring[at >= S::kRing ? at - S::kRing : at];
    uint4* unit = (uint4*)(piece + S::swizzle(row % 16 * S::kRowBytes + i % kUnits * 16));
    if (page + row >= item.end) {
      *unit = {0, 0, 0, 0};
    } else {
      const uint4 v = *unit, keep{S::Cache::finite(v.x), S::Cache::finite(v.y), S::Cache::finite(v.z), S::Cache::finite(v.w)};
      if ((keep.x & keep.y & keep.z & keep.w) != ~0u) *unit = {v.x & keep.x, v.y & keep.y, v.z & keep.z, v.w & keep.w};
    }
  }
}

// Products of a warp's 16 cache rows with kUse tiles of queries: rows at shared address `from`, a lane's own; queries at `query`. Few tiles:
// by mma.sync, without a wait (kMlaNarrow).
template <class S, int kUse>
K3_DEVICE void mla_score_narrow(float (&s)[kUse][4], u32 from, u32 query, int lane) {
  using C = typename S::Cache;
  // Matrices of a load: both halves of a k-step's columns, then the next one's. Row r of all of them has its 16-byte units at unit ^ r.
  const u32 columns = query + lane % 8 * 128 + (lane / 8 ^ lane % 8) * 16;
  uint4 raw, b[kUse];
  K3_UNROLL
  for (int step = 0; step < S::kKSteps; ++step) {
    if (step % C::kSteps == 0) raw = load_matrices(S::swizzle(from + step / C::kSteps * 32));
    const uint4 rows = C::rows(raw, step % C::kSteps);
    K3_UNROLL
    for (int n = 0; n < kUse; ++n) {
      if (step % 2 == 0) b[n] = load_matrices((columns ^ step % 4 * 32) + step / 4 * S::kQueryBlock + n * kColumnTile);
      C::multiply(s[n], rows, step % 2 ? b[n].z : b[n].x, step % 2 ? b[n].w : b[n].y);
    }
  }
}

// The same of any number of tiles.
template <class S, int kUse>
K3_DEVICE void mla_score_products(float (&s)[kUse][4], u32 from, u32 query, int lane) {
  using C = typename S::Cache;
  if constexpr (kUse <= S::kNarrow) return mla_score_narrow<S>(s, from, query, lane);
  // Where registers are short, four steps at a time: the addresses that mma.sync's columns have in all of them would fill them.
#ifdef K3_WGMMA
  constexpr int kRun = S::kKSteps;
  query = __shfl_sync(kFullWarp, query, 0);   // which says that lanes have the same: descriptors in uniform registers
#else
  constexpr int kRun = S::kTight ? 4 : S::kKSteps;
  settle(query);
#endif
  constexpr int kBatch = S::kPair, kUnderWay = mla_under_way(kBatch);
  uint4 rows[kUnderWay][kBatch] = {}, raw, next;
  settle(from);
  next = load_matrices(S::swizzle(from));
  K3_ROLLED
  for (int first = 0; first < S::kKSteps; first += kRun)
    K3_UNROLL
    for (int n = 0; n < kRun; n += kBatch) {
      const int step = first + n, slot = n / kBatch % kUnderWay;
      raw = next;
      if (step + kBatch < S::kKSteps) next = load_matrices(S::swizzle(from + (step / kBatch + 1) * 32));
      next_rows<kUnderWay - 1>(rows[slot], raw, step >= kUnderWay * kBatch, [&](int b) { return C::rows(raw, b); });
      products_begin();
      K3_UNROLL
      for (int b = 0; b < kBatch; ++b)
        product<C::kF16, false>(s, rows[slot][b], columns_by_k<kUse>(query, (step + b) / 4 * (S::kQueryBlock / 16) + (n + b) % 4 * 2, lane), step + b > 0);
      products_end();
    }
  products_done(rows, s);
}

// The largest scores of a piece's 16 rows: lanes 4 g + t get those of columns 2t, 2t + 1 of tile g, all tiles side by side. A lane whose g is no tile's gets
// something else.
template <int kUse>
K3_DEVICE float2 mla_piece_top(const float (&s)[kUse][4], int g) {
  constexpr int kTiles = kUse > 4 ? 8 : kUse > 2 ? 4 : kUse;
  float v[kTiles][2];
  K3_UNROLL
  for (int n = 0; n < kTiles; ++n)
    K3_UNROLL
    for (int j = 0; j < 2; ++j) v[n][j] = n < kUse ? fmaxf(s[n < kUse ? n : 0][j], s[n < kUse ? n : 0][2 + j]) : minus_infinity();
  K3_UNROLL
  for (int half = kTiles / 2; half; half /= 2)   // half of the tiles go to the lanes on the other side
    K3_UNROLL
    for (int n = 0; n < half; ++n)
      K3_UNROLL
      for (int j = 0; j < 2; ++j) {
        const float given = __shfl_xor_sync(kFullWarp, g & half ? v[n][j] : v[n + half][j], 4 * half);
        v[n][j] = fmaxf(g & half ? v[n + half][j] : v[n][j], given);
      }
  K3_UNROLL
  for (int d = 4 * kTiles; d < kWarpSize; d *= 2)
    K3_UNROLL
    for (int j = 0; j < 2; ++j) v[0][j] = fmaxf(v[0][j], __shfl_xor_sync(kFullWarp, v[0][j], d));
  return {v[0][0], v[0][1]};
}

// Warp `piece` (0-3) of set `set`; sets take turns by pages. m runs through the pages: of two sets, one takes it from the other.
template <class S, int kUse>
K3_DEVICE void mla_score_item(MlaSmem<S>& m, int k, int set, int piece, MlaCursor& c, u32& count, int lane_kept) {
  using C = typename S::Cache;
  const int place = m.item[k & 1].place, end = m.item[k & 1].end;
  int pieces;
  for (int page = m.item[k & 1].begin; page < end; page += kMlaPage, c.step<S::kRing>(pieces), ++count) {
    pieces = mla_pieces(page, end);
    if (S::kSets > 1 && (count & 1) != set) continue;
    u32 here = lane_kept;
    settle(here);   // addresses anew for each page: kept ones were spilled
    const int lane = here, g = lane / 4, t = lane % 4;
    const u32 query = shared_address(m.query[0][place / 8]);
    const int buffer = count & 1;
    MlaCursor p = c;
    p.step<S::kRing>(piece < pieces ? piece : 0);        // who has no piece scores the first once more, for nothing
    barrier_wait(&m.full[p.at], p.parity);
    float s[kUse][4] = {};
    mla_score_products<S, kUse>(s, shared_address(m.ring[p.at]) + lane % 16 * S::kRowBytes + lane / 16 * 16, query, lane);
    const bool edge = page + kMlaPage - 1 > m.item[k & 1].low;    // some row does not see all of the page
    if (edge)
      K3_UNROLL
      for (int n = 0; n < kUse; ++n)
        K3_UNROLL
        for (int j = 0; j < 2; ++j) {
          const int limit = m.limit[place + n * 8 + 2 * t + j], position = page + piece * 16 + g;
          if (position > limit) s[n][j] = minus_infinity();
          if (position + 8 > limit) s[n][2 + j] = minus_infinity();
        }
    const float2 piece_top = mla_piece_top<kUse>(s, g);
    const bool has_tile = g < kUse;                               // lanes 4 g + t look after tile g of the queries, for all of them
    const int own = (has_tile ? g : 0) * 8 + 2 * t;
    if (has_tile) *(float2*)&m.piece_top[count & 3][piece][own] = piece_top;
    named_barrier(3 + set, 128);
    if (S::kSets > 1 && count) barrier_wait(&m.top_full[buffer ^ 1], (count - 1) / 2 & 1);
    barrier_wait(&m.weight_empty[buffer], count / 2 & 1 ^ 1);
    const bool first = page == m.item[k & 1].begin;
    const float2 own_scale = *(const float2*)&m.scale[place + own];
    float2 most = *(const float2*)&m.piece_top[count & 3][0][own], last = *(const float2*)&m.top[buffer ^ 1][own];
    K3_UNROLL
    for (int i = 1; i < 4; ++i) {
      const float2 x = *(const float2*)&m.piece_top[count & 3][i][own];
      most = {fmaxf(most.x, x.x), fmaxf(most.y, x.y)};
    }
    if (first) last = {minus_infinity(), minus_infinity()};
    // Rounding keeps order: the largest product is that of the largest score.
    const float2 now{fmaxf(last.x, ceilf(most.x * own_scale.x)), fmaxf(last.y, ceilf(most.y * own_scale.y))};
    const float2 factor{power_of_two(last.x - now.x), power_of_two(last.y - now.y)}, own_shift{C::kShift - now.x, C::kShift - now.y};
    if (piece == 0 && has_tile) {
      *(float2*)&m.top[buffer][own] = now;
      *(float2*)&m.factor[buffer][own] = factor;
    }
    const bool changed = __any_sync(kFullWarp, (factor.x != 1.0f || factor.y != 1.0f) && !first);
    if (piece == 0 && lane == 0) m.rescale[buffer] = changed;
    __syncwarp();
    if (S::kSets > 1) warp_arrive(&m.top_full[buffer], lane);   // of all four: all have read the other set's m
    K3_UNROLL
    for (int n = 0; n < kUse; ++n) {
      const float2 scale = *(const float2*)&m.scale[place + n * 8 + 2 * t];
      float2 shift = own_shift;
      if (kUse > 1) shift = {__shfl_sync(kFullWarp, own_shift.x, n * 4 + t), __shfl_sync(kFullWarp, own_shift.y, n * 4 + t)};
      // Lane 4 g + t of 8 positions x 8 queries: position g, queries 2t and 2t + 1.
      m.weight[buffer][2 * piece][n][lane] = C::pack(C::weight(fmaf(s[n][0], scale.x, shift.x)), C::weight(fmaf(s[n][1], scale.y, shift.y)));
      m.weight[buffer][2 * piece + 1][n][lane] = C::pack(C::weight(fmaf(s[n][2], scale.x, shift.x)), C::weight(fmaf(s[n][3], scale.y, shift.y)));
    }
    if (edge) mla_clear_hidden<S>(m, c, page, m.item[k & 1], piece * kWarpSize + lane);
    fence_copies();
    __syncwarp();
    warp_arrive(&m.weight_full[buffer], lane);
  }
}

template <class S>
K3_DEVICE void mla_score(MlaSmem<S>& m, int set, int piece, int lane) {
  MlaCursor c{0, 0};
  u32 count = 0;
  for (int k = 0;; ++k) {
    barrier_wait(&m.item_full[k & 1], k / 2 & 1);
    const int columns = m.item[k & 1].columns;
    if (columns == 0) return;
    barrier_wait(&m.query_full[k & 1], k / 2 & 1);
    if (S::kFew < S::kTiles && columns <= 8 * S::kFew) mla_score_item<S, S::kFew>(m, k, set, piece, c, count, lane);
    else if (S::kFew < S::kMiddle && columns <= 8 * S::kMiddle) mla_score_item<S, S::kMiddle>(m, k, set, piece, c, count, lane);
    else mla_score_item<S, S::kTiles>(m, k, set, piece, c, count, lane);
    __syncwarp();
    warp_arrive(&m.query_empty[k & 1], lane);
    warp_arrive(&m.item_empty[k & 1], lane);
  }
}
