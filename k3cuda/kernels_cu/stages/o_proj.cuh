// Output projection of either attention, cut over its inputs: every rank has a partial sum.
#pragma once
#include "stages/common.cuh"

namespace stage {

struct o_proj : ProductStage<tiles_of(kHiddenSize), kOProjLeaves, kOProjSteps> {
  static constexpr bool kLate = kRows == 1;
  template <class Kernel = Multiply> static __device__ void run(const Step& s, const OpArgs& op) {
    product<o_proj, Kernel>(s, w_o_proj(op), mixer_out(s), kOwnKdaDim, in_runs<kPartRun>([&](int row, int token, auto v) {
      if (row < kHiddenSize) put_attn_partial(s, token, row, v);
    }));
  }
};

}
