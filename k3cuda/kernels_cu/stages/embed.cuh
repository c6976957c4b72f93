// Token ids to what the first layer adds to an empty prefix sum.
#pragma once
#include "stages/common.cuh"

namespace stage {

// The rank that owns a token's row gives it, the others zero.
struct embed : StageDefaults {
  static constexpr int kBlocks = kRows, kThreads = 256;
  static __device__ void run(const Step& s, const OpArgs& op) {
    grid_wait();
    grid_launch_next();
    int row = blockIdx.x, own = token_ids(s)[row] - s.rank * kOwnVocabSize;
    bool mine = own >= 0 && own < kOwnVocabSize;
    const bf16* from = w_embed_tokens(op) + size_t(mine ? own : 0) * kHiddenSize;
    for (int i = threadIdx.x; i < kHiddenSize; i += kThreads)
      put_embed_partial(s, row, i, mine ? bf16_to_float(from[i]) : 0.f);
  }
};

struct embed_sum : StageDefaults {
  static constexpr int kBlocks = kRows, kThreads = 256;
  static __device__ void run(const Step& s, const OpArgs&) {
    grid_wait();
    grid_launch_next();
    sum_to_ffn_out(s, embed_parts(s), blockIdx.x);
    for (int i = threadIdx.x; i < kHiddenSize; i += kThreads) hidden(s)[blockIdx.x * kHiddenSize + i] = 0.f;
  }
};

}
