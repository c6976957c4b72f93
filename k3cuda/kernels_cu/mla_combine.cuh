// Chunks of a row and head added up, and the new cache rows of a step.
//
// Sum over chunks: class c = chunk % 32 adds its chunks in rising order, classes meet as a binary tree, neighbours first. Scaling to the
// common maximum is by powers of two, so only this order decides the bytes.
#pragma once
#include "mla_core.cuh"

constexpr int kMlaClassCount = 32, kMlaCombineThreads = 512, kMlaSlab = 64;   // a block: 32 classes x 16 lanes of four latent values

struct MlaCombine {
  const int* row_slot;
  const int* row_position;
  const MlaRowInfo* info;
  const float* partial;
  const float2* top_sum;
  float cache_scale;
  int* next;
  bf16* out;                 // [rows][heads][latent]
};

struct MlaCombineSmem {
  float4 sum[kMlaCombineThreads / kWarpSize][16];
  float weight[kMlaCombineThreads / kWarpSize], top[kMlaCombineThreads / kWarpSize];
};

K3_DEVICE float4 add4(const float4& a, const float4& b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }

// One slab of 64 latent values of one row and head: blocks of kMlaCombineThreads threads. kHeads, kLatent, kColumns as in the attend launch.
template <int kHeads, int kLatent, int kColumns>
K3_DEVICE void mla_combine(const MlaCombine& a, MlaCombineSmem& m, int row, int head, int slab) {
  if (a.row_slot[row] < 0) return;
  const int tid = threadIdx.x, cls = tid / 16, quad = tid % 16, dim = slab * kMlaSlab + quad * 4;
  const MlaRowInfo info = a.info[row];
  const int chunks = mla_chunks(a.row_position[row] + 1), column = (row - info.run) * kHeads + head;
  const size_t first = size_t(info.partial) + size_t(column / kColumns) * info.chunks;
  const float2* top_sum = a.top_sum + first * kColumns + column % kColumns;
  float top = minus_infinity();
  for (int j = tid; j < chunks; j += kMlaCombineThreads) top = fmaxf(top, top_sum[size_t(j) * kColumns].x);
  top = warp_max(top);
  if (lane_id() == 0) m.top[warp_id()] = top;
  __syncthreads();
  K3_UNROLL
  for (int w = 0; w < kMlaCombineThreads / kWarpSize; ++w) top = fmaxf(top, m.top[w]);
  float4 o{0, 0, 0, 0};
  float total = 0;
  if (kLatent % kMlaSlab == 0 || dim < kLatent) {
    const float4* from = (const float4*)(a.partial + (first * kColumns + column % kColumns) * kLatent + dim);
    const size_t stride = size_t(kColumns) * kLatent / 4;
#pragma unroll 4
    for (int j = cls; j < chunks; j += kMlaClassCount) {
      const float2 ts = top_sum[size_t(j) * kColumns];
      const float4 v = from[j * stride];
      const float f = power_of_two(ts.x - top);
      total = fmaf(ts.y, f, total);
      o = {fmaf(v.x, f, o.x), fmaf(v.y, f, o.y), fmaf(v.z, f, o.z), fmaf(v.w, f, o.w)};
    }
  }
  const float4 other{__shfl_xor_sync(kFullWarp, o.x, 16), __shfl_xor_sync(kFullWarp, o.y, 16),
                     __shfl_xor_sync(kFullWarp, o.z, 16), __shfl_xor_sync(kFullWarp, o.w, 16)};
  o = add4(o, other);
  total += __shfl_xor_sync(kFullWarp, total, 16);
  if (lane_id() < 16) m.sum[warp_id()][quad] = o;
  if (lane_id() == 0) m.weight[warp_id()] = total;
  __syncthreads();
  if (tid >= 16 || dim >= kLatent) return;
  const float w = a.cache_scale / tree_sum<16>(m.weight, 1);
  const float* s = (const float*)m.sum + quad * 4;
  float r[4];
  K3_UNROLL
  for (int i = 0; i < 4; ++i) r[i] = tree_sum<16>(s + i, 64) * w;
  *(uint2*)(a.out + (size_t(row) * kHeads + head) * kLatent + dim) = {pack_bf16(r[0], r[1]), pack_bf16(r[2], r[3])};
}

// ---- new cache rows ----

struct MlaWrite {
  MlaRows rows;
  const float* query;        // [rows][kQuery]: mla_q_a
  const float* latent;       // [rows][kLatent + kRope]: mla_kv_a
  const bf16* query_norm;    // [kQuery]
  const bf16* latent_norm;   // [kLatent]
  bf16* query_out;           // [rows][kQuery]: mla_q_latent
  void* cache;               // [pages][64][kLatent + kRope]
  float cache_scale, eps;
};

K3_DEVICE void mla_store(bf16* to, float v) { *to = float_to_bf16(v); }
K3_DEVICE void mla_store(u8* to, float v) { *to = float_to_e4m3(v); }

// A thread's values of a row that is normed: its warp's leaf of the tree of row sums, 32 apart.
template <int kN, int kLeaves>
struct MlaLeaf {
  static constexpr int kSize = kN / kLeaves, kValues = (kSize + kWarpSize - 1) / kWarpSize;
  K3_DEVICE static int at(int i) { return warp_id() * kSize + lane_id() + i * kWarpSize; }
  K3_DEVICE static bool has(int i) { return warp_id() < kLeaves && lane_id() + i * kWarpSize < kSize; }
  K3_DEVICE static float squares(const float (&v)[kValues]) {
    float sum = 0;
    K3_UNROLL
    for (int i = 0; i < kValues; ++i) sum = fmaf(v[i], v[i], sum);
    return warp_sum(sum);
  }
};

// Norms one row's low-rank query and latent and puts latent and shared key in the cache. Stored: bf16 or u8 (e4m3). 512 threads.
// `ready` returns when query and latent are written; the step's tables and the norms' weights are read before it, all else behind it at once.
template <class Stored, int kQuery, int kQueryLeaves, int kLatent, int kLatentLeaves, int kRope, class Ready>
K3_DEVICE void mla_write(const MlaWrite& a, float (&leaf)[2][16], int row, Ready ready) {
  typedef MlaLeaf<kQuery, kQueryLeaves> Query;
  typedef MlaLeaf<kLatent, kLatentLeaves> Latent;
  constexpr int kDim = kLatent + kRope;
  static_assert(kRope <= 512, "a value of the shared key a thread");
  const int tid = threadIdx.x, slot = a.rows.row_slot[row], position = a.rows.row_position[row];
  const int page = slot < 0 ? 0 : a.rows.page_table[size_t(slot) * a.rows.slot_pages + position / kMlaPage];
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
  const float query_inverse = 1.0f / sqrtf(tree_sum<kQueryLeaves>(leaf[0], 1) / float(kQuery) + a.eps);
  const float latent_inverse = 1.0f / sqrtf(tree_sum<kLatentLeaves>(leaf[1], 1) / float(kLatent) + a.eps);
  bf16* query_out = a.query_out + size_t(row) * kQuery;
  Stored* to = (Stored*)a.cache + mla_cache_row<kDim>(page, position);
  K3_UNROLL
  for (int i = 0; i < Query::kValues; ++i)
    if (Query::has(i)) query_out[Query::at(i)] = float_to_bf16(round_bf16(query[i] * query_inverse) * query_norm[i]);
  K3_UNROLL
  for (int i = 0; i < Latent::kValues; ++i)
    if (Latent::has(i)) mla_store(to + Latent::at(i), round_bf16(round_bf16(latent[i] * latent_inverse) * latent_norm[i]) / a.cache_scale);
  if (tid < kRope) mla_store(to + kLatent + tid, key / a.cache_scale);
}
