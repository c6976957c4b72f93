// Between two half layers: what the one left joins the prefix sum, AttnRes mixes it with the closed blocks, the norm feeds the next.
#pragma once
#include "norm_row.cuh"
#include "norm_wide.cuh"
#include "stages/common.cuh"

namespace stage {

// A cluster of blocks a row, or a block a row where there are many.
template <int kParts, int kSize, int kLeaves, int kBlocks, bool kIsWide = (kRows > 16)>
struct MixStage : StageDefaults {
  static constexpr int kSpread = min_of(kLeaves, 8);   // blocks a row
  typedef NormShape<kSize, kLeaves, kParts, kBlocks, kSpread, 14 * kWarpSize> Shape;
  static constexpr int kThreads = Shape::kThreads, kCluster = kSpread, kSmem = sizeof(NormSmem<Shape>);
  static __device__ void row(const NormRow& a) {
    K3_DYN_SMEM(u8, smem);
    grid_launch_next();
    norm_row<Shape>(a, *(NormSmem<Shape>*)smem, blockIdx.x / kSpread, blockIdx.x % kSpread, [] { grid_wait(); });
  }
};
template <int kParts, int kSize, int kLeaves, int kBlocks>
struct MixStage<kParts, kSize, kLeaves, kBlocks, true> : StageDefaults {
  static constexpr int kSpread = 1;
  typedef WideNormShape<kSize, kLeaves, kParts, kBlocks, (kRows <= kDecodeRows)> Shape;
  static constexpr int kThreads = Shape::kThreads, kResident = Shape::kResident, kSmem = sizeof(WideNormSmem<Shape>);
  static __device__ void row(const NormRow& a) {
    K3_DYN_SMEM(u8, smem);
    grid_launch_next();
    wide_norm_row<Shape>(a, *(WideNormSmem<Shape>*)smem, blockIdx.x, [] { grid_wait(); });
  }
};

constexpr int kMixBlocks = kNumResBlocks;

struct attn_mix : MixStage<1, kHiddenSize, kHiddenNormLeaves, kMixBlocks> {
  static constexpr int kBlocks = kRows * kSpread;
  static __device__ void run(const Step& s, const OpArgs& op) {
    float* snapshot = op.opens_block ? res_blocks(s) + size_t(op.num_blocks) * kMaxRows * kHiddenSize : nullptr;
    row({row_slot(s), nullptr, kMaxRows, kDecodeRows, ffn_out(s), hidden(s), hidden(s), snapshot, res_blocks(s), op.num_blocks, w_attn_score(op),
         w_input_layernorm(op), attn_in(s), kRmsNormEps});
  }
};

struct ffn_mix : MixStage<kParts, kHiddenSize, kHiddenNormLeaves, kMixBlocks> {
  static constexpr int kBlocks = kRows * kSpread, kSmem = apart(MixStage::kSmem, kBlocks, 2);
  static __device__ void run(const Step& s, const OpArgs& op) {
    row({row_slot(s), nullptr, kMaxRows, kDecodeRows, attn_parts(s), hidden(s), hidden(s), nullptr, res_blocks(s), op.num_blocks, w_ffn_score(op),
         w_post_attention_layernorm(op), ffn_in(s), kRmsNormEps});
  }
};

struct output_mix : MixStage<1, kHiddenSize, kHiddenNormLeaves, kMixBlocks> {
  static constexpr int kBlocks = kHeadRows * kSpread;
  static __device__ void run(const Step& s, const OpArgs& op) {
    row({nullptr, logit_rows(s), kMaxRows, kDecodeRows, ffn_out(s), hidden(s), nullptr, nullptr, res_blocks(s), op.num_blocks, w_output_score(op),
         w_final_norm(op), head_in(s), kRmsNormEps});
  }
};

}
