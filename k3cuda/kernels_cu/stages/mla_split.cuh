// Latent attention where a group of ranks holds the MLA cache together: in the place of mla_attend.
#pragma once
#include "mla_own.cuh"
#include "stages/mla.cuh"

namespace stage {

// Rows as this rank's own positions count them; mla_norm has written these.
K3_DEVICE MlaRows mla_own_rows(const Step& s, const OpArgs& op) {
  return {row_slot(s) + op.first_row, mla_own_last(s) + op.first_row, page_table(s), s.slot_pages, kAttendRows};
}

constexpr int kGroupQueryTiles = ceil_div(min_of(kRows, 8) * kGroupHeads, 8), kOwnTiles = kGroupQueryTiles > 4 ? 6 : kGroupQueryTiles;
struct MlaOwnLayout : MlaFit<StepCache, kGroupHeads, kKvLoraRank, kQkRopeHeadDim, kOwnTiles, kMaxShared>::Shape {
  static constexpr bool kPartial = true;
};

struct mla_attend_own : StageDefaults {
  static constexpr int kBlocks = kSms, kThreads = MlaOwnLayout::kThreads, kSmem = sizeof(MlaSmem<MlaOwnLayout>);
  static __device__ void run(const Step& s, const OpArgs& op) {
    K3_DYN_SMEM(u8, smem);
    grid_wait();   // before the rows are read: their own positions are of this step
    grid_launch_next();
    ::mla_attend<MlaOwnLayout, false>({mla_own_rows(s, op), mla_q_group(s) + size_t(op.first_row) * kGroupHeads * kMlaCacheDim, mla_cache(s, op),
                                       rsqrtf(float(kMlaQkHeadDim)) * kLog2E, op.kv_scale, mla_partial(s), mla_top_sum(s),
                                       mla_next(s), nullptr}, *(MlaSmem<MlaOwnLayout>*)smem, [] {});
  }
};

struct mla_combine_own : StageDefaults {
  static constexpr int kThreads = kMlaCombineThreads, kBlocks = min_of(kAttendRows * kGroupHeads * ceil_div(kKvLoraRank, kMlaSlab), 4 * kSms);
  static __device__ void run(const Step& s, const OpArgs& op) {
    __shared__ MlaCombineSmem<1> m;
    ::mla_combine_own<kGroupHeads, kKvLoraRank>({mla_own_rows(s, op), mla_partial(s), mla_top_sum(s), op.kv_scale, mla_next(s), nullptr},
                                                mla_own(s) + size_t(op.first_row) * kGroupHeads * kMlaOwnDim, m, [] {
      grid_wait();
      grid_launch_next();
    });
  }
};

struct mla_merge : StageDefaults {
  static constexpr int kBlocks = kOwnNumAttentionHeads, kBlocksY = kRows, kThreads = 128;
  static __device__ void run(const Step& s, const OpArgs& op) {
    grid_wait();
    grid_launch_next();
    const int row = blockIdx.y, head = blockIdx.x;
    if (row_slot(s)[row] < 0) return;
    const size_t at = size_t(row) * kOwnNumAttentionHeads + head;
    ::mla_merge<kGroup, kKvLoraRank>(mla_owns(s) + at * kMlaOwnDim, size_t(kMaxRows) * kOwnNumAttentionHeads * kMlaOwnDim, op.kv_scale, mla_o_latent(s) + at * kKvLoraRank);
  }
};

}
