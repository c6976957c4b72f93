// Output projection of either attention, cut over its inputs: every rank has a partial sum.
#pragma once
#include "stages/common.cuh"

namespace stage {

struct o_proj : ProductStage<tiles_of(kHiddenSize), kOProjLeaves, kOProjSteps> {
  static __device__ void run(const Step& s, const OpArgs& op) {
    K3_DYN_SMEM(u8, smem);
    row_product<Shape>(w_o_proj(op), kTiles, mixer_out(s), kOwnKdaDim, kRows, smem, [&](int row, int token, float v) {
      if (row < kHiddenSize) put_attn_partial(s, token, row, v);
    });
  }
};

}
