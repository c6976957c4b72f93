// The arithmetic of mla_core.cuh: scores and weights, weighted latent, and the block that runs all roles.
#pragma once
#include "mla_core.cuh"

// Registers a thread of the score warps where 6 tiles of queries do not fit 128; with the producers' 56 and twice the rest they make
// 512. The newer line of chips needs more of them here for an e4m3 cache: found by compiling without spills.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
template <class S> constexpr int kMlaScoreRegs = S::Cache::kBytes == 1 ? 152 : 136;
#else
template <class S> constexpr int kMlaScoreRegs = 136;
#endif

// Clears what not all of the group's rows see: rows behind the last position, and what is not finite in the rows before it. Their
// weight is 0, and 0 times NaN would reach everyone. Rows that do see it have NaN weights by then, so they stay NaN.
template <class S>
K3_DEVICE void mla_clear_hidden(MlaSmem<S>& m, const MlaCursor& c, int page, const MlaItem& item, int thread) {
  constexpr int kUnits = S::kRowBytes / 16;
  const int first = max(item.low + 1 - page, 0), unseen = item.end - page;   // rows from `unseen` on lie behind the last position
  for (int i = thread; i < (kMlaPage - first) * kUnits; i += 64) {
    const int row = first + i / kUnits, at = c.at + row / 16;
    u8* piece = m.ring[at >= S::kRing ? at - S::kRing : at];
    uint4* unit = (uint4*)(piece + S::swizzle(row % 16 * S::kRowBytes + i % kUnits * 16));
    if (row >= unseen) {
      *unit = {0, 0, 0, 0};
    } else {
      const uint4 v = *unit, keep{S::Cache::finite(v.x), S::Cache::finite(v.y), S::Cache::finite(v.z), S::Cache::finite(v.w)};
      if ((keep.x & keep.y & keep.z & keep.w) != ~0u) *unit = {v.x & keep.x, v.y & keep.y, v.z & keep.z, v.w & keep.w};
    }
  }
  fence_copies();
}

// Warp 0 or 1 (`half` of a page) of pair `set`, which has every other page. m runs through the pages: a pair takes it from the other.
template <class S>
K3_DEVICE void mla_score(const MlaAttend& a, MlaSmem<S>& m, int set, int half) {
  using C = typename S::Cache;
  const int lane = lane_id(), g = lane / 4, t = lane % 4;
  MlaCursor c{0, 0};
  u32 count = 0;
  for (int k = 0;; ++k) {
    barrier_wait(&m.item_full[k & 1], k / 2 & 1);
    const MlaItem item = m.item[k & 1];
    __syncwarp();
    if (lane == 0) barrier_arrive(&m.item_empty[k & 1]);
    if (item.columns == 0) return;
    const int b = k % S::kQueryBuffers;
    barrier_wait(&m.query_full[b], k / S::kQueryBuffers & 1);
    for (int page = item.begin; page < item.end; page += kMlaPage, c.step<S::kRing>(4), ++count) {
      if ((count & 1) != set) continue;
      float s[S::kPieces][S::kTiles][4] = {};
      u32 from[S::kPieces];
      K3_UNROLL
      for (int i = 0; i < S::kPieces; ++i) {
        MlaCursor p = c;
        p.step<S::kRing>(half * S::kPieces + i);
        barrier_wait(&m.full[p.at], p.parity);
        from[i] = shared_address(m.ring[p.at]) + lane % 16 * S::kRowBytes + lane / 16 * 16;
      }
      K3_UNROLL
      for (int step = 0; step < S::kKSteps; step += 2) {
        uint4 rows[S::kPieces][2];
        K3_UNROLL
        for (int i = 0; i < S::kPieces; ++i) {
          if constexpr (S::kPair == 2) {
            C::rows(load_matrices(S::swizzle(from[i] + step * 16)), rows[i]);
          } else {
            rows[i][0] = load_matrices(S::swizzle(from[i] + step * 32));
            rows[i][1] = load_matrices(S::swizzle(from[i] + step * 32 + 32));
          }
        }
        K3_UNROLL
        for (int n = 0; n < S::kTiles; ++n) {
          const uint4 q = m.query[b][step / 2][n][lane];
          K3_UNROLL
          for (int i = 0; i < S::kPieces; ++i) C::multiply(s[i][n], rows[i][0], q.x, q.y);
          K3_UNROLL
          for (int i = 0; i < S::kPieces; ++i) C::multiply(s[i][n], rows[i][1], q.z, q.w);
        }
      }
      const bool edge = page + kMlaPage - 1 > item.low;            // some row does not see all of the page
      if (edge)
        K3_UNROLL
        for (int n = 0; n < S::kTiles; ++n)
          K3_UNROLL
          for (int j = 0; j < 4; ++j) {
            const int limit = m.limit[b][n * 8 + 2 * t + j % 2];
            K3_UNROLL
            for (int i = 0; i < S::kPieces; ++i)
              if (page + (half * S::kPieces + i) * 16 + j / 2 * 8 + g > limit) s[i][n][j] = minus_infinity();
          }
      K3_UNROLL
      for (int n = 0; n < S::kTiles; ++n) {
        float v[2];
        K3_UNROLL
        for (int j = 0; j < 2; ++j) {
          v[j] = fmaxf(fmaxf(s[0][n][j], s[0][n][2 + j]), fmaxf(s[1][n][j], s[1][n][2 + j]));
          K3_UNROLL
          for (int d = 4; d < kWarpSize; d *= 2) v[j] = fmaxf(v[j], __shfl_xor_sync(kFullWarp, v[j], d));
        }
        if (g == 0) *(float2*)&m.half_top[count & 3][half][n * 8 + 2 * t] = {v[0], v[1]};
      }
      named_barrier(3 + set, 64);
      if (count) barrier_wait(&m.top_full[set ^ 1], (count - 1) / 2 & 1);
      barrier_wait(&m.weight_empty[set], count / 2 & 1 ^ 1);
      bool changed = false;
      float2 shift[S::kTiles];
      K3_UNROLL
      for (int n = 0; n < S::kTiles; ++n) {
        const int column = n * 8 + 2 * t;
        const float2 scale = *(const float2*)&m.scale[b][column], x = *(const float2*)&m.half_top[count & 3][0][column],
                     y = *(const float2*)&m.half_top[count & 3][1][column];
        float2 last = *(const float2*)&m.top[set ^ 1][column];
        if (page == item.begin) last = {minus_infinity(), minus_infinity()};
        // Rounding keeps order: the largest product is that of the largest score.
        const float2 now{fmaxf(last.x, ceilf(fmaxf(x.x, y.x) * scale.x)), fmaxf(last.y, ceilf(fmaxf(x.y, y.y) * scale.y))};
        const float2 factor{power_of_two(last.x - now.x), power_of_two(last.y - now.y)};
        changed |= factor.x != 1.0f || factor.y != 1.0f;
        shift[n] = {C::kShift - now.x, C::kShift - now.y};
        if (half == 0 && g == 0) {
          *(float2*)&m.top[set][column] = now;
          *(float2*)&m.factor[set][column] = factor;
          if (page + kMlaPage >= item.end)
            for (int j = 0; j < 2; ++j)
              if (column + j < item.columns) a.top_sum[size_t(item.partial) * S::kColumns + column + j].x = j ? now.y : now.x;
        }
      }
      changed = __any_sync(kFullWarp, changed);
      if (half == 0 && lane == 0) m.rescale[set] = changed;
      __syncwarp();
      if (lane == 0) barrier_arrive(&m.top_full[set]);             // of both warps: both have read the other pair's m
      K3_UNROLL
      for (int n = 0; n < S::kTiles; ++n) {
        const float2 scale = *(const float2*)&m.scale[b][n * 8 + 2 * t];
        K3_UNROLL
        for (int i = 0; i < S::kPieces; ++i) {
          u32 lo = C::pack(exp2f(fmaf(s[i][n][0], scale.x, shift[n].x)), exp2f(fmaf(s[i][n][1], scale.y, shift[n].y)));
          u32 hi = C::pack(exp2f(fmaf(s[i][n][2], scale.x, shift[n].x)), exp2f(fmaf(s[i][n][3], scale.y, shift[n].y)));
          m.weight[set][half * S::kPieces + i][n][lane] = {transpose_matrix(lo), transpose_matrix(hi)};
        }
      }
      if (edge) mla_clear_hidden<S>(m, c, page, item, half * kWarpSize + lane);
      __syncwarp();
      if (lane == 0) barrier_arrive(&m.weight_full[set]);
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(&m.query_empty[b]);
  }
}

template <class S>
K3_DEVICE void mla_weigh(const MlaAttend& a, MlaSmem<S>& m, int warp) {
  using C = typename S::Cache;
  const int lane = lane_id(), g = lane / 4, t = lane % 4, own = warp * S::kOwnRowTiles;
  MlaCursor c{0, 0};
  u32 page_count = 0, at[S::kOwnRowTiles / S::kPair];
  K3_UNROLL
  for (int i = 0; i < S::kOwnRowTiles / S::kPair; ++i)
    at[i] = S::swizzle(lane % 16 * S::kRowBytes + lane / 16 * 16 + (own / S::kPair + i) * 32);
  for (int k = 0;; ++k) {
    barrier_wait(&m.item_full[k & 1], k / 2 & 1);
    const MlaItem item = m.item[k & 1];
    __syncwarp();
    if (lane == 0) barrier_arrive(&m.item_empty[k & 1]);
    if (item.columns == 0) return;
    float o[S::kOwnRowTiles][S::kTiles][4] = {}, sum[4] = {};   // sum: of tile `warp` of the queries
    for (int page = item.begin; page < item.end; page += kMlaPage, ++page_count) {
      const int buffer = page_count & 1;
      barrier_wait(&m.weight_full[buffer], page_count / 2 & 1);
      if (page != item.begin && m.rescale[buffer]) {
        K3_UNROLL
        for (int n = 0; n < S::kTiles; ++n) {
          const float2 f = *(const float2*)&m.factor[buffer][n * 8 + 2 * t];
          K3_UNROLL
          for (int i = 0; i < S::kOwnRowTiles; ++i) {
            o[i][n][0] *= f.x;
            o[i][n][1] *= f.y;
            o[i][n][2] *= f.x;
            o[i][n][3] *= f.y;
          }
          if (n == warp) sum[0] *= f.x, sum[1] *= f.y;
        }
      }
      // The weights' barrier says that the rows have landed, too. Where registers allow, a piece is loaded under the products before.
      constexpr int kLoads = S::kOwnRowTiles / S::kPair, kAhead = S::kTiles > 3 ? 0 : 1;
      uint4 raw[kAhead + 1][kLoads];
      uint2 w[kAhead + 1][S::kTiles];
      auto load = [&](int piece, int at_piece, int h) {
        const u32 from = shared_address(m.ring[at_piece]);
        K3_UNROLL
        for (int n = 0; n < S::kTiles; ++n) w[h][n] = m.weight[buffer][piece][n][lane];
        K3_UNROLL
        for (int i = 0; i < kLoads; ++i)
          if (S::kRowTiles % (8 * S::kPair) == 0 || own + i * S::kPair < S::kRowTiles) raw[h][i] = load_matrices_transposed(from + at[i]);
      };
      if (kAhead) load(0, c.at, 0);
      K3_UNROLL
      for (int piece = 0; piece < 4; ++piece) {
        MlaCursor next = c;
        next.step<S::kRing>(1);
        const int h = kAhead ? piece & 1 : 0;
        if (!kAhead) load(piece, c.at, 0);
        else if (piece < 3) load(piece + 1, next.at, kAhead - h);
        K3_UNROLL
        for (int i = 0; i < kLoads; ++i) {
          if (S::kRowTiles % (8 * S::kPair) && own + i * S::kPair >= S::kRowTiles) break;
          uint4 rows[S::kPair];
          C::columns(raw[h][i], rows);
          K3_UNROLL
          for (int r = 0; r < S::kPair; ++r)
            K3_UNROLL
            for (int n = 0; n < S::kTiles; ++n) C::multiply(o[i * S::kPair + r][n], rows[r], w[h][n].x, w[h][n].y);
        }
        K3_UNROLL
        for (int n = 0; n < S::kTiles; ++n)
          if (n == warp) C::multiply(sum, {C::kOnes, C::kOnes, C::kOnes, C::kOnes}, w[h][n].x, w[h][n].y);
        __syncwarp();
        if (lane == 0) barrier_arrive(&m.empty[c.at]);
        c = next;
      }
      if (lane == 0) barrier_arrive(&m.weight_empty[buffer]);
    }
    if (g == 0 && warp < S::kTiles && item.end > item.begin)
      for (int j = 0; j < 2; ++j)
        if (warp * 8 + 2 * t + j < item.columns) a.top_sum[size_t(item.partial) * S::kColumns + warp * 8 + 2 * t + j].y = j ? sum[1] : sum[0];
    float* to = a.partial + size_t(item.partial) * S::kColumns * S::kLatent;
    K3_UNROLL
    for (int i = 0; i < S::kOwnRowTiles; ++i) {
      if (S::kLatent % 512 && own + i >= S::kLatent / 16) break;
      K3_UNROLL
      for (int n = 0; n < S::kTiles; ++n)
        K3_UNROLL
        for (int j = 0; j < 2; ++j) {
          const int column = n * 8 + 2 * t + j;
          if (column >= item.columns) continue;
          float* row = to + size_t(column) * S::kLatent;
          if constexpr (C::kBytes == 1) {
            *(float2*)(row + C::dim(own + i, g)) = {o[i][n][j], o[i][n][2 + j]};
          } else {
            row[C::dim(own + i, g)] = o[i][n][j];
            row[C::dim(own + i, g + 8)] = o[i][n][2 + j];
          }
        }
    }
  }
}

// A block of S::kThreads threads; any number of blocks, one an SM by its shared memory. `ready` returns when the step's cache rows
// and queries are written; the rows' own tables are inputs of the step and read before it.
template <class S, class Ready>
K3_DEVICE void mla_attend(const MlaAttend& a, MlaSmem<S>& m, Ready ready) {
  const int warp = warp_id();
  if (warp == 0) mla_plan<S::kHeads, S::kColumns>(a.rows, m.work);
  if (threadIdx.x == kWarpSize) {
    for (int i = 0; i < S::kRing; ++i) {
      barrier_init(&m.full[i], 1);
      barrier_init(&m.empty[i], 8);
    }
    for (int i = 0; i < 2; ++i) {
      barrier_init(&m.weight_full[i], 2);
      barrier_init(&m.top_full[i], 2);
      barrier_init(&m.weight_empty[i], 8);
      barrier_init(&m.item_full[i], 1);
      barrier_init(&m.item_empty[i], 15);
      barrier_init(&m.query_full[i], 3);
      barrier_init(&m.query_empty[i], 4);
    }
    barrier_fence_init();
  }
  __syncthreads();
  ready();
  if (blockIdx.x == 0 && threadIdx.x < a.rows.rows && m.work.slot[threadIdx.x] >= 0) mla_row_info(m.work, threadIdx.x, a.info);
  if (warp && int(blockIdx.x) < mla_items(m.work)) {               // nobody waits for the first queries longer than for the first page
    mla_load_queries<S, (S::kColumns + 14) / 15>(a, m, mla_item<S::kHeads, S::kColumns>(m.work, blockIdx.x), 0, warp - 1, 15);
    named_barrier(2, 15 * kWarpSize);
  }
  if (warp < 4) {
    if constexpr (S::kMoveRegisters) give_registers<56>();
    if (warp == 0) mla_produce<S>(a, m);
    else mla_prepare<S>(a, m, warp - 1);
  } else if (warp < 8) {
    if constexpr (S::kMoveRegisters) take_registers<kMlaScoreRegs<S>>();
    mla_score<S>(a, m, warp % 4 / 2, warp % 2);
  } else {
    if constexpr (S::kMoveRegisters) take_registers<(512 - 56 - kMlaScoreRegs<S>) / 2>();
    mla_weigh<S>(a, m, warp - 8);
  }
}
