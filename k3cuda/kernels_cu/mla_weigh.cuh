// Latent attention's weighted latent: eight warps, and one for the weights' sums.
#pragma once
#include "mla_core.cuh"

// A warp's share of the products of a page, whose first piece is at `c`: its rows of the latent, kUse tiles of queries. `weights`: shared
// address. Pieces that nobody sees have weights 0, and the first stands for them. Few tiles: as mla_score_narrow.
template <class S, int kUse>
K3_DEVICE void mla_weigh_narrow(MlaSmem<S>& m, float (&o)[S::kOwnRowTiles][kUse][4], const u32 (&at)[S::kOwnRowTiles / S::kPair], const MlaCursor& c, u32 weights,
                                int pieces, int lane) {
  using C = typename S::Cache;
  MlaCursor p = c;
  uint4 w[kUse], raw;
  K3_UNROLL
  for (int piece = 0; piece < kMlaPage / 16; ++piece) {
    K3_UNROLL
    for (int n = 0; n < kUse; ++n)
      if (piece % 2 == 0) w[n] = load_matrices_transposed(weights + (piece * 2 + lane / 8) * (S::kTiles * 128) + n * 128 + lane % 8 * 16);
    if (piece) p.step<S::kRing>(1);
    if (piece >= pieces) p.at = c.at;
    K3_UNROLL
    for (int i = 0; i < S::kOwnRowTiles; ++i) {
      if (i % S::kPair == 0) raw = load_matrices_transposed(shared_address(m.ring[p.at]) + at[i / S::kPair]);
      const uint4 rows = C::columns(raw, i % S::kPair);
      K3_UNROLL
      for (int n = 0; n < kUse; ++n) C::multiply(o[i][n], rows, piece % 2 ? w[n].z : w[n].x, piece % 2 ? w[n].w : w[n].y);
    }
  }
}

// The same of any number of tiles; a branch around pieces that nobody sees would put an end to products under way.
template <class S, int kUse>
K3_DEVICE void mla_weigh_products(MlaSmem<S>& m, float (&o)[S::kOwnRowTiles][kUse][4], const u32 (&at)[S::kOwnRowTiles / S::kPair], const MlaCursor& c, u32 weights, int pieces, int lane) {
  using C = typename S::Cache;
  if constexpr (kUse <= S::kNarrow) return mla_weigh_narrow<S>(m, o, at, c, weights, pieces, lane);
  constexpr bool kShort = S::kSets > 1 && kUse > 4;   // of registers: sums take 96 of them
  constexpr int kOwn = S::kOwnRowTiles, kAll = 4 * kOwn, kBatch = kShort ? 1 : S::kPair, kUnderWay = kShort ? 1 : mla_under_way(kBatch);
  MlaCursor p = c;
  Columns<kUse> w;
  uint4 rows[kUnderWay][kBatch], raw;
  K3_UNROLL
  for (int l = 0; l < kAll; l += kBatch) {
    const int piece = l / kOwn, i = l % kOwn, slot = l / kBatch % kUnderWay;
    if (i == 0) {
      w = columns_by_column<kUse>(weights + piece * 2 * S::kTiles * 128, S::kTiles * 128, lane);
      if (piece) p.step<S::kRing>(1);
      if (piece >= pieces) p.at = c.at;
    }
    if (i % S::kPair == 0) raw = load_matrices_transposed(shared_address(m.ring[p.at]) + at[i / S::kPair]);
    next_rows<kUnderWay - 1>(rows[slot], raw, l >= kUnderWay * kBatch, [&](int b) { return C::columns(raw, (i + b) % S::kPair); });
    products_begin();
    K3_UNROLL
    for (int b = 0; b < kBatch; ++b) product<C::kF16, true>(o[i + b], rows[slot][b], w, true);
    products_end();
  }
  products_done(rows, o);
}

// A final result is divided and rounded as mla_combine does it, which has nothing to add here.
template <class S, int kUse>
K3_DEVICE void mla_finish(const MlaAttend& a, MlaSmem<S>& m, const MlaItem& item, int k, int own, const float (&o)[S::kOwnRowTiles][kUse][4], int lane) {
  using C = typename S::Cache;
  const int g = lane / 4, t = lane % 4;
  barrier_wait(&m.sum_full[k & 3], k / 4 & 1);
  bf16* to = a.out + (size_t(item.run) * S::kHeads + item.first) * S::kLatent;
  K3_UNROLL
  for (int n = 0; n < kUse; ++n)
    K3_UNROLL
    for (int j = 0; j < 2; ++j) {
      const int column = n * 8 + 2 * t + j;
      if (column >= item.columns) continue;
      const float w = divide(a.cache_scale, m.result[k & 3][column].y);
      K3_UNROLL
      for (int i = 0; i < S::kOwnRowTiles; ++i) {
        if (S::kLatent % 512 && own + i >= S::kLatent / 16) break;
        const float x = (o[i][n][j] + 0.0f) * w, y = (o[i][n][2 + j] + 0.0f) * w;
        bf16* row = to + size_t(column) * S::kLatent;
        if constexpr (C::kBytes == 1) {
          *(u32*)(row + C::dim(own + i, g)) = pack_bf16(x, y);
        } else {
          row[C::dim(own + i, g)] = float_to_bf16(x);
          row[C::dim(own + i, g + 8)] = float_to_bf16(y);
        }
      }
    }
}

template <class S, int kUse>
K3_DEVICE void mla_store_partial(const MlaAttend& a, const MlaItem& item, int own, const float (&o)[S::kOwnRowTiles][kUse][4], int lane) {
  using C = typename S::Cache;
  float* to = a.partial + size_t(item.partial) * S::kLatent;
  K3_UNROLL
  for (int i = 0; i < S::kOwnRowTiles; ++i) {
    if (S::kLatent % 512 && own + i >= S::kLatent / 16) break;
    const int here = not_before_here(lane), g = here / 4, t = here % 4;   // anew for each tile: the addresses of all columns would be kept for the next
    K3_UNROLL
    for (int n = 0; n < kUse; ++n)
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

template <class S, int kUse>
K3_DEVICE void mla_weigh_item(const MlaAttend& a, MlaSmem<S>& m, int k, int warp, MlaCursor& c, u32& count, int lane) {
  constexpr int kLoads = S::kOwnRowTiles / S::kPair;
  const int t = lane % 4, own = warp * S::kOwnRowTiles;
  u32 at[kLoads];
  K3_UNROLL
  for (int i = 0; i < kLoads; ++i)   // a warp beyond the latent values multiplies the first ones for nothing
    at[i] = S::swizzle(lane % 16 * S::kRowBytes + lane / 16 * 16 + (own + i * S::kPair < S::kRowTiles ? own / S::kPair + i : 0) * 32);
  float o[S::kOwnRowTiles][kUse][4] = {};
  const int end = m.item[k & 1].end;
  for (int page = m.item[k & 1].begin; page < end; page += kMlaPage, ++count) {
    const int buffer = count & 1, pieces = mla_pieces(page, end);
    barrier_wait(&m.weight_full[buffer], count / 2 & 1);
    if (m.rescale[buffer])
      K3_UNROLL
      for (int n = 0; n < kUse; ++n) {
        const float2 f = *(const float2*)&m.factor[buffer][n * 8 + 2 * t];
        K3_UNROLL
        for (int i = 0; i < S::kOwnRowTiles; ++i) {
          o[i][n][0] *= f.x;
          o[i][n][1] *= f.y;
          o[i][n][2] *= f.x;
          o[i][n][3] *= f.y;
        }
      }
    // The weights' barrier says that the rows have landed, too.
    const u32 weights = shared_address(m.weight[buffer]);
    mla_weigh_products<S, kUse>(m, o, at, c, weights, pieces, lane);
    __syncwarp();
    MlaCursor mine = c;
#ifdef K3_SANITIZE
    for (int piece = 0; piece < pieces; ++piece, mine.step<S::kRing>(1)) warp_arrive(&m.empty[mine.at], lane);
#else   // a lane for each piece says that the warp has left it
    mine.step<S::kRing>(lane % 4);
    if (lane < pieces) barrier_arrive(&m.empty[mine.at]);
#endif
    warp_arrive(&m.weight_empty[buffer], lane);
    c.step<S::kRing>(pieces);
  }
  // What is needed only now is read only now: registers are short above.
  const MlaItem& item = m.item[k & 1];
  if (item.end <= item.begin) return;   // no row of the group reaches the run's last chunk
  if (!S::kPartial && item.chunks == 1) mla_finish<S, kUse>(a, m, item, k, own, o, lane);
  else mla_store_partial<S, kUse>(a, item, own, o, lane);
}

template <class S>
K3_DEVICE void mla_weigh(const MlaAttend& a, MlaSmem<S>& m, int warp, int lane) {
  MlaCursor c{0, 0};
  u32 count = 0;
  for (int k = 0;; ++k) {
    barrier_wait(&m.item_full[k & 1], k / 2 & 1);
    const int columns = m.item[k & 1].columns;
    if (columns == 0) return;
    if (S::kFew < S::kTiles && columns <= 8 * S::kFew) mla_weigh_item<S, S::kFew>(a, m, k, warp, c, count, lane);
    else if (S::kFew < S::kMiddle && columns <= 8 * S::kMiddle) mla_weigh_item<S, S::kMiddle>(a, m, k, warp, c, count, lane);
    else mla_weigh_item<S, S::kTiles>(a, m, k, warp, c, count, lane);
    __syncwarp();
    warp_arrive(&m.item_empty[k & 1], lane);
  }
}

// Adds the weights of every query up: products with ones, so that sums and weighted latents see the same weights in the same order. One warp.
template <class S>
K3_DEVICE void mla_sum(const MlaAttend& a, MlaSmem<S>& m, int lane) {
  using C = typename S::Cache;
  constexpr int kBeside = S::kTiles % 2 ? 1 : 2;     // chains at a time
  u32 count = 0;
  for (int k = 0;; ++k) {
    barrier_wait(&m.item_full[k & 1], k / 2 & 1);
    const MlaItem& item = m.item[k & 1];
    if (item.columns == 0) return;
    const int tiles = (item.columns + 7) / 8;
    for (int page = item.begin, end = item.end; page < end; page += kMlaPage, ++count) {
      const int buffer = count & 1, t = lane % 4;
      barrier_wait(&m.weight_full[buffer], count / 2 & 1);
      const u32 weights = shared_address(m.weight[buffer]) + lane / 8 % 2 * (S::kTiles * 128) + lane % 8 * 16;
      K3_ROLLED
      for (int n = 0; n < tiles; n += kBeside) {
        float c[kBeside][4] = {};                    // every row is the same sum
        if (page != item.begin)
          K3_UNROLL
          for (int i = 0; i < kBeside; ++i)
            K3_UNROLL
            for (int j = 0; j < 2; ++j) c[i][j] = m.result[k & 3][(n + i) * 8 + 2 * t + j].y * m.factor[buffer][(n + i) * 8 + 2 * t + j];
        K3_ROLLED
        for (int piece = 0; piece < mla_pieces(page, end); ++piece)
          K3_UNROLL
          for (int i = 0; i < kBeside; ++i) {
            const uint4 v = load_matrices_transposed(weights + piece * 2 * S::kTiles * 128 + (n + i) * 128);
            C::multiply(c[i], {C::kOnes, C::kOnes, C::kOnes, C::kOnes}, v.x, v.y);
          }
        __syncwarp();
        if (lane < 4)
          K3_UNROLL
          for (int i = 0; i < kBeside; ++i)
            K3_UNROLL
            for (int j = 0; j < 2; ++j) m.result[k & 3][(n + i) * 8 + 2 * t + j] = {m.top[buffer][(n + i) * 8 + 2 * t + j], c[i][j]};
      }
      __syncwarp();
      warp_arrive(&m.weight_empty[buffer], lane);
    }
    warp_arrive(&m.sum_full[k & 3], lane);
    if ((S::kPartial || item.chunks > 1) && item.end > item.begin)
      K3_ROLLED
      for (int column = lane; column < item.columns; column += kWarpSize)
        a.top_sum[item.partial + column] = m.result[k & 3][column];
    __syncwarp();
    warp_arrive(&m.item_empty[k & 1], lane);
  }
}
