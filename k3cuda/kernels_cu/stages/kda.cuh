// Kimi Delta Attention: projections, the fused middle, the commit.
#pragma once
#include "kda_commit.cuh"
#include "stages/common.cuh"

namespace stage {

struct kda_in_rows {   // first tile of each part of the joined matrix
  static constexpr int kFa = 0, kBeta = kFa + tiles_of(kOwnKdaHeadDim), kQkv = kBeta + tiles_of(kOwnKdaNumHeads),
                       kHead = tiles_of(kOwnKdaDim), kGate = kQkv + 3 * kHead, kTotal = kGate + kHead;
};

struct kda_in : ProductStage<kda_in_rows::kTotal, kKdaInLeaves, kKdaInSteps> {
  static __device__ void run(const Step& s, const OpArgs& op) {
    typedef kda_in_rows R;
    K3_DYN_SMEM(u8, smem);
    row_product<Shape>(w_kda_in(op), kTiles, attn_in(s), kHiddenSize, kRows, smem, [&](int row, int token, float v) {
      int tile = row / kTileRows;
      if (tile >= R::kGate) {
        int c = row - R::kGate * kTileRows;
        if (c < kOwnKdaDim) kda_out_gate(s)[token * kOwnKdaDim + c] = v;
      } else if (tile >= R::kQkv) {
        int which = (tile - R::kQkv) / R::kHead, c = row - (R::kQkv + which * R::kHead) * kTileRows;
        if (c < kOwnKdaDim) kda_qkv(s, op)[(token * 3 + which) * kOwnKdaDim + c] = float_to_bf16(v);
      } else if (tile >= R::kBeta) {
        int h = row - R::kBeta * kTileRows;
        if (h < kOwnKdaNumHeads) kda_beta(s, op)[token * kOwnKdaNumHeads + h] = sigmoid(v);
      } else if (row < kOwnKdaHeadDim) {
        put_kda_f_a_part(s, token, row, float_to_bf16(v));
      }
    });
  }
};

// A cluster a (row, head); only rows that open a sequence work. Few sequences want a head spread over several SMs, many want it on one:
// the measured best (docs/kernels.md). How it is spread changes no byte.
constexpr int kHeadSplit = kRows <= 8 ? 2 : 1;
typedef KdaShape<kKdaHeadDim, kConvWidth, kHeadSplit, kRows <= 8 ? 2 : 4, 256> KdaLayout;
typedef KdaShape<kKdaHeadDim, kConvWidth, 2, 2> KdaCommitLayout;

struct kda_mix : StageDefaults {
  static constexpr int kBlocks = kRows * kOwnKdaNumHeads * KdaLayout::kSplit, kThreads = KdaLayout::kThreads, kCluster = KdaLayout::kSplit,
                       kSmem = sizeof(KdaMixSmem<KdaLayout>);
  static __device__ void run(const Step& s, const OpArgs& op) {
    K3_DYN_SMEM(u8, smem);
    KdaMix a = {row_slot(s), kRows, kOwnKdaNumHeads, kda_qkv(s, op), kda_f_a(s), kda_beta(s, op), kda_out_gate(s), kda_state(s, op), conv_state(s, op),
                w_kda_f_b_proj(op), w_kda_a_log(op), w_kda_dt_bias(op), w_kda_q_conv(op), w_kda_k_conv(op), w_kda_v_conv(op), w_kda_o_norm(op),
                kda_k(s, op), kda_v(s, op), kda_decay(s, op), mixer_out(s), kGateLowerBound, kL2normEps, kRmsNormEps};
    int cluster = blockIdx.x / KdaLayout::kSplit;
    ::kda_mix<KdaLayout>(a, *(KdaMixSmem<KdaLayout>*)smem, cluster % kOwnKdaNumHeads, blockIdx.x % KdaLayout::kSplit, cluster / kOwnKdaNumHeads, [] {
      grid_wait();
      grid_launch_next();
    });
  }
};

// Every KDA layer in one launch.
struct kda_commit : StageDefaults {
  static constexpr int kLanes = kRows < 4 ? kRows : 4;   // sequences of a step are dealt to so many blocks
  static constexpr int kBlocks = kNumKdaLayers * kOwnKdaNumHeads * KdaCommitLayout::kSplit, kBlocksY = kLanes, kThreads = KdaCommitLayout::kThreads,
                       kSmem = sizeof(KdaCommitSmem<KdaCommitLayout>);
  static __device__ void run(const Step& s, const OpArgs&) {
    K3_DYN_SMEM(u8, smem);
    OpArgs first = {};
    KdaCommit a = {row_slot(s), row_accepted(s), kRows, kOwnKdaNumHeads, s.slots, kMaxRows, kda_qkv(s, first), kda_k(s, first), kda_v(s, first),
                   kda_decay(s, first), kda_beta(s, first), s.kda_state_base, s.conv_state_base};
    grid_wait();
    grid_launch_next();
    int part = blockIdx.x % KdaCommitLayout::kSplit, piece = blockIdx.x / KdaCommitLayout::kSplit, head = piece % kOwnKdaNumHeads,
        layer = piece / kOwnKdaNumHeads;
    ::kda_commit<KdaCommitLayout>(a, *(KdaCommitSmem<KdaCommitLayout>*)smem, layer, head, part, blockIdx.y, kLanes);
  }
};

}
