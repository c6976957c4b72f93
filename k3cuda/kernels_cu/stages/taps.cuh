// What a draft model reads of the target: the prefix sum behind a layer, or the mixture that the next layer reads.
#pragma once
#include "norm_row.cuh"
#include "stages/common.cuh"

namespace stage {

struct tap_prefix : ElementStage {
  static __device__ void run(const Step& s, const OpArgs& op) {
    grid_wait();
    grid_launch_next();
    bf16* to = taps(s) + size_t(op.kind_index) * kHiddenSize;
    columns([&](int row, int i) { to[size_t(row) * kNumTaps * kHiddenSize + i] = float_to_bf16(hidden(s)[row * kHiddenSize + i] + ffn_out(s)[row * kHiddenSize + i]); });
  }
};

struct TapMix : StageDefaults {
  static constexpr int kSpread = norm_spread(kHiddenSize, kHiddenNormLeaves);
  typedef NormShape<kHiddenSize, kHiddenNormLeaves, 1, kNumResBlocks, kSpread, 256, false, kNumTaps * kHiddenSize> Shape;
  static constexpr int kBlocks = kRows * kSpread, kThreads = Shape::kThreads, kCluster = kSpread, kSmem = sizeof(NormSmem<Shape>);
  static __device__ void mix(const Step& s, const OpArgs& op, const float* score) {
    K3_DYN_SMEM(u8, smem);
    norm_row<Shape>({row_slot(s), nullptr, kMaxRows, kDecodeRows, ffn_out(s), hidden(s), nullptr, nullptr, res_blocks(s), op.num_blocks, score, nullptr,
                     taps(s) + size_t(op.kind_index) * kHiddenSize, kRmsNormEps},
                    *(NormSmem<Shape>*)smem, blockIdx.x / kSpread, blockIdx.x % kSpread, [] {
                      grid_wait();
                      grid_launch_next();
                    });
  }
};

struct tap_mix : TapMix {
  static __device__ void run(const Step& s, const OpArgs& op) { mix(s, op, w_tap_score(op)); }
};

struct tap_output_mix : TapMix {
  static __device__ void run(const Step& s, const OpArgs& op) { mix(s, op, w_tap_output_score(op)); }
};

}
