// Grouped-query attention of a draft's block. Queries of a key head that belong to one row are its group.
//
// The context is cut into pages; page p belongs to class p mod kClasses. A block takes the pages of one class in rising order for all rows of a
// sequence and one key head; classes meet as a tree, neighbours first. Maxima are whole powers of two, so rescaling is exact, and a row's
// numbers come from its own scores alone.
#pragma once
#include "draft_core.cuh"

namespace stage {

constexpr int kOwnKvDim = kOwnNumKeyValueHeads * kHeadDim, kKvTiles = tiles_of(kOwnKvDim);
constexpr int kGroup = kOwnNumAttentionHeads / kOwnNumKeyValueHeads;
constexpr int kCacheRow = 2 * kOwnKvDim;                              // keys of a position, then values
constexpr int kClasses = 32;

struct gqa_in : ProductStage<tiles_of(kOwnMixerDim) + 2 * kKvTiles, kGqaInLeaves, kGqaInSteps> {
  template <class Kernel = Multiply> static __device__ void run(const Step& s, const OpArgs& op) {
    product<gqa_in, Kernel>(s, w_gqa_in(op), attn_in(s), kHiddenSize, [&](int row, int token, float v) {
      const int c = row - tiles_of(kOwnMixerDim) * kTileRows, which = c / (kKvTiles * kTileRows), at = c % (kKvTiles * kTileRows);
      if (c >= 0) {
        if (at < kOwnKvDim) gqa_kv(s)[size_t(token) * kCacheRow + which * kOwnKvDim + at] = v;
      } else if (row < kOwnMixerDim) {
        gqa_q(s)[size_t(token) * kOwnMixerDim + row] = v;
      }
    });
  }
};

// Heads of one row, a warp each in turn: normed and turned.
K3_DEVICE void turn_heads(const float* from, const bf16* norm, bf16* to, int heads, int position) {
  for (int head = warp_id(); head < heads; head += int(blockDim.x) / kWarpSize) {
    const float* x = from + head * kHeadDim;
    float sum = 0;
    for (int e = lane_id(); e < kHeadDim; e += kWarpSize) sum = fmaf(x[e], x[e], sum);
    const float inv = inverse_sqrt(warp_sum(sum) * (1.0f / kHeadDim) + kRmsNormEps);
    for (int e = lane_id(); e < kHeadDim; e += kWarpSize)
      to[head * kHeadDim + e] = float_to_bf16(rotated(e, position, [&](int i) { return x[i] * inv * bf16_to_float(norm[i]); }));
  }
}

K3_DEVICE void write_keys_and_values(const Step& s, const OpArgs& op, const float* from, const bf16* norm, int slot, int position) {
  bf16* to = gqa_cache(s, op) + (size_t(cache_page(s, slot, position)) * kPageSize + position % kPageSize) * kCacheRow;
  turn_heads(from, norm, to, kOwnNumKeyValueHeads, position);
  for (int i = threadIdx.x; i < kOwnKvDim; i += blockDim.x) to[kOwnKvDim + i] = float_to_bf16(from[kOwnKvDim + i]);
}

// Of every row two blocks: its queries, its cache row.
struct gqa_norm : StageDefaults {
  static constexpr int kBlocks = kRows, kBlocksY = 2, kThreads = 256;
  static __device__ void run(const Step& s, const OpArgs& op) {
    grid_wait();
    grid_launch_next();
    const int row = blockIdx.x, slot = row_slot(s)[row], position = row_position(s)[row];
    if (slot < 0) return;
    if (blockIdx.y) write_keys_and_values(s, op, gqa_kv(s) + size_t(row) * kCacheRow, w_gqa_k_norm(op), slot, position);
    else turn_heads(gqa_q(s) + size_t(row) * kOwnMixerDim, w_gqa_q_norm(op), gqa_query(s) + size_t(row) * kOwnMixerDim, kOwnNumAttentionHeads, position);
  }
};

// Maximum (as a power of two) and sum, and the unnormalised mean, of a class of pages for a row and head.
K3_DEVICE float* class_top_sum(const Step& s, int row, int head, int cls) { return gqa_top_sum(s) + ((size_t(row) * kOwnNumAttentionHeads + head) * kClasses + cls) * 2; }
K3_DEVICE float* class_mean(const Step& s, int row, int head, int cls) { return gqa_mean(s) + ((size_t(row) * kOwnNumAttentionHeads + head) * kClasses + cls) * kHeadDim; }

K3_DEVICE float exp2_whole(float d) { return d < -126.0f ? 0.0f : __uint_as_float(u32(127 + int(d)) << 23); }   // d whole, at most 0

struct gqa_attend : StageDefaults {
  static constexpr int kBlocks = max_of(kSeqs, 1) * kOwnNumKeyValueHeads, kBlocksY = kClasses, kThreads = 256;
  static constexpr int kQueries = kBlockRows * kGroup, kPitch = kHeadDim + 1;   // 1 more keeps lanes off each other's banks
  struct Smem {
    float query[kQueries][kHeadDim], key[kPageSize][kPitch], value[kPageSize][kPitch], mean[kQueries][kHeadDim], weight[kQueries][kPageSize];
    float top[kQueries], sum[kQueries], factor[kQueries];
  };
  static constexpr int kSmem = sizeof(Smem);

  static __device__ void run(const Step& s, const OpArgs& op) {
    K3_DYN_SMEM(u8, raw);
    Smem& m = *(Smem*)raw;
    grid_wait();
    grid_launch_next();
    const int seq = blockIdx.x / kOwnNumKeyValueHeads, head = blockIdx.x % kOwnNumKeyValueHeads, cls = blockIdx.y, tid = threadIdx.x;
    const int first_row = first_row_of(s, seq);
    if (first_row < 0) return;
    const float low = __uint_as_float(0xff800000u);
    const int slot = row_slot(s)[first_row], anchor = row_position(s)[first_row], last = row_last(s)[first_row];
    const int begin = kWindow[op.layer] && anchor > kWindow[op.layer] ? anchor - kWindow[op.layer] : 0;   // of what any row sees
    for (int i = tid; i < kQueries * kHeadDim; i += kThreads) {
      const int q = i / kHeadDim, e = i % kHeadDim;
      m.query[q][e] = bf16_to_float(gqa_query(s)[size_t(first_row + q / kGroup) * kOwnMixerDim + (head * kGroup + q % kGroup) * kHeadDim + e]);
      m.mean[q][e] = 0;
    }
    for (int q = tid; q < kQueries; q += kThreads) m.top[q] = low, m.sum[q] = 0;
    const int first_page = begin / kPageSize;
    for (int page = first_page + (cls - first_page % kClasses + kClasses) % kClasses; page * kPageSize <= last; page += kClasses) {
      __syncthreads();
      const int from = page * kPageSize, live = min_of(kPageSize, last + 1 - from);   // what lies behind holds anything
      const bf16* rows = gqa_cache(s, op) + size_t(cache_page(s, slot, from)) * kPageSize * kCacheRow + head * kHeadDim;
      for (int i = tid; i < live * kHeadDim; i += kThreads) {
        const bf16* at = rows + size_t(i / kHeadDim) * kCacheRow + i % kHeadDim;
        m.key[i / kHeadDim][i % kHeadDim] = bf16_to_float(at[0]);
        m.value[i / kHeadDim][i % kHeadDim] = bf16_to_float(at[kOwnKvDim]);
      }
      __syncthreads();
      for (int i = tid; i < kQueries * kPageSize; i += kThreads) {
        const int q = i / kPageSize, j = i % kPageSize, position = from + j;
        const int end = kCausal[op.layer] ? row_position(s)[first_row + q / kGroup] : last;
        float score = low;
        if (position >= begin && position <= end) {
          score = 0;
          for (int e = 0; e < kHeadDim; ++e) score = fmaf(m.query[q][e], m.key[j][e], score);
          score *= kScoreScale * kLog2E;
        }
        m.weight[q][j] = score;
      }
      __syncthreads();
      for (int q = warp_id(); q < kQueries; q += kThreads / kWarpSize) {
        const float a = m.weight[q][lane_id()], b = m.weight[q][lane_id() + kWarpSize], before = m.top[q];
        const bool bad = __any_sync(kFullWarp, a != a || b != b);   // must reach the result, which a class without rows does not
        const float top = fmaxf(fmaxf(before, ceilf(warp_max(fmaxf(a, b)))), bad ? 0 : low);
        const bool none = !(top > low);                     // no row of this query in sight yet
        const float wa = none ? 0 : exp2f(a - top), wb = none ? 0 : exp2f(b - top), sum = warp_sum(wa + wb);
        m.weight[q][lane_id()] = wa;
        m.weight[q][lane_id() + kWarpSize] = wb;
        __syncwarp();
        if (lane_id() == 0) {
          const float factor = before > low ? exp2_whole(before - top) : 0;
          m.factor[q] = factor;
          m.sum[q] = fmaf(m.sum[q], factor, sum);
          m.top[q] = top;
        }
      }
      __syncthreads();
      for (int i = tid; i < kQueries * kHeadDim; i += kThreads) {
        const int q = i / kHeadDim, e = i % kHeadDim;
        float mean = m.mean[q][e] * m.factor[q];
        for (int j = 0; j < live; ++j)
          if (float w = m.weight[q][j]; w != 0) mean = fmaf(w, m.value[j][e], mean);   // 0 times NaN of a row that is not seen would stay
        m.mean[q][e] = mean;
      }
    }
    __syncthreads();
    for (int i = tid; i < kQueries * kHeadDim; i += kThreads) {
      const int q = i / kHeadDim, e = i % kHeadDim, row = first_row + q / kGroup, own = head * kGroup + q % kGroup;
      class_mean(s, row, own, cls)[e] = m.mean[q][e];
      if (e == 0) class_top_sum(s, row, own, cls)[0] = m.top[q], class_top_sum(s, row, own, cls)[1] = m.sum[q];
    }
  }
};

struct gqa_combine : StageDefaults {
  static constexpr int kBlocks = kRows, kBlocksY = kOwnNumAttentionHeads, kThreads = ceil_div(kHeadDim, kWarpSize) * kWarpSize;
  static __device__ void run(const Step& s, const OpArgs&) {
    grid_wait();
    grid_launch_next();
    const int row = blockIdx.x, head = blockIdx.y, e = threadIdx.x;
    if (row_slot(s)[row] < 0) return;
    float top = __uint_as_float(0xff800000u), sum[kClasses], mean[kClasses];
    K3_UNROLL
    for (int c = 0; c < kClasses; ++c) top = fmaxf(top, class_top_sum(s, row, head, c)[0]);
    K3_UNROLL
    for (int c = 0; c < kClasses; ++c) {
      const float* of = class_top_sum(s, row, head, c);
      const float factor = of[0] > __uint_as_float(0xff800000u) ? exp2_whole(of[0] - top) : 0;
      sum[c] = of[1] * factor;
      mean[c] = e < kHeadDim && factor > 0 ? class_mean(s, row, head, c)[e] * factor : 0;
    }
    const float total = tree_sum<kClasses>(sum, 1), v = tree_sum<kClasses>(mean, 1);
    if (e < kHeadDim) mixer_out(s)[size_t(row) * kOwnMixerDim + head * kHeadDim + e] = float_to_bf16(v / total);
  }
};

// ---- context rows ----

struct context_keys : ProductStage<2 * kNumHiddenLayers * kKvTiles, kContextKvLeaves, kContextKvSteps> {
  template <class Kernel = Multiply> static __device__ void run(const Step& s, const OpArgs& op) {
    product<context_keys, Kernel>(s, w_context_kv(op), context(s), kHiddenSize, [&](int row, int token, float v) {
      const int part = row / (kKvTiles * kTileRows), c = row % (kKvTiles * kTileRows), which = part / kNumHiddenLayers, layer = part % kNumHiddenLayers;
      if (c < kOwnKvDim) context_heads(s)[(size_t(token) * kNumHiddenLayers + layer) * kCacheRow + which * kOwnKvDim + c] = v;
    });
  }
};

struct store_keys : StageDefaults {
  static constexpr int kBlocks = kRows, kThreads = 256;
  static __device__ void run(const Step& s, const OpArgs& op) {
    grid_wait();
    grid_launch_next();
    const int row = blockIdx.x, slot = row_slot(s)[row];
    if (slot < 0 || !row_accepted(s)[row]) return;
    write_keys_and_values(s, op, context_heads(s) + (size_t(row) * kNumHiddenLayers + op.layer) * kCacheRow, w_context_k_norm(op), slot, row_position(s)[row]);
  }
};

}
