// Logits of the rows that were asked for.
#pragma once
#include "stages/common.cuh"

namespace stage {

struct lm_head : ProductStage<tiles_of(kOwnVocabSize), kLmHeadLeaves, kLmHeadSteps, false, kHeadRows> {
  template <class Kernel = Multiply> static __device__ void run(const Step& s, const OpArgs& op) {
    if constexpr (kRows > kDecodeRows) {   // inside a prompt nobody wants logits
      grid_wait();
      if (logit_rows(s)[0] < 0) return;
    }
    product<lm_head, Kernel>(s, w_lm_head(op), head_in(s), kHiddenSize, [&](int row, int token, float v) {
      if (row < kOwnVocabSize) put_logits_part(s, token, row, v);
    });
  }
};

}
