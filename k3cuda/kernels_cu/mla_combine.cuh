// Chunks of a row and head added up, and the new cache rows of a step.
//
// Sum over chunks: class c = chunk % 32 adds its chunks in rising order, classes meet as a binary tree, neighbours first. Scaling to the
// common maximum is by powers of two, so only this order decides the bytes.
#pragma once
#include "mla_core.cuh"

// A block: 32 classes x 8 lanes of four latent values. A thread asks for kMlaBatch results at once: of chunks, or of slabs side by side.
constexpr int kMlaClassCount = 32, kMlaCombineThreads = 256, kMlaCombineWarps = kMlaCombineThreads / kWarpSize, kMlaSlab = 32, kMlaBatch = 8;
// Slabs side by side: where there are rows enough to keep the machine busy, few large units.
constexpr int mla_combine_slabs(int rows) { return rows > 32 ? 8 : rows > 4 ? 2 : 1; }
// Blocks an SM has registers for. With 80 a thread one fits beside a block that attends (mla_beside).
constexpr int mla_combine_resident(int together) { return kMlaWgmma && together <= 2 ? 3 : 1; }

struct MlaCombine {
  MlaRows rows;              // without a page table
  const float* partial;
  const float2* top_sum;
  float cache_scale;
  int* next;
  bf16* out;                 // [rows][heads][latent]
};

template <int kTogether>
struct MlaCombineSums {      // units use the halves in turn
  float4 sum[2][kTogether][kMlaCombineWarps][kMlaSlab / 4];
  float weight[2][kMlaCombineWarps], top[2][kMlaCombineWarps];
};
template <int kTogether>
struct MlaCombineSmem : MlaCombineSums<kTogether> { MlaWork work; };

// The largest of a team's values, by way of a warp's each.
template <class Team = WholeBlock>
K3_DEVICE float mla_block_top(float (&tops)[kMlaCombineWarps], float top, const Team& team = {}) {
  top = warp_max(top);
  if (team.lane() == 0) tops[team.warp()] = top;
  team.sync();
  K3_UNROLL
  for (int w = 0; w < kMlaCombineWarps; ++w) top = fmaxf(top, tops[w]);
  return top;
}

K3_DEVICE float4 add4(const float4& a, const float4& b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }
K3_DEVICE float4 shuffle4(const float4& a, int mask) {
  return {__shfl_xor_sync(kFullWarp, a.x, mask), __shfl_xor_sync(kFullWarp, a.y, mask), __shfl_xor_sync(kFullWarp, a.z, mask), __shfl_xor_sync(kFullWarp, a.w, mask)};
}

// A unit, kTogether slabs of 32 latent values of a row and head, from value `at` on, by a team of kMlaCombineThreads threads. `turn` tells it which half
// of `m` is free. kAtOnce: results that a thread asks for at once. put(column, value): mean latent, all threads of the warps that have some.
template <int kHeads, int kLatent, int kTogether, int kAtOnce = kMlaBatch, class Put, class Team = WholeBlock>
K3_DEVICE void mla_combine_unit(const MlaCombine& a, MlaCombineSums<kTogether>& m, const MlaWork& work, int row, int head, int at, int& turn, Put&& put, const Team& team = {}) {
  constexpr int kUnit = kTogether * kMlaSlab, kBatch = kAtOnce / kTogether, kStep = kBatch * kMlaClassCount;
  const int tid = team.thread(), cls = tid / 8, lane = tid % 8;
  const int run = work.run[row], chunks = mla_chunks(work.position[row] + 1), columns = work.length[run] * kHeads;
  const size_t first = work.before[kMlaClasses][run] + (row - run) * kHeads + head;
  const float2* top_sum = a.top_sum + first;
  const float4* from = (const float4*)(a.partial + first * kLatent + at) + lane;
  float2 ts[kBatch];
  float4 v[kBatch][kTogether], o[kTogether] = {};
  auto load = [&](int base) {
    K3_UNROLL
    for (int i = 0; i < kBatch; ++i) {
      const int j = base + i * kMlaClassCount;
      ts[i] = j < chunks ? top_sum[size_t(j) * columns] : float2{minus_infinity(), 0};
      K3_UNROLL
      for (int s = 0; s < kTogether; ++s) {
        const bool inside = kLatent % kUnit == 0 || at + s * kMlaSlab + lane * 4 < kLatent;
        v[i][s] = inside && j < chunks ? from[size_t(j) * columns * (kLatent / 4) + s * (kMlaSlab / 4)] : float4{0, 0, 0, 0};
      }
    }
  };
  load(cls);
  float top = minus_infinity();
  K3_UNROLL
  for (int i = 0; i < kBatch; ++i) top = fmaxf(top, ts[i].x);
  for (int j = cls + kStep; j < chunks; j += kMlaClassCount) top = fmaxf(top, top_sum[size_t(j) * columns].x);
  turn ^= 1;
  top = mla_block_top(m.top[turn], top, team);
  float total = 0;
  for (int base = cls;;) {
    K3_UNROLL
    for (int i = 0; i < kBatch; ++i) {
      if (base + i * kMlaClassCount >= chunks) break;
      const float f = power_of_two(ts[i].x - top);
      total = fmaf(ts[i].y, f, total);
      K3_UNROLL
      for (int s = 0; s < kTogether; ++s)
        o[s] = {fmaf(v[i][s].x, f, o[s].x), fmaf(v[i][s].y, f, o[s].y), fmaf(v[i][s].z, f, o[s].z), fmaf(v[i][s].w, f, o[s].w)};
    }
    base += kStep;
    if (base >= chunks) break;
    load(base);
  }
  K3_UNROLL
  for (int d = 8; d < kWarpSize; d *= 2) {
    K3_UNROLL
    for (int s = 0; s < kTogether; ++s) o[s] = add4(o[s], shuffle4(o[s], d));
    total += __shfl_xor_sync(kFullWarp, total, d);
  }
  if (team.lane() < 8)
    K3_UNROLL
    for (int s = 0; s < kTogether; ++s) m.sum[turn][s][team.warp()][lane] = o[s];
  if (team.lane() == 0) m.weight[turn][team.warp()] = total;
  team.sync();
  if (tid < kUnit && at + tid < kLatent) {
    const float w = divide(a.cache_scale, tree_sum<kMlaCombineWarps>(m.weight[turn], 1));
    put(at + tid, tree_sum<kMlaCombineWarps>((const float*)m.sum[turn][tid / kMlaSlab] + tid % kMlaSlab, kMlaSlab) * w);
  }
}

// Units are shared out over any number of blocks. kHeads, kLatent as in the attend launch; `ready` returns when that is complete. Rows of a run with one
// chunk are done already.
template <int kHeads, int kLatent, int kTogether, class Ready>
K3_DEVICE void mla_combine(const MlaCombine& a, MlaCombineSmem<kTogether>& m, Ready ready) {
  constexpr int kUnit = kTogether * kMlaSlab, kUnits = (kLatent + kUnit - 1) / kUnit;
  if (warp_id() == 0) mla_plan<kHeads>(a.rows, m.work, {{kHeads, kHeads, kHeads}}, 0);
  __syncthreads();
  ready();
  if (blockIdx.x == 0 && threadIdx.x == 0) *a.next = 0;
  int turn = 0;
  for (int unit = blockIdx.x; unit < a.rows.rows * kHeads * kUnits; unit += gridDim.x) {
    const int at = unit % kUnits * kUnit, head = unit / kUnits % kHeads, row = unit / (kUnits * kHeads);
    if (m.work.slot[row] < 0) continue;
    if (m.work.chunks[m.work.run[row]] == 1) continue;
    mla_combine_unit<kHeads, kLatent, kTogether>(a, m, m.work, row, head, at, turn, [&](int c, float v) { a.out[(size_t(row) * kHeads + head) * kLatent + c] = float_to_bf16(v); });
  }
}

// ---- new cache rows ----

struct MlaWrite {
  MlaRows rows;
  const float* query;        // [rows][kQuery]: mla_q_a
  const float* latent;       // [rows][kLatent + kRope]: mla_kv_a
  const bf16* query_norm;    // [kQuery]
  const bf16* latent_norm;   // [kLatent]
  bf16* query_out;           // [rows][kQuery]: mla_q_latent
  void* cache;               // [pages][64][kLatent + kRope], values where mla_cache_at says
  float cache_scale, eps;
};

K3_DEVICE void mla_store(bf16* to, float v) { *to = float_to_bf16(v); }
K3_DEVICE void mla_store(u8* to, float v) { *to = float_to_e4m3(v); }

// A thread's values of a row that is normed: its warp's leaf of the tree of row sums, 32 apart.
template <int kN, int kLeaves>
struct MlaLeaf {
  static constexpr int kSize = kN / kLeaves, kValues = (kSize + kWarpSize - 1) / kWarpSize;
  template <class Team = WholeBlock> K3_DEVICE static int at(int i, const Team& team = {}) { return team.warp() * kSize + team.lane() + i * kWarpSize; }
  template <class Team = WholeBlock> K3_DEVICE static bool has(int i, const Team& team = {}) { return team.warp() < kLeaves && team.lane() + i * kWarpSize < kSize; }
  K3_DEVICE static float squares(const float* v) {
    float sum = 0;
    K3_UNROLL
    for (int i = 0; i < kValues; ++i) sum = fmaf(v[i], v[i], sum);
    return warp_sum(sum);
  }
  // 1 / root of the mean square, from all leaves' squares.
  K3_DEVICE static float inverse(const float* leaves, float eps) { return 1.0f / sqrtf(tree_sum<kLeaves>(leaves, 1) / float(kN) + eps); }
};
// What goes on as BF16: of the query to its product, of the latent to the cache.
K3_DEVICE float mla_normed(float v, float inverse, float weight) { return round_bf16(v * inverse) * weight; }
template <class Stored>
K3_DEVICE void mla_store_latent(Stored* to, float normed, float cache_scale) { mla_store(to, round_bf16(normed) / cache_scale); }
template <class Stored>
K3_DEVICE void mla_store_key(Stored* to, float key, float cache_scale) { mla_store(to, key / cache_scale); }

// Norms one row's low-rank query and latent and puts latent and shared key in the cache. Stored: bf16 or u8 (e4m3). 512 threads.
// `ready` returns when query and latent are written; the step's tables and the norms' weights are read before it, all else behind it at once.
// kGroup ranks hold a cache together, by page in turn: this one is at `place`, and stores what is its own.
template <class Stored, int kQuery, int kQueryLeaves, int kLatent, int kLatentLeaves, int kRope, int kGroup = 1, class Ready>
K3_DEVICE void mla_write(const MlaWrite& a, float (&leaf)[2][16], int row, Ready ready, int place = 0) {
  typedef MlaLeaf<kQuery, kQueryLeaves> Query;
  typedef MlaLeaf<kLatent, kLatentLeaves> Latent;
  constexpr int kDim = kLatent + kRope;
  static_assert(kRope <= 512, "a value of the shared key a thread");
  const int tid = threadIdx.x, slot = a.rows.row_slot[row], position = a.rows.row_position[row];
  const int page = slot < 0 ? 0 : a.rows.page_table[size_t(slot) * a.rows.slot_pages + position / (kMlaPage * kGroup)];
  const bool holds = position / kMlaPage % kGroup == place;
  float query[Query::kValues], query_norm[Query::kValues], latent[Latent::kValues], latent_norm[Latent::kValues], key = 0;
  K3_UNROLL
  for (int i = 0; i < Query::kValues; ++i) query_norm[i] = Query::has(i) ? bf16_to_float(a.query_norm[Query::at(i)]) : 0;
  K3_UNROLL
  for (int i = 0; i < Latent::kValues; ++i) latent_norm[i] = Latent::has(i) ? bf16_to_float(a.latent_norm[Latent::at(i)]) : 0;
  ready();
  if (slot < 0) return;
  const float *from_query = a.query + size_t(row) * kQuery, *from_latent = a.latent + size_t(row) * kDim;
  K3_UNROLL
  for (int i = 0; i < Query::kValues; ++i) query[i] = Query::has(i) ? from_query[Query::at(i)] : 0;
  K3_UNROLL
  for (int i = 0; i < Latent::kValues; ++i) latent[i] = Latent::has(i) ? from_latent[Latent::at(i)] : 0;
  if (tid < kRope) key = from_latent[kLatent + tid];
  const float sum[2] = {Query::squares(query), Latent::squares(latent)};
  if (lane_id() == 0) leaf[0][warp_id()] = sum[0], leaf[1][warp_id()] = sum[1];
  __syncthreads();
  const float query_inverse = Query::inverse(leaf[0], a.eps), latent_inverse = Latent::inverse(leaf[1], a.eps);
  bf16* query_out = a.query_out + size_t(row) * kQuery;
  auto to = [&](int i) { return (Stored*)a.cache + mla_cache_at<Stored, kDim>(page, position, i); };
  K3_UNROLL
  for (int i = 0; i < Query::kValues; ++i)
    if (Query::has(i)) query_out[Query::at(i)] = float_to_bf16(mla_normed(query[i], query_inverse, query_norm[i]));
  K3_UNROLL
  for (int i = 0; i < Latent::kValues; ++i)
    if (holds && Latent::has(i)) mla_store_latent(to(Latent::at(i)), mla_normed(latent[i], latent_inverse, latent_norm[i]), a.cache_scale);
  if (holds && tid < kRope) mla_store_key(to(kLatent + tid), key, a.cache_scale);
}
