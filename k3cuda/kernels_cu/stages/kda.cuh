// Kimi Delta Attention: projections, the fused middle, the commit.
#pragma once
#include "kda_commit.cuh"
#include "kda_mix.cuh"
#include "kda_rows.cuh"
#include "stages/common.cuh"

namespace stage {

struct kda_in_rows {   // first tile of each part of the joined matrix
  static constexpr int kFa = 0, kBeta = kFa + tiles_of(kOwnKdaHeadDim), kQkv = kBeta + tiles_of(kOwnKdaNumHeads),
                       kHead = tiles_of(kOwnKdaDim), kGate = kQkv + 3 * kHead, kTotal = kGate + kHead;
};

struct kda_in : ProductStage<kda_in_rows::kTotal, kKdaInLeaves, kKdaInSteps> {
  template <class Kernel = Multiply> static __device__ void run(const Step& s, const OpArgs& op) {
    typedef kda_in_rows R;
    product<kda_in, Kernel>(s, w_kda_in(op), attn_in(s), kHiddenSize, [&](int row, int token, float v) {
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

// Few sequences want a head spread over several SMs, many want it on one: the measured best (docs/kernels.md). How it is spread changes no byte.
K3_DEVICE KdaMix kda_middle(const Step& s, const OpArgs& op) {
  return {row_slot(s), kRows, kOwnKdaNumHeads, kda_qkv(s, op), kda_f_a(s), kda_beta(s, op), kda_out_gate(s), kda_state(s, op), conv_state(s, op),
          w_kda_f_b_proj(op), w_kda_a_log(op), w_kda_dt_bias(op), w_kda_q_conv(op), w_kda_k_conv(op), w_kda_v_conv(op), w_kda_o_norm(op),
          kda_k(s, op), kda_v(s, op), kda_decay(s, op), mixer_out(s), kGateLowerBound, kL2normEps, kRmsNormEps, op.advances};
}
constexpr bool kKdaByRows = kRows > kFewRows;
typedef KdaShape<kKdaHeadDim, kConvWidth, 1, 4, 256> KdaRowsLayout;
// Blocks of 512 threads: the conv's channels and the decay's products meet in few warps.
typedef KdaShape<kKdaHeadDim, kConvWidth, 4, 2, 512> KdaQuarterLayout;
typedef KdaShape<kKdaHeadDim, kConvWidth, 2, 2, 512> KdaHalfLayout;
// A commit of many sequences is bound by its bytes, out and in: the more state in flight the better.
typedef KdaShape<kKdaHeadDim, kConvWidth, kKdaByRows ? 1 : 2, kKdaByRows ? 4 : 2> KdaCommitLayout;

struct kda_mix : StageDefaults {
  static constexpr int kLanes = max_of(1, kKdaByRows ? min_of(kRows, kSms / kOwnKdaNumHeads) : kRows / 2), kCluster = kKdaByRows ? 1 : KdaQuarterLayout::kSplit,
                       kBlocks = kLanes * kOwnKdaNumHeads * kCluster, kThreads = kKdaByRows ? KdaRowsLayout::kThreads : KdaQuarterLayout::kThreads,
                       kSmem = kKdaByRows ? sizeof(KdaRowsSmem<KdaRowsLayout>) : max_of(sizeof(KdaMixSmem<KdaQuarterLayout>), sizeof(KdaMixSmem<KdaHalfLayout>));
  static __device__ void run(const Step& s, const OpArgs& op) {
    K3_DYN_SMEM(u8, smem);
    const int cluster = blockIdx.x / kCluster, head = cluster % kOwnKdaNumHeads, lane = cluster / kOwnKdaNumHeads;
    auto ready = [] {
      grid_wait();
      grid_launch_next();
    };
    if constexpr (kKdaByRows) kda_rows<KdaRowsLayout>(kda_middle(s, op), *(KdaRowsSmem<KdaRowsLayout>*)smem, head, lane, kLanes, ready);
    else kda_mix_spread<KdaQuarterLayout, KdaHalfLayout>(kda_middle(s, op), smem, head, lane, kLanes, ready);
  }
};

// A wide step's three. Layouts: a block of eight rows has a head; a block of the recurrence a slice of its columns.
K3_DEVICE KdaWork kda_work(const Step& s) { return {kda_rows(s), kda_values(s), kda_o(s)}; }
typedef KdaShape<kKdaHeadDim, kConvWidth, 1, 4, 256> KdaGatesLayout;
typedef KdaScanShape<kKdaHeadDim, kConvWidth> KdaScanLayout;
static_assert(kMaxRows <= kStepRows, "shared memory has room for a step's rows");

struct kda_gates : StageDefaults {
  static constexpr int kBlocks = ceil_div(kRows, KdaGatesLayout::kBatch) * kOwnKdaNumHeads, kThreads = KdaGatesLayout::kThreads,
                       kSmem = sizeof(KdaGatesSmem<KdaGatesLayout>);
  static __device__ void run(const Step& s, const OpArgs& op) {
    K3_DYN_SMEM(u8, smem);
    ::kda_gates<KdaGatesLayout>(kda_middle(s, op), kda_work(s), *(KdaGatesSmem<KdaGatesLayout>*)smem, blockIdx.x % kOwnKdaNumHeads,
                                blockIdx.x / kOwnKdaNumHeads * KdaGatesLayout::kBatch, [] {
      grid_wait();
      grid_launch_next();
    });
  }
};

struct kda_scan : StageDefaults {
  static constexpr int kLanes = 8;   // sequences of a step are dealt to so many blocks
  // A row is one chain, so blocks that share an SM slow one another down, and the first blocks, those of a lone sequence, would share the SMs that the
  // kernel before leaves first. Steps of 512 rows and more have few sequences: a block has its SM alone. In others, where lanes may all be busy, lanes
  // are neighbours: what an SM takes together has one block of a lone sequence, and others that end at once.
  static constexpr bool kAlone = kRows >= 512;
  typedef KdaScanSmem<KdaScanLayout, kAlone ? 4 : 1> Smem;
  static constexpr int kSlices = kOwnKdaNumHeads * KdaScanLayout::kSplit, kBlocks = kAlone ? kSlices : kLanes, kBlocksY = kAlone ? kLanes : kSlices,
                       kThreads = KdaScanLayout::kThreads, kSmem = max_of(sizeof(Smem), kAlone ? kMaxShared / 2 + 2048 : 0);
  static __device__ void run(const Step& s, const OpArgs& op) {
    K3_DYN_SMEM(u8, smem);
    const int slice = kAlone ? blockIdx.x : blockIdx.y, lane = kAlone ? blockIdx.y : blockIdx.x;
    ::kda_scan<KdaScanLayout>(kda_middle(s, op), kda_work(s), *(Smem*)smem, slice / KdaScanLayout::kSplit,
                              slice % KdaScanLayout::kSplit, lane, kLanes, [] {
      grid_wait();
      grid_launch_next();
    });
  }
};

struct kda_norm : StageDefaults {
  static constexpr int kWarps = 8, kBlocks = ceil_div(kRows * kOwnKdaNumHeads, kWarps), kThreads = kWarps * kWarpSize;
  static __device__ void run(const Step& s, const OpArgs& op) {
    grid_wait();
    grid_launch_next();
    ::kda_norm<KdaScanLayout>(kda_middle(s, op), kda_work(s), blockIdx.x * kWarps + warp_id());
  }
};

// Every KDA layer in one launch.
struct kda_commit : StageDefaults {
  static constexpr int kResident = kKdaByRows ? 2 : 1;
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
