// Latent attention of a step's rows over the paged cache: every chunk of the context gives, for each query (row, head), a maximum, a
// sum and an unnormalised weighted latent; mla_combine.cuh adds chunks up. Numerics, all of them fixed by position alone:
//  * scores: q . row is one chain of products, 16 dims a step, rising; weights 2^(score - m) with m a whole number, the running maximum
//    rounded up page by page, so that rescaling is a power of two and exact whenever it happens;
//  * weighted latent: one chain of products through a chunk, 16 positions a step, rising; sum: the same chain over ones.
// A piece of 16 positions that no query of a group sees is left out everywhere: it would add exact zeros.
//
// Cache rows are the wide operand of the products (16 positions, or 16 latent values), queries the narrow one (8 columns), so a page
// is read once for all queries of a group. One warp copies pages into a ring of 16-row pieces by the copy engine, since copies by the
// threads would clog the very pipe that loads the fragments; in memory rows lie as fragments want them (mla_swizzle). Four warps are one
// set that makes scores and weights, a piece of a page each; where registers allow, two sets take turns by pages.
// Eight warps make the weighted latent, 1/8 of its values each, one warp the sums.
//
// An e4m3 cache row is multiplied in FP16, which holds it exactly. The query, BF16, is scaled by a power of two to at most 2^15: what
// of it falls below FP16's range is under 2^-39 of its largest value. Weights then have 11 bits instead of BF16's 8.
#pragma once
#include "mla_products.cuh"
#include "mla_work.cuh"

struct MlaBf16 {
  static constexpr int kBytes = 2, kSteps = 1;      // k-steps of 16 dims, or tiles of 16 dims, in two 16-byte units of a row
  static constexpr bool kF16 = false;
  static constexpr u32 kOnes = 0x3f803f80u;
  static constexpr float kShift = 0;                // log2 of the largest weight
  K3_DEVICE static void multiply(float (&c)[4], const uint4& a, u32 b0, u32 b1) { mma(c, a, b0, b1); }
  K3_DEVICE static uint4 rows(const uint4& v, int) { return v; }
  // Transposed: matrices are (positions 0-7, dims 0-7), (8-15, 0-7), (0-7, 8-15), (8-15, 8-15).
  K3_DEVICE static uint4 columns(const uint4& v, int) { return {v.x, v.z, v.y, v.w}; }
  K3_DEVICE static u32 pack(float lo, float hi) { return pack_bf16(lo, hi); }
  K3_DEVICE static float weight(float x) { return exp2f(x); }
  // Eight values of a query, dims 8 half to + 7 of a k-step, into the 32 bytes at `at` of a tile of columns.
  K3_DEVICE static void store_query(u8* tile, u32 at, int half, const u32 (&v)[4]) { *(uint4*)(tile + column_swizzle(at + half * 16)) = {v[0], v[1], v[2], v[3]}; }
  // Latent value of row `g` (0-15) of product tile `i`.
  K3_DEVICE static int dim(int tile, int g) { return tile * 16 + g; }
  // Bits of `v` that belong to finite values.
  K3_DEVICE static u32 finite(u32 v) {
    u32 bad = (v & 0x7f807f80u) + 0x00800080u & 0x80008000u;
    return ~(bad | (bad - (bad >> 15)));
  }
};

struct MlaE4m3 {
  static constexpr int kBytes = 1, kSteps = 2;
  static constexpr bool kF16 = true;
  static constexpr u32 kOnes = 0x3c003c00u;
  static constexpr float kShift = 14;
  K3_DEVICE static void multiply(float (&c)[4], const uint4& a, u32 b0, u32 b1) { mma_f16(c, a, b0, b1); }
  // A register holds four dims of one position: the first two stand at k = 2t, the others at 2t + 8. Two k-steps.
  K3_DEVICE static uint4 rows(const uint4& v, int step) {
    uint4 a;
    unpack_e4m3(step ? v.z : v.x, a.x, a.z);
    unpack_e4m3(step ? v.w : v.y, a.y, a.w);
    return a;
  }
  // Transposed, a register holds dims 2g, 2g + 1 of two positions: row g takes the even one, row g + 8 the odd one. Two tiles of rows.
  K3_DEVICE static uint4 columns(const uint4& v, int tile) {
    uint4 a;
    unpack_e4m3(__byte_perm(tile ? v.z : v.x, 0, 0x3120), a.x, a.y);
    unpack_e4m3(__byte_perm(tile ? v.w : v.y, 0, 0x3120), a.z, a.w);
    return a;
  }
  K3_DEVICE static u32 pack(float lo, float hi) { return pack_f16(lo, hi); }
  K3_DEVICE static float weight(float x) { return exp2_normal(x); }   // what it leaves out is 0 in FP16
  K3_DEVICE static float query_scale(float largest) {   // brings the largest value to [2^14, 2^15)
    int e = int(__float_as_uint(largest) >> 23) - 127;
    return e < -100 || e > 100 ? 1 : __uint_as_float(u32(127 + 14 - e) << 23);
  }
  // In the order of `rows`.
  K3_DEVICE static void store_query(u8* tile, u32 at, int half, const u32 (&v)[4]) {
    *(uint2*)(tile + column_swizzle(at + half * 8)) = {v[0], v[2]};
    *(uint2*)(tile + column_swizzle(at + half * 8 + 16)) = {v[1], v[3]};
  }
  K3_DEVICE static int dim(int tile, int g) { return tile * 16 + g % 8 * 2 + g / 8; }
  K3_DEVICE static u32 finite(u32 v) {
    u32 bad = (v & 0x7f7f7f7fu) + 0x01010101u & 0x80808080u;
    return ~(bad | (bad - (bad >> 7)));
  }
};

// Whether a block of few queries leaves registers and shared memory for one of mla_combine, which then is there when the last page is done, and for one of
// the kernel before it.
// Tiles of queries that mma.sync multiplies on sm_90a too: a wgmma of 8 or 16 columns takes as long as one of 32, 40 cycles in a chain alone and 60 beside
// those of three other groups of warps, and its rows must be waited for. The bytes are the same.
constexpr int kMlaNarrow = 2;
constexpr bool mla_beside(int tiles) { return kMlaWgmma && tiles == 1; }
constexpr int kMlaBesideBytes = 20 * 1024;

// Sets of score warps: one where columns fill registers, which wgmma's don't.
constexpr int mla_sets(int tiles) { return kMlaWgmma || tiles <= 2 ? 2 : 1; }

// kTiles: tiles of 8 queries a group holds (1, 2, 3, 4 or 6). kRing: pieces of 16 cache rows in shared memory, at least a page and, for scores of one
// page beside weights of the one before, two. kSets: sets of score warps. kQueryTiles: tiles of queries that have room, of two groups where there is
// room for two.
template <class Cache_, int kHeads_, int kLatent_, int kRope_, int kTiles_, int kRing_, int kSets_ = mla_sets(kTiles_), int kQueryTiles_ = (kTiles_ > 3 ? kTiles_ : 2 * kTiles_)>
struct MlaShape {
  using Cache = Cache_;
  static constexpr int kHeads = kHeads_, kLatent = kLatent_, kDim = kLatent_ + kRope_, kTiles = kTiles_, kRing = kRing_;
  static constexpr int kColumns = 8 * kTiles;
  static constexpr bool kTight = false;           // registers are short: addresses are not computed ahead
  static constexpr int kNarrow = kMlaNarrow;
  static constexpr bool kPartial = false;         // whether results stay partial also where a run has one chunk (mla_own.cuh)
  static constexpr int kSets = kSets_, kWeighers = 4 + 4 * kSets, kWarps = kWeighers + 8, kThreads = kWarps * kWarpSize;   // kWeighers: their first warp
  static constexpr int kKSteps = kDim / 16, kPair = Cache::kSteps;
  static constexpr int kBeside = mla_beside(kTiles) ? 1024 - kThreads : 0;   // 64 registers a thread, the others for a block of another kernel
  // A group of fewer tiles is multiplied by itself where that saves something: of the queries of a row alone, and of two tiles.
  static constexpr int kHeadTiles = (kHeads + 7) / 8, kOfRow = kHeadTiles < kTiles && kHeadTiles != 5 ? kHeadTiles : 2;
  static constexpr int kFew = kTiles > 3 ? (kOfRow < 2 ? kOfRow : 2) : kTiles, kMiddle = kTiles > 3 ? (kOfRow < 2 ? 2 : kOfRow) : kTiles;
  K3_DEVICE static MlaWidths widths() { return {{8 * kFew, 8 * kMiddle, kColumns}}; }
  static constexpr int kRowBytes = kDim * Cache::kBytes, kPiece = 16 * kRowBytes;
  static constexpr int kRowTiles = (kLatent / 16 + kPair - 1) / kPair * kPair, kOwnRowTiles = (kRowTiles / kPair + 7) / 8 * kPair;
  static constexpr bool kMoveRegisters = kTiles > (kSets > 1 ? 3 : 4);
  // Queries of two groups lie in shared memory, the next one's already while one is scored, where both fit.
  static constexpr int kQueryTiles = kQueryTiles_, kQueryColumns = 8 * kQueryTiles;
  static constexpr u32 kQueryBlock = kQueryTiles * kColumnTile;   // 64 dims of all of them
  static_assert(kDim % 64 == 0 && kLatent % 16 == 0, "whole blocks and tiles");
  static_assert(kRing >= 4 && kQueryTiles >= kTiles && kQueryTiles >= 2, "a page and a group fit; half of the queries' room is whole tiles");
  K3_DEVICE static u32 swizzle(u32 at) { return mla_swizzle<Cache::kBytes>(at); }
  K3_DEVICE static bool whole(int columns) { return columns > kQueryColumns / 2; }   // a group that needs all of it
};

template <class S>
struct MlaSmem {
  u8 ring[S::kRing][S::kPiece];
  u8 query[S::kDim / 64][S::kQueryTiles][kColumnTile];
  u32 weight[2][8][S::kTiles][kWarpSize];      // 8 positions x 8 queries each
  float piece_top[4][4][S::kColumns];          // largest score of a piece, four pages in turn
  float top[2][S::kColumns];                   // m behind a page
  float factor[2][S::kColumns];                // what the page asks older sums to be multiplied with
  float scale[S::kQueryColumns];               // of a score, to base 2
  int limit[S::kQueryColumns];                 // last position the query sees
  float2 result[4][S::kColumns];               // m and sum behind an item, four items in turn
  int rescale[2];                              // any factor is not 1
  MlaWork work;
  MlaItem item[2], first;                      // the block's own first item, too
  static constexpr int kBarriers = 2 * S::kRing + 18;   // from here on
  u64 full[S::kRing], empty[S::kRing], top_full[2], weight_full[2], weight_empty[2], item_full[2], item_empty[2], query_full[2], query_empty[2], sum_full[4];
};

// As many pieces of the cache in flight as `kBytes` of shared memory hold; a piece comes with two barriers. Where wide rows leave no room for a
// page beside the queries, fewer of these go together.
template <class Cache, int kHeads, int kLatent, int kRope, int kTiles, int kBytes>
struct MlaFit {
  template <int kRing> using With = MlaShape<Cache, kHeads, kLatent, kRope, kTiles, kRing>;
  static constexpr int kPieceBytes = With<8>::kPiece + 16, kRest = sizeof(MlaSmem<With<8>>) - 8 * kPieceBytes + (mla_beside(kTiles) ? kMlaBesideBytes : 0);
  static constexpr int kFit = (kBytes - kRest) / kPieceBytes;
  template <bool kFits, class = void> struct Or { using Shape = With<(kFit < 24 ? kFit : 24)>; };
  template <class Unused> struct Or<false, Unused> { using Shape = typename MlaFit<Cache, kHeads, kLatent, kRope, (kTiles > 4 ? 4 : kTiles - 1), kBytes>::Shape; };
  using Shape = typename Or<(kFit >= kMlaPage / 16)>::Shape;
};

struct MlaAttend {
  MlaRows rows;
  const bf16* query;         // [rows][heads][dim]
  const void* cache;         // the layer's: [pages][64][dim], values where mla_cache_at says
  float score_scale;         // qk_head_dim^-1/2 log2(e)
  float cache_scale;         // what a stored value is multiplied with
  float* partial;            // [partials][latent]; of a run by chunk, row and head
  float2* top_sum;           // [partials]: m, sum
  int* next;                 // 0 before the launch; mla_combine puts it back
  bf16* out;                 // [rows][heads][latent]: of rows with one chunk
};

K3_DEVICE float minus_infinity() { return __uint_as_float(0xff800000u); }

// 2^d for whole d <= 0; zero below the normal numbers.
K3_DEVICE float power_of_two(float d) { return d < -126.0f ? 0.0f : __uint_as_float(u32(127 + int(d)) << 23); }

// Pieces of the page at `page` that some query sees.
K3_DEVICE int mla_pieces(int page, int end) { return min((end - page + 15) / 16, kMlaPage / 16); }

struct MlaCursor {           // a place in the ring
  int at;
  u32 parity;
  template <int kRing> K3_DEVICE void step(int n) {
    at += n;
    if (at >= kRing) at -= kRing, parity ^= 1;
  }
};

// Pieces of the block's first item that are copied before the step's queries are there: those that no row of the step writes, and not so
// many that they would delay what makes the queries, or not fit.
constexpr int kMlaAhead = 8;
template <class S, bool kEarly>
K3_DEVICE int mla_ahead(const MlaWork& w, const MlaItem& item) {
  return !kEarly ? 0 : min(max(w.position[item.run] - item.begin, 0) / 16, S::kRing < kMlaAhead ? S::kRing : kMlaAhead);
}

// Who attends: all threads of a kernel's block; the kernel's blocks take items as they come; queries lie in memory.
struct MlaBlock : WholeBlock {
  K3_DEVICE int number() const { return blockIdx.x; }
  K3_DEVICE int blocks() const { return gridDim.x; }
  // The item behind item `index`. No sooner than it is needed: who reserves ahead takes from those who are done.
  K3_DEVICE int next(const MlaAttend& a, int, int items) const {
    return items <= blocks() ? items : blocks() + __shfl_sync(kFullWarp, lane() == 0 ? atomicAdd(a.next, 1) : 0, 0);
  }
  // Vector unit(j) of query query(j), a row's and head's, for every j with wants(j); else zeros. kUnits: vectors of a query.
  template <int kUnits, int kCount, class Wants, class Query, class Unit>
  K3_DEVICE void load(const MlaAttend& a, uint4 (&v)[kCount], Wants&& wants, Query&& query, Unit&& unit) const {
    K3_UNROLL
    for (int j = 0; j < kCount; ++j) v[j] = wants(j) ? load_activations((const uint4*)a.query + u32(query(j)) * kUnits + unit(j)) : uint4{0, 0, 0, 0};
  }
};

// Of all its pages; a group may end before the run's last chunk begins.
K3_DEVICE int mla_item_pieces(const MlaItem& item) { return max(item.end - item.begin + 15, 0) / 16; }

// Copies pieces `from` to `to` - 1 of an item, as far as there are so many, into the ring; one warp.
template <class S>
K3_DEVICE void mla_copy(const MlaAttend& a, MlaSmem<S>& m, const MlaItem& item, MlaCursor& c, int from, int to, int lane) {
  const int count = min(mla_item_pieces(item), to);
  const int pages = (count + 3) / 4;
  const int table = lane < pages ? a.rows.page_table[size_t(item.slot) * a.rows.slot_pages + u32(item.begin / kMlaPage + lane)] : 0;
  K3_ROLLED
  for (int piece = from; piece < count; ++piece, c.step<S::kRing>(1)) {
    const int page = __shfl_sync(kFullWarp, table, piece / 4);
    barrier_wait(&m.empty[c.at], c.parity ^ 1);
    if (lane == 0) {
      barrier_expect(&m.full[c.at], S::kPiece);
      bulk_copy(m.ring[c.at], (const u8*)a.cache + (size_t(page) * (kMlaPage / 16) + piece % 4) * S::kPiece, S::kPiece, &m.full[c.at]);
    }
  }
}

// Hands out the block's items and copies their pages; mla_ahead pieces of the first are under way, and its queries lie in place.
template <class S, bool kEarly, class By>
K3_DEVICE void mla_produce(const MlaAttend& a, MlaSmem<S>& m, const By& by) {
  const int lane = by.lane(), items = mla_items(m.work);
  int index = by.number(), group = -1, place = 0;
  bool whole = false;
  MlaCursor c{0, 0};
  for (int k = 0;; ++k) {
    if (k) index = by.next(a, index, items);
    MlaItem item = m.first;
    if (index >= items) item.columns = 0;
    else if (k) item = mla_item<S::kHeads>(m.work, index);
    const int next = item.run << 16 | item.first;
    const bool all = S::whole(item.columns);
    item.load = k == 0 || next == group ? 0 : all || whole ? 2 : 1;
    if (item.load) place = all || whole ? 0 : place ^ (S::kQueryColumns / 2);
    item.place = place;
    group = next;
    whole = all;
    barrier_wait(&m.item_empty[k & 1], k / 2 & 1 ^ 1);
    if (lane == 0) {
      m.item[k & 1] = item;
      barrier_arrive(&m.item_full[k & 1]);
    }
    if (item.columns == 0) return;
    const int ahead = k ? 0 : min(mla_ahead<S, kEarly>(m.work, item), mla_item_pieces(item));
    c.step<S::kRing>(ahead);
    mla_copy(a, m, item, c, ahead, 1 << 20, lane);
  }
}

// Queries `warp`, `warp` + `warps`, ... of a group as scaled columns from column `place`; kBatch of them are on their way at once.
template <class S, int kBatch, class By>
K3_DEVICE void mla_load_queries(const MlaAttend& a, MlaSmem<S>& m, const MlaItem& item, int place, int warp, int warps, const By& by) {
  using C = typename S::Cache;
  const int lane = by.lane(), columns = (item.columns + 7) / 8 * 8;
  constexpr int kLoads = (S::kDim / 8 + kWarpSize - 1) / kWarpSize;
  K3_ROLLED
  for (int start = warp; start < columns; start += warps * kBatch) {
    uint4 all[kBatch * kLoads];
    auto unit_of = [&](int j) { return lane + j % kLoads * kWarpSize; };
    by.template load<S::kDim / 8>(a, all, [&](int j) { return start + j / kLoads * warps < item.columns && unit_of(j) < S::kDim / 8; },
                                  [&](int j) { return item.run * S::kHeads + item.first + start + j / kLoads * warps; }, unit_of);
    K3_UNROLL
    for (int h = 0; h < kBatch; ++h) {
      const int column = start + h * warps, to = place + column;
      if (column >= columns) break;
      uint4* v = all + h * kLoads;
      float scale = 1;
      if constexpr (C::kF16) {
        float largest = 0;
        K3_UNROLL
        for (int i = 0; i < kLoads; ++i) {
          const u32 w[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
          K3_UNROLL
          for (int j = 0; j < 4; ++j)
            largest = fmaxf(largest, fmaxf(fabsf(__uint_as_float(w[j] << 16)), fabsf(__uint_as_float(w[j] & 0xffff0000u))));
        }
        scale = C::query_scale(warp_max(largest));
      }
      K3_UNROLL
      for (int i = 0; i < kLoads; ++i) {
        int unit = lane + i * kWarpSize;
        if (unit >= S::kDim / 8) continue;
        settle(v[i]);   // unpacked again: the values of both passes together would fill registers
        const u32 w[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
        u32 pair[4];
        K3_UNROLL
        for (int j = 0; j < 4; ++j) pair[j] = C::pack(__uint_as_float(w[j] << 16) * scale, __uint_as_float(w[j] & 0xffff0000u) * scale);
        C::store_query(m.query[unit / 8][to / 8], to % 8 * 128 + unit / 2 % 4 * 32, unit % 2, pair);
      }
      if (lane == 0) {
        m.scale[to] = a.score_scale * a.cache_scale * __uint_as_float(0x7f000000u - __float_as_uint(scale));   // divided by a power of two
        m.limit[to] = column < item.columns ? m.work.position[item.run + (item.first + column) / S::kHeads] : -1;
      }
    }
  }
  fence_copies();
}

// Keeps the queries of the next group ready; two warps.
template <class S, class By>
K3_DEVICE void mla_prepare(const MlaAttend& a, MlaSmem<S>& m, int warp, const By& by) {
  for (int k = 0;; ++k) {
    barrier_wait(&m.item_full[k & 1], k / 2 & 1);
    const MlaItem& item = m.item[k & 1];
    if (item.columns == 0) return;
    if (item.load) {
      if (item.load > 1) barrier_wait(&m.query_empty[k & 1 ^ 1], (k - 1) / 2 & 1);
      mla_load_queries<S, S::kMoveRegisters ? 1 : 2>(a, m, item, item.place, warp, 2, by);
    }
    __syncwarp();
    warp_arrive(&m.query_full[k & 1], by.lane());
    warp_arrive(&m.item_empty[k & 1], by.lane());
  }
}
