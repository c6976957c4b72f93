// Latent attention of a draft's block: the target's, but keys and queries turn, and a layer may let a row see all of its block.
#pragma once
#include "draft_core.cuh"
#include "stages/mla.cuh"

namespace stage {

struct draft_mla_in_rows {
  static constexpr int kKva = tiles_of(kOwnQLoraRank), kTotal = kKva + tiles_of(kOwnMlaCacheDim);
};

struct draft_mla_in : ProductStage<draft_mla_in_rows::kTotal, kDraftMlaInLeaves, kDraftMlaInSteps> {
  template <class Kernel = Multiply> static __device__ void run(const Step& s, const OpArgs& op) {
    product<draft_mla_in, Kernel>(s, w_draft_mla_in(op), attn_in(s), kHiddenSize, [&](int row, int token, float v) {
      int c = row - draft_mla_in_rows::kKva * kTileRows;
      if (c >= 0) {
        if (c < kOwnMlaCacheDim) put_mla_kv_a_part(s, token, c, v);
      } else if (row < kOwnQLoraRank) {
        put_mla_q_a_part(s, token, row, v);
      }
    });
  }
};

// Latent normed and shared key turned, to the cache row of a position.
K3_DEVICE void write_cache_row(const Step& s, const OpArgs& op, const float* from, const bf16* norm, int slot, int position) {
  const int page = cache_page(s, slot, position);
  auto to = [&](int i) -> bf16& { return mla_cache(s, op)[mla_cache_at<bf16, kMlaCacheDim>(page, position, i)]; };
  block_norm<kKvLoraRank, kKvLatentNormLeaves>(kRmsNormEps, [&](int e) { return from[e]; },
                                               [&](int e, float x, float inv) { to(e) = float_to_bf16(round_bf16(x * inv) * bf16_to_float(norm[e])); });
  for (int e = threadIdx.x; e < kQkRopeHeadDim; e += kNormThreads)
    to(kKvLoraRank + e) = float_to_bf16(rotated(e, position, [&](int i) { return from[kKvLoraRank + i]; }));
}

// Of every row two blocks: its query's norm, its cache row.
struct draft_mla_norm : StageDefaults {
  static constexpr int kBlocks = kRows, kBlocksY = 2, kThreads = kNormThreads;
  static __device__ void run(const Step& s, const OpArgs& op) {
    grid_wait();
    grid_launch_next();
    const int row = blockIdx.x, slot = row_slot(s)[row];
    if (slot < 0) return;
    if (blockIdx.y) {
      write_cache_row(s, op, mla_kv_a(s) + size_t(row) * kMlaCacheDim, w_mla_kv_a_layernorm(op), slot, row_position(s)[row]);
      return;
    }
    const float* from = mla_q_a(s) + size_t(row) * kQLoraRank;
    bf16* to = mla_q_latent(s) + size_t(row) * kQLoraRank;
    block_norm<kQLoraRank, kQLatentNormLeaves>(kRmsNormEps, [&](int e) { return from[e]; }, [&](int e, float x, float inv) {
      to[e] = float_to_bf16(round_bf16(x * inv) * bf16_to_float(w_mla_q_a_layernorm(op)[e]));
    });
  }
};

// Heads are blocks along y; the first blocks turn what meets the shared key.
struct draft_mla_absorb : ProductStage<tiles_of(kKvLoraRank), kMlaKeysLeaves, kMlaKeysSteps, false, kRows, kNever> {
  typedef ProductStage<tiles_of(kKvLoraRank), kMlaKeysLeaves, kMlaKeysSteps, false, kRows, kNever> Product;
  static constexpr int kOthers = Product::kCluster, kBlocks = Product::kBlocks + kOthers, kBlocksY = kOwnNumAttentionHeads;
  template <class Kernel = Multiply> static __device__ void run(const Step& s, const OpArgs& op) {
    const int head = blockIdx.y;
    const bf16* q = ::mla_q(s) + head * kMlaQkHeadDim;
    bf16* out = mla_q_absorbed(s) + head * kMlaCacheDim;
    if (int(blockIdx.x) < kOthers) {
      grid_launch_next();
      grid_wait();
      if (blockIdx.x) return;
      for (int i = threadIdx.x; i < kRows * kQkRopeHeadDim; i += kThreads) {
        const int token = i / kQkRopeHeadDim, e = i % kQkRopeHeadDim;
        const bf16* from = q + size_t(token) * kOwnMlaQDim + kQkNopeHeadDim;
        out[size_t(token) * kOwnNumAttentionHeads * kMlaCacheDim + kKvLoraRank + e] =
            float_to_bf16(rotated(e, row_position(s)[token], [&](int j) { return bf16_to_float(from[j]); }));
      }
      return;
    }
    product<draft_mla_absorb, Kernel>(s, w_mla_keys(op) + head * kMatrix, q, kOwnMlaQDim,
                                      [&](int row, int token, float v) {
                                        if (row < kKvLoraRank) out[size_t(token) * kOwnNumAttentionHeads * kMlaCacheDim + row] = float_to_bf16(v);
                                      }, kOthers);
  }
};

// Position up to which a row sees, by layer.
K3_DEVICE const int* last_seen(const Step& s, const OpArgs& op) { return kCausal[op.layer] ? row_position(s) : row_last(s); }

K3_DEVICE MlaRows draft_rows(const Step& s, const OpArgs& op) { return {row_slot(s), last_seen(s, op), page_table(s), s.slot_pages, kAttendRows}; }

struct draft_mla_attend : mla_attend {
  static __device__ void run(const Step& s, const OpArgs& op) {
    K3_DYN_SMEM(u8, smem);
    ::mla_attend<MlaLayout, false>({draft_rows(s, op), mla_q_absorbed(s), mla_cache(s, op),
                                      kScoreScale * kLog2E, 1.0f, mla_partial(s), mla_top_sum(s), mla_next(s), mla_o_latent(s)},
                                     *(MlaSmem<MlaLayout>*)smem, [] {
                                       grid_wait();
                                       grid_launch_next();
                                     });
  }
};

struct draft_mla_combine : mla_combine {
  static __device__ void run(const Step& s, const OpArgs& op) {
    __shared__ MlaCombineSmem<kTogether> m;
    ::mla_combine<kOwnNumAttentionHeads, kKvLoraRank, kTogether>(
        {draft_rows(s, op), mla_partial(s), mla_top_sum(s), 1.0f, mla_next(s), mla_o_latent(s)}, m, [] {
          grid_wait();
          grid_launch_next();
        });
  }
};

struct draft_mla_out : ProductStage<tiles_of(kVHeadDim), kMlaValuesLeaves, kMlaValuesSteps, false, kRows, kNever> {
  static constexpr int kBlocksY = kOwnNumAttentionHeads;
  template <class Kernel = Multiply> static __device__ void run(const Step& s, const OpArgs& op) {
    const int head = blockIdx.y;
    product<draft_mla_out, Kernel>(s, w_mla_values(op) + head * kMatrix, mla_o_latent(s) + head * kKvLoraRank,
                                   kOwnNumAttentionHeads * kKvLoraRank, [&](int row, int token, float v) {
                                     if (row < kVHeadDim) mixer_out(s)[size_t(token) * kOwnMixerDim + head * kVHeadDim + row] = float_to_bf16(v);
                                   });
  }
};

// ---- context rows ----

struct context_latents : ProductStage<kNumHiddenLayers * tiles_of(kOwnMlaCacheDim), kContextKvProjLeaves, kContextKvProjSteps> {
  template <class Kernel = Multiply> static __device__ void run(const Step& s, const OpArgs& op) {
    constexpr int kLayerRows = tiles_of(kOwnMlaCacheDim) * kTileRows;
    product<context_latents, Kernel>(s, w_context_kv_proj(op), context(s), kHiddenSize, [&](int row, int token, float v) {
      const int layer = row / kLayerRows, c = row % kLayerRows;
      if (c < kOwnMlaCacheDim) put_context_latent_part(s, token * kNumHiddenLayers + layer, c, v);
    });
  }
};

struct store_latents : StageDefaults {
  static constexpr int kBlocks = kRows, kThreads = kNormThreads;
  static __device__ void run(const Step& s, const OpArgs& op) {
    grid_wait();
    grid_launch_next();
    const int row = blockIdx.x, slot = row_slot(s)[row];
    if (slot < 0 || !row_accepted(s)[row]) return;
    const float* from = context_latent(s) + (size_t(row) * kNumHiddenLayers + op.layer) * kMlaCacheDim;
    write_cache_row(s, op, from, w_context_kv_norm(op), slot, row_position(s)[row]);
  }
};

}
