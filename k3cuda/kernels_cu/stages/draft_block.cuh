// Between the halves of a draft's layer, its plain gated MLP, and the end of its block.
#pragma once
#include "draft_core.cuh"
#include "norm_row.cuh"

namespace stage {

// hidden += the parts' sum in one row, then the norm of it: a cluster of blocks a row, as the target's mixes, with nothing to mix.
template <int kParts_>
struct DraftNorm : StageDefaults {
  static constexpr int kSpread = norm_spread(kHiddenSize, kHiddenNormLeaves);
  typedef NormShape<kHiddenSize, kHiddenNormLeaves, kParts_, 0, kSpread, 14 * kWarpSize> Shape;
  static constexpr int kThreads = Shape::kThreads, kCluster = kSpread, kSmem = sizeof(NormSmem<Shape>);
  static __device__ void row(const NormRow& a) {
    K3_DYN_SMEM(u8, smem);
    grid_launch_next();
    norm_row<Shape>(a, *(NormSmem<Shape>*)smem, blockIdx.x / kSpread, blockIdx.x % kSpread, [] { grid_wait(); });
  }
};

struct draft_attn_in : DraftNorm<1> {
  static constexpr int kBlocks = kRows * kSpread;
  static __device__ void run(const Step& s, const OpArgs& op) {
    row({row_slot(s), nullptr, kDecodeRows, kDecodeRows, ffn_out(s), hidden(s), hidden(s), nullptr, nullptr, 0, nullptr, w_input_layernorm(op), attn_in(s),
         kRmsNormEps});
  }
};

struct draft_ffn_in : DraftNorm<kParts> {
  static constexpr int kBlocks = kRows * kSpread;
  static __device__ void run(const Step& s, const OpArgs& op) {
    row({row_slot(s), nullptr, kDecodeRows, kDecodeRows, attn_parts(s), hidden(s), hidden(s), nullptr, nullptr, 0, nullptr, w_post_attention_layernorm(op),
         ffn_in(s), kRmsNormEps});
  }
};

struct silu_up : ProductStage<2 * tiles_of(kOwnIntermediateSize), kDenseGateUpLeaves, kDenseGateUpSteps, true> {
  template <class Kernel = Multiply> static __device__ void run(const Step& s, const OpArgs& op) {
    product<silu_up, Kernel>(s, w_dense_gate_up(op), ffn_in(s), kHiddenSize, [&](int row, int token, float gate, float up) {
      if (row < kOwnIntermediateSize) dense_act(s)[size_t(token) * kOwnIntermediateSize + row] = float_to_bf16(gate * sigmoid(gate) * up);
    });
  }
};

// Clusters of the rows that give drafts, then one a sequence for its anchor's Markov embedding.
struct draft_out : DraftNorm<1> {
  static constexpr int kBlocks = (kHeadRows + kSeqs) * kSpread;
  static __device__ void run(const Step& s, const OpArgs& op) {
    if (blockIdx.x < kHeadRows * kSpread)
      return row({nullptr, logit_rows(s), kDecodeRows, kDecodeRows, ffn_out(s), hidden(s), nullptr, nullptr, nullptr, 0, nullptr, w_final_norm(op), head_in(s),
                  kRmsNormEps});
    grid_launch_next();
    grid_wait();
    const int seq = blockIdx.x / kSpread - kHeadRows, first = first_row_of(s, seq);
    if (first < 0 || blockIdx.x % kSpread) return;
    const bf16* from = w_markov_w1(op) + size_t(token_ids(s)[first]) * kMarkovRank;
    for (int i = threadIdx.x; i < kMarkovRank; i += kThreads) markov_in(s)[seq * kMarkovRank + i] = from[i];
  }
};

}
