// Token ids to what the first layer adds to an empty prefix sum.
#pragma once
#include "stages/common.cuh"

namespace stage {

// The rank that owns a token's row gives it, the others zero. Looped back, a rank gives the row that stands where the token's does in its owner's part:
// rows of zeros would all choose the same experts.
struct embed : ElementStage {
  static __device__ void run(const Step& s, const OpArgs& op) {
    grid_wait();
    grid_launch_next();
    const int token = token_ids(s)[blockIdx.x];
    const int own = s.loopback ? token % kOwnVocabSize : token - s.rank * kOwnVocabSize;
    bool mine = own >= 0 && own < kOwnVocabSize;
    const bf16* from = w_embed_tokens(op) + size_t(mine ? own : 0) * kHiddenSize;
    columns([&](int row, int i) { put_embed_partial(s, row, i, mine ? bf16_to_float(from[i]) : 0.f); });
  }
};

struct embed_sum : ElementStage {
  static __device__ void run(const Step& s, const OpArgs&) {
    grid_wait();
    grid_launch_next();
    columns([&](int row, int i) {
      sum_to_ffn_out(s, embed_parts(s), row, i);
      hidden(s)[row * kHiddenSize + i] = 0.f;
    });
  }
};

}
