// Logits of the rows that were asked for.
#pragma once
#include "stages/common.cuh"

namespace stage {

struct lm_head : ProductStage<tiles_of(kOwnVocabSize), kLmHeadLeaves, kLmHeadSteps> {
  static __device__ void run(const Step& s, const OpArgs& op) {
    K3_DYN_SMEM(u8, smem);
    row_product<Shape>(w_lm_head(op), kTiles, head_in(s), kHiddenSize, kRows, smem, [&](int row, int token, float v) {
      if (row < kOwnVocabSize) put_logits_part(s, token, row, v);
    });
  }
};

}
