// A draft's context: fused taps of committed rows, and from them every layer's cache rows.
#pragma once
#include "draft_core.cuh"

namespace stage {

// `op.first_row`: taps of the rows of a slice of the target's step.
K3_DEVICE const bf16* taps_of(const Step& s, const OpArgs& op) { return taps(s) + size_t(op.first_row) * kTapsDim; }
K3_DEVICE void put_fused(const Step& s, int row, int token, float v) { if (row < kOwnHiddenSize) put_context_part(s, token, row, v); }

struct fuse : ProductStage<tiles_of(kOwnHiddenSize), kContextProjLeaves, kContextProjSteps> {
  template <class Kernel = Multiply> static __device__ void run(const Step& s, const OpArgs& op) {
    product<fuse, Kernel>(s, w_context_proj(op), taps_of(s, op), kTapsDim, [&](int row, int token, float v) { put_fused(s, row, token, v); });
  }
};

struct fuse_norm : StageDefaults {
  static constexpr int kBlocks = kRows, kBlocksY = kNumTaps, kThreads = kNormThreads;
  static __device__ void run(const Step& s, const OpArgs& op) {
    grid_wait();
    grid_launch_next();
    const size_t at = size_t(blockIdx.x) * kTapsDim + blockIdx.y * kTargetHiddenSize;
    const bf16 *from = taps_of(s, op) + at, *weight = w_fc_norm(op) + blockIdx.y * kTargetHiddenSize;
    bf16* to = taps_normed(s) + at;
    if (row_slot(s)[blockIdx.x] < 0) return;
    block_norm<kTargetHiddenSize, kTapNormLeaves>(kRmsNormEps, [&](int e) { return bf16_to_float(from[e]); },
                                                  [&](int e, float x, float inv) { to[e] = float_to_bf16(x * inv * bf16_to_float(weight[e])); });
  }
};

struct fuse_normed : ProductStage<tiles_of(kOwnHiddenSize), kContextProjLeaves, kContextProjSteps> {
  template <class Kernel = Multiply> static __device__ void run(const Step& s, const OpArgs& op) {
    product<fuse_normed, Kernel>(s, w_context_proj(op), taps_normed(s), kTapsDim, [&](int row, int token, float v) { put_fused(s, row, token, v); });
  }
};

struct context_mean : StageDefaults {
  static constexpr int kBlocks = kRows, kThreads = kNormThreads;
  static __device__ void run(const Step& s, const OpArgs& op) {
    grid_wait();
    grid_launch_next();
    if (row_slot(s)[blockIdx.x] < 0) return;
    const float* from = context_raw(s) + size_t(blockIdx.x) * kHiddenSize;
    bf16* to = context(s) + size_t(blockIdx.x) * kHiddenSize;
    block_norm<kHiddenSize, kHiddenNormLeaves>(kRmsNormEps, [&](int e) { return from[e]; },
                                               [&](int e, float x, float inv) { to[e] = float_to_bf16(x * inv * bf16_to_float(w_context_norm(op)[e])); });
  }
};

}
