// Latent attention of a step's rows over the paged cache: every chunk of the context gives, for each query (row, head), a maximum, a
// sum and an unnormalised weighted latent; mla_combine.cuh adds chunks up. Numerics, all of them fixed by position alone:
//  * scores: q . row is one chain of products, 16 dims a step, rising; weights 2^(score - m) with m a whole number, the running maximum
//    rounded up page by page, so that rescaling is a power of two and exact whenever it happens;
//  * weighted latent: one chain of products through a chunk, 16 positions a step, rising; sum: the same chain over ones.
//
// Cache rows are the wide operand of the products (16 positions, or 16 latent values), queries the narrow one (8 columns), so a page
// is read once for all queries of a group. One thread copies pages into a ring of 16-row pieces; the copy engine swizzles them, which
// frees every fragment load of bank conflicts (a row is an odd number of blocks; copies by the threads would clog the very pipe
// that loads the fragments). Two pairs of warps make scores
// and weights of every other page, eight warps the weighted latent of the page before.
//
// An e4m3 cache row is multiplied in FP16, which holds it exactly. The query, BF16, is scaled by a power of two to at most 2^15: what
// of it falls below FP16's range is under 2^-39 of its largest value. Weights then have 11 bits instead of BF16's 8.
#pragma once
#include "mla_prims.cuh"
#include "mla_work.cuh"

struct MlaBf16 {
  static constexpr int kBytes = 2, kSteps = 1;      // k-steps of 16 dims in two 16-byte units of a row
  static constexpr u32 kOnes = 0x3f803f80u;
  static constexpr float kShift = 0;                // log2 of the largest weight
  K3_DEVICE static void multiply(float (&c)[4], const uint4& a, u32 b0, u32 b1) { mma(c, a, b0, b1); }
  K3_DEVICE static void rows(const uint4& v, uint4 (&a)[kSteps]) { a[0] = v; }
  // Transposed: matrices are (positions 0-7, dims 0-7), (8-15, 0-7), (0-7, 8-15), (8-15, 8-15).
  K3_DEVICE static void columns(const uint4& v, uint4 (&a)[kSteps]) { a[0] = {v.x, v.z, v.y, v.w}; }
  K3_DEVICE static u32 pack(float lo, float hi) { return pack_bf16(lo, hi); }
  K3_DEVICE static float query_scale(float) { return 1; }
  // Where dims d, d + 1 (d even) of a k-step lie in its fragment: lane % 4 and register.
  K3_DEVICE static int query_lane(int d) { return d % 8 / 2; }
  K3_DEVICE static int query_register(int d) { return d / 8; }
  // Latent value of row `g` (0-15) of product tile `i`.
  K3_DEVICE static int dim(int tile, int g) { return tile * 16 + g; }
  // The bits of `v` that belong to finite values.
  K3_DEVICE static u32 finite(u32 v) {
    const u32 bad = ((v & 0x7f807f80u) + 0x00800080u) & 0x80008000u;   // the sign's place, where the exponent is all ones
    return ~(bad | (bad - (bad >> 15)));
  }
};

struct MlaE4m3 {
  static constexpr int kBytes = 1, kSteps = 2;
  static constexpr u32 kOnes = 0x3c003c00u;
  static constexpr float kShift = 14;
  K3_DEVICE static void multiply(float (&c)[4], const uint4& a, u32 b0, u32 b1) { mma_f16(c, a, b0, b1); }
  // A register holds four dims of one position: the first two stand at k = 2t, the others at 2t + 8.
  K3_DEVICE static void rows(const uint4& v, uint4 (&a)[kSteps]) {
    unpack_e4m3(v.x, a[0].x, a[0].z);
    unpack_e4m3(v.y, a[0].y, a[0].w);
    unpack_e4m3(v.z, a[1].x, a[1].z);
    unpack_e4m3(v.w, a[1].y, a[1].w);
  }
  // Transposed, a register holds dims 2g, 2g + 1 of two positions: row g takes the even one, row g + 8 the odd one.
  K3_DEVICE static void columns(const uint4& v, uint4 (&a)[kSteps]) {
    unpack_e4m3(__byte_perm(v.x, 0, 0x3120), a[0].x, a[0].y);
    unpack_e4m3(__byte_perm(v.y, 0, 0x3120), a[0].z, a[0].w);
    unpack_e4m3(__byte_perm(v.z, 0, 0x3120), a[1].x, a[1].y);
    unpack_e4m3(__byte_perm(v.w, 0, 0x3120), a[1].z, a[1].w);
  }
  K3_DEVICE static u32 pack(float lo, float hi) { return pack_f16(lo, hi); }
  K3_DEVICE static float query_scale(float largest) {   // brings the largest value to [2^14, 2^15)
    int e = int(__float_as_uint(largest) >> 23) - 127;
    return e < -100 || e > 100 ? 1 : __uint_as_float(u32(127 + 14 - e) << 23);
  }
  K3_DEVICE static int query_lane(int d) { return d / 4; }
  K3_DEVICE static int query_register(int d) { return d % 4 / 2; }
  K3_DEVICE static int dim(int tile, int g) { return tile * 16 + g % 8 * 2 + g / 8; }
  K3_DEVICE static u32 finite(u32 v) {
    const u32 bad = ((v & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;
    return ~(bad | (bad - (bad >> 7)));
  }
};

// kTiles: tiles of 8 queries a group holds (1, 2, 3, 4 or 6). kRing: pieces of 16 cache rows in shared memory, at least 8.
template <class Cache_, int kHeads_, int kLatent_, int kRope_, int kTiles_, int kRing_>
struct MlaShape {
  using Cache = Cache_;
  static constexpr int kHeads = kHeads_, kLatent = kLatent_, kDim = kLatent_ + kRope_, kTiles = kTiles_, kRing = kRing_;
  static constexpr int kColumns = 8 * kTiles, kThreads = 512;
  static constexpr int kKSteps = kDim / 16, kPair = Cache::kSteps;
  // A row in shared memory is whole blocks of 64 or 128 bytes, inside which the copy engine permutes 16-byte units.
  static constexpr int kRowBytes = kDim * Cache::kBytes, kBlock = 64 * Cache::kBytes, kPiece = 16 * kRowBytes;
  static constexpr int kPieces = 2;               // of a page, 16 rows each, that one score warp has
  static constexpr int kRowTiles = (kLatent / 16 + kPair - 1) / kPair * kPair, kOwnRowTiles = (kRowTiles / kPair + 7) / 8 * kPair;
  static constexpr bool kMoveRegisters = kTiles > 3;
  static constexpr int kQueryBuffers = kTiles > 3 ? 1 : 2;
  static_assert(kRowBytes % kBlock == 0 && kKSteps % 2 == 0 && kLatent % 16 == 0 && kTiles <= 8, "whole blocks and tiles");
  // Where byte `at` of a piece lies: what the copy engine does with 64- or 128-byte swizzle.
  K3_DEVICE static u32 swizzle(u32 at) { return at ^ (at >> 3 & (kBlock - 16)); }
};

template <class S>
struct MlaSmem {
  u8 ring[S::kRing][S::kPiece];
  uint4 query[S::kQueryBuffers][S::kKSteps / 2][S::kTiles][kWarpSize];   // two k-steps
  uint2 weight[2][4][S::kTiles][kWarpSize];
  float half_top[4][2][S::kColumns];         // largest score of a half page, four pages in turn
  float top[2][S::kColumns];                 // m behind a page
  float factor[2][S::kColumns];              // what the page asks older sums to be multiplied with
  float scale[S::kQueryBuffers][S::kColumns];  // of a score, to base 2
  int limit[S::kQueryBuffers][S::kColumns];                    // last position the query sees
  int rescale[2];                            // any factor is not 1
  MlaWork work;
  MlaItem item[2];
  u64 full[S::kRing], empty[S::kRing], top_full[2], weight_full[2], weight_empty[2], item_full[2], item_empty[2], query_full[2], query_empty[2];
};

struct MlaAttend {
  MlaRows rows;
  const bf16* query;         // [rows][heads][dim]
  const TensorMap* map;      // of the cache: bytes as [positions][blocks][block], boxes of 16 positions
  int first;                 // position of the map at which page 0 begins
  float score_scale;         // qk_head_dim^-1/2 log2(e)
  float cache_scale;         // what a stored value is multiplied with
  float* partial;            // [partials][columns][latent]
  float2* top_sum;           // [partials][columns]: m, sum
  MlaRowInfo* info;          // [rows]
  int* next;                 // 0 before the launch; mla_combine puts it back
};

K3_DEVICE float minus_infinity() { return __uint_as_float(0xff800000u); }

// 2^d for whole d <= 0; zero below the normal numbers.
K3_DEVICE float power_of_two(float d) { return d < -126.0f ? 0.0f : __uint_as_float(u32(127 + int(d)) << 23); }

struct MlaCursor {           // a place in the ring
  int at;
  u32 parity;
  template <int kRing> K3_DEVICE void step(int n) {
    at += n;
    if (at >= kRing) at -= kRing, parity ^= 1;
  }
};

template <class S>
K3_DEVICE void mla_produce(const MlaAttend& a, MlaSmem<S>& m) {
  const int lane = lane_id(), items = mla_items(m.work);
  MlaCursor c{0, 0};
  int index = blockIdx.x;
  for (int k = 0;; ++k) {
    MlaItem item;
    item.columns = 0;
    // No sooner than it is needed: who reserves ahead takes from those who are done.
    if (k) index = gridDim.x + __shfl_sync(kFullWarp, lane == 0 ? atomicAdd(a.next, 1) : 0, 0);
    if (index < items) item = mla_item<S::kHeads, S::kColumns>(m.work, index);
    barrier_wait(&m.item_empty[k & 1], k / 2 & 1 ^ 1);
    if (lane == 0) {
      m.item[k & 1] = item;
      barrier_arrive(&m.item_full[k & 1]);
    }
    if (item.columns == 0) return;
    const int pages = max(item.end - item.begin + kMlaPage - 1, 0) / kMlaPage;   // a group may end before the run's last chunk begins
    const int table = lane < pages ? a.rows.page_table[size_t(item.slot) * a.rows.slot_pages + item.begin / kMlaPage + lane] : 0;
    for (int p = 0; p < pages; ++p) {
      const int from = a.first + __shfl_sync(kFullWarp, table, p) * kMlaPage;
      for (int piece = 0; piece < 4; ++piece, c.step<S::kRing>(1)) {
        barrier_wait(&m.empty[c.at], c.parity ^ 1);
        if (lane == 0) {
          barrier_expect(&m.full[c.at], S::kPiece);
          tensor_copy(m.ring[c.at], a.map, from + piece * 16, &m.full[c.at]);
        }
      }
    }
  }
}

// Queries `warp`, `warp` + `warps`, ... of a group as scaled fragments into buffer `b`; kBatch of them are on their way at once.
template <class S, int kBatch>
K3_DEVICE void mla_load_queries(const MlaAttend& a, MlaSmem<S>& m, const MlaItem& item, int b, int warp, int warps) {
  using C = typename S::Cache;
  const int lane = lane_id();
  constexpr int kLoads = (S::kDim / 8 + kWarpSize - 1) / kWarpSize;
  for (int start = warp; start < S::kColumns; start += warps * kBatch) {
    uint4 v[kBatch][kLoads];
    K3_UNROLL
    for (int h = 0; h < kBatch; ++h) {
      const int column = start + h * warps;
      const uint4* from = (const uint4*)(a.query + (size_t(item.run) * S::kHeads + item.first + column) * S::kDim);
      K3_UNROLL
      for (int i = 0; i < kLoads; ++i) {
        int unit = lane + i * kWarpSize;
        v[h][i] = column < item.columns && unit < S::kDim / 8 ? load_activations(from + unit) : uint4{0, 0, 0, 0};
      }
    }
    K3_UNROLL
    for (int h = 0; h < kBatch; ++h) {
      const int column = start + h * warps;
      if (column >= S::kColumns) break;
      float largest = 0;
      K3_UNROLL
      for (int i = 0; i < kLoads; ++i) {
        const u32 w[4] = {v[h][i].x, v[h][i].y, v[h][i].z, v[h][i].w};
        K3_UNROLL
        for (int j = 0; j < 4; ++j)
          largest = fmaxf(largest, fmaxf(fabsf(__uint_as_float(w[j] << 16)), fabsf(__uint_as_float(w[j] & 0xffff0000u))));
      }
      const float scale = C::query_scale(warp_max(largest));
      K3_UNROLL
      for (int i = 0; i < kLoads; ++i) {
        int unit = lane + i * kWarpSize;
        if (unit >= S::kDim / 8) continue;
        const u32 w[4] = {v[h][i].x, v[h][i].y, v[h][i].z, v[h][i].w};
        K3_UNROLL
        for (int j = 0; j < 4; ++j) {
          int d = (unit * 8 + 2 * j) % 16;
          u32 pair = C::pack(__uint_as_float(w[j] << 16) * scale, __uint_as_float(w[j] & 0xffff0000u) * scale);
          u32* to = (u32*)&m.query[b][unit / 4][column / 8][column % 8 * 4 + C::query_lane(d)];
          to[unit / 2 % 2 * 2 + C::query_register(d)] = pair;
        }
      }
      if (lane == 0) {
        m.scale[b][column] = a.score_scale * a.cache_scale / scale;
        m.limit[b][column] = column < item.columns ? m.work.position[item.run + (item.first + column) / S::kHeads] : -1;
      }
    }
  }
}

// Keeps the queries of the next group ready; three warps. The first item's lie in buffer 0 already.
template <class S>
K3_DEVICE void mla_prepare(const MlaAttend& a, MlaSmem<S>& m, int warp) {
  int held[S::kQueryBuffers][2];
  for (int k = 0;; ++k) {
    barrier_wait(&m.item_full[k & 1], k / 2 & 1);
    const MlaItem item = m.item[k & 1];
    __syncwarp();
    if (lane_id() == 0) barrier_arrive(&m.item_empty[k & 1]);
    if (item.columns == 0) return;
    const int b = k % S::kQueryBuffers;
    barrier_wait(&m.query_empty[b], k / S::kQueryBuffers & 1 ^ 1);
    K3_UNROLL
    for (int i = 0; i < S::kQueryBuffers; ++i) {
      if (i != b) continue;
      if (k && (k < S::kQueryBuffers || held[i][0] != item.run || held[i][1] != item.first)) mla_load_queries<S, S::kMoveRegisters ? 1 : 2>(a, m, item, b, warp, 3);
      held[i][0] = item.run, held[i][1] = item.first;
    }
    __syncwarp();
    if (lane_id() == 0) barrier_arrive(&m.query_full[b]);
  }
}
