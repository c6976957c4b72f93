// The dense MLP of the first layers.
#pragma once
#include "stages/common.cuh"

namespace stage {

struct dense_up : ProductStage<2 * tiles_of(kOwnIntermediateSize), kDenseGateUpLeaves, kDenseGateUpSteps, true> {
  template <class Kernel = Multiply> static __device__ void run(const Step& s, const OpArgs& op) {
    product<dense_up, Kernel>(s, w_dense_gate_up(op), ffn_in(s), kHiddenSize, [&](int row, int token, float gate, float up) {
      if (row < kOwnIntermediateSize) dense_act(s)[size_t(token) * kOwnIntermediateSize + row] = float_to_bf16(situ(gate, up));
    });
  }
};

struct dense_down : ProductStage<tiles_of(kHiddenSize), kDenseDownProjLeaves, kDenseDownProjSteps> {
  template <class Kernel = Multiply> static __device__ void run(const Step& s, const OpArgs& op) {
    product<dense_down, Kernel>(s, w_dense_down_proj(op), dense_act(s), kOwnIntermediateSize, in_runs<kPartRun>([&](int row, int token, auto v) {
      if (row < kHiddenSize) put_dense_partial(s, token, row, v);
    }));
  }
};

struct dense_sum : ElementStage {
  static __device__ void run(const Step& s, const OpArgs&) {
    grid_wait();
    grid_launch_next();
    columns([&](int row, int i) { sum_to_ffn_out(s, dense_parts(s), row, i); });
  }
};

}
