// Between the halves of a draft's layer, its plain gated MLP, and the end of its block.
#pragma once
#include "draft_core.cuh"

namespace stage {

// hidden += add(column) in one row, then out = RMSNorm of it.
template <class Add>
K3_DEVICE void add_and_norm(const Step& s, int row, const bf16* weight, bf16* out, Add&& add) {
  float* at = hidden(s) + size_t(row) * kHiddenSize;
  block_norm<kHiddenSize, kHiddenNormLeaves>(kRmsNormEps, [&](int e) { return at[e] + add(e); }, [&](int e, float x, float inv) {
    at[e] = x;
    out[size_t(row) * kHiddenSize + e] = float_to_bf16(x * inv * bf16_to_float(weight[e]));
  });
}

struct draft_attn_in : StageDefaults {
  static constexpr int kBlocks = kRows, kThreads = kNormThreads;
  static __device__ void run(const Step& s, const OpArgs& op) {
    grid_wait();
    grid_launch_next();
    const float* from = ffn_out(s) + size_t(blockIdx.x) * kHiddenSize;
    add_and_norm(s, blockIdx.x, w_input_layernorm(op), attn_in(s), [&](int e) { return from[e]; });
  }
};

struct draft_ffn_in : StageDefaults {
  static constexpr int kBlocks = kRows, kThreads = kNormThreads;
  static __device__ void run(const Step& s, const OpArgs& op) {
    grid_wait();
    grid_launch_next();
    const float* from = attn_parts(s) + size_t(blockIdx.x) * kHiddenSize;
    add_and_norm(s, blockIdx.x, w_post_attention_layernorm(op), ffn_in(s), [&](int e) { return tree_sum<kParts>(from + e, kDecodeRows * kHiddenSize); });
  }
};

struct silu_up : ProductStage<2 * tiles_of(kOwnIntermediateSize), kDenseGateUpLeaves, kDenseGateUpSteps, true> {
  template <class Kernel = Multiply> static __device__ void run(const Step& s, const OpArgs& op) {
    product<silu_up, Kernel>(s, w_dense_gate_up(op), ffn_in(s), kHiddenSize, [&](int row, int token, float gate, float up) {
      if (row < kOwnIntermediateSize) dense_act(s)[size_t(token) * kOwnIntermediateSize + row] = float_to_bf16(gate * sigmoid(gate) * up);
    });
  }
};

// Blocks of the rows that give drafts, then one a sequence for its anchor's Markov embedding.
struct draft_out : StageDefaults {
  static constexpr int kBlocks = kHeadRows + kSeqs, kThreads = kNormThreads;
  static __device__ void run(const Step& s, const OpArgs& op) {
    grid_wait();
    grid_launch_next();
    const int index = blockIdx.x;
    if (index >= kHeadRows) {
      const int seq = index - kHeadRows, first = first_row_of(s, seq);
      if (first < 0) return;
      const bf16* from = w_markov_w1(op) + size_t(token_ids(s)[first]) * kMarkovRank;
      for (int i = threadIdx.x; i < kMarkovRank; i += kThreads) markov_in(s)[seq * kMarkovRank + i] = from[i];
      return;
    }
    const int row = logit_rows(s)[index];
    if (row < 0) return;
    const float *a = hidden(s) + size_t(row) * kHiddenSize, *b = ffn_out(s) + size_t(row) * kHiddenSize;
    bf16* to = head_in(s) + size_t(index) * kHiddenSize;
    block_norm<kHiddenSize, kHiddenNormLeaves>(kRmsNormEps, [&](int e) { return a[e] + b[e]; },
                                               [&](int e, float x, float inv) { to[e] = float_to_bf16(x * inv * bf16_to_float(w_final_norm(op)[e])); });
  }
};

}
