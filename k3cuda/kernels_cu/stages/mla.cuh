// Gated multi-head latent attention in absorbed form.
#pragma once
#include "mla_attend.cuh"
#include "mla_combine.cuh"
#include "mla_own.cuh"
#include "stages/common.cuh"

namespace stage {

struct mla_in_rows {   // first tile of each part of the joined matrix
  static constexpr int kQa = 0, kKva = kQa + tiles_of(kOwnQLoraRank), kGate = kKva + tiles_of(kOwnMlaCacheDim), kTotal = kGate + tiles_of(kOwnMlaVDim);
};

struct mla_in : ProductStage<mla_in_rows::kTotal, kMlaInLeaves, kMlaInSteps> {
  template <class Kernel = Multiply> static __device__ void run(const Step& s, const OpArgs& op) {
    typedef mla_in_rows R;
    product<mla_in, Kernel>(s, w_mla_in(op), attn_in(s), kHiddenSize, [&](int row, int token, float v) {
      int tile = row / kTileRows;
      if (tile >= R::kGate) {
        int c = row - R::kGate * kTileRows;
        if (c < kOwnMlaVDim) mla_out_gate(s)[token * kOwnMlaVDim + c] = v;
      } else if (tile >= R::kKva) {
        int c = row - R::kKva * kTileRows;
        if (c < kOwnMlaCacheDim) put_mla_kv_a_part(s, token, c, v);
      } else if (row < kOwnQLoraRank) {
        put_mla_q_a_part(s, token, row, v);
      }
    });
  }
};

constexpr int kAttendRows = min_of(kRows, kDecodeRows);   // of a launch of attend and combine; a wider step has one a slice, from op.first_row on
K3_DEVICE MlaRows mla_rows(const Step& s, const OpArgs& op) {
  return {row_slot(s) + op.first_row, row_position(s) + op.first_row, page_table(s), s.slot_pages, kAttendRows};
}

struct mla_norm : StageDefaults {
  static constexpr int kBlocks = kRows, kThreads = 512;
  static __device__ void run(const Step& s, const OpArgs& op) {
    __shared__ float leaf[2][16];
    if constexpr (kRows <= kTokenTile) grid_launch_next();   // the plan of attention then comes under what is before it
    mla_write<kv_t, kQLoraRank, kQLatentNormLeaves, kKvLoraRank, kKvLatentNormLeaves, kQkRopeHeadDim, kGroup>(
        {mla_rows(s, op), mla_q_a(s), mla_kv_a(s), w_mla_q_a_layernorm(op), w_mla_kv_a_layernorm(op), mla_q_latent(s), mla_cache(s, op), op.kv_scale, kMlaNormEps},
        leaf, blockIdx.x, [] {
          grid_wait();
          grid_launch_next();
        }, s.rank % kGroup);
    if constexpr (kGroup > 1)
      if (threadIdx.x == 0) mla_own_last(s)[blockIdx.x] = mla_own_length(row_position(s)[blockIdx.x] + 1, s.rank % kGroup, kGroup) - 1;
  }
};

struct mla_q : ProductStage<tiles_of(kOwnMlaQDim), kMlaQBProjLeaves, kMlaQBProjSteps> {
  // The part behind the nope dims meets the shared key as it is, so it goes straight to its place in the absorbed query.
  template <class Kernel = Multiply> static __device__ void run(const Step& s, const OpArgs& op) {
    product<mla_q, Kernel>(s, w_mla_q_b_proj(op), mla_q_latent(s), kQLoraRank, [&](int row, int token, float v) {
      if (row < kOwnMlaQDim) ::mla_q(s)[token * kOwnMlaQDim + row] = float_to_bf16(v);
    });
  }
};

// Heads are blocks along y.
struct mla_absorb : ProductStage<tiles_of(kKvLoraRank), kMlaKeysLeaves, kMlaKeysSteps, false, kRows, kNever> {
  static constexpr int kBlocksY = kOwnNumAttentionHeads;
  template <class Kernel = Multiply> static __device__ void run(const Step& s, const OpArgs& op) {
    int head = blockIdx.y;
    const bf16* q = ::mla_q(s) + head * kMlaQkHeadDim;
    bf16* out = mla_q_absorbed(s) + head * kMlaCacheDim;
    product<mla_absorb, Kernel>(s, w_mla_keys(op) + head * kMatrix, q, kOwnMlaQDim,
                       [&](int row, int token, float v) {
                         bf16* to = out + size_t(token) * kOwnNumAttentionHeads * kMlaCacheDim;
                         if (row < kKvLoraRank) to[row] = float_to_bf16(v);
                         if (row < kQkRopeHeadDim) to[kKvLoraRank + row] = q[size_t(token) * kOwnMlaQDim + kQkNopeHeadDim + row];
                       });
  }
};

template <bool kFp8> struct CacheOf { typedef MlaBf16 type; };
template <> struct CacheOf<true> { typedef MlaE4m3 type; };
typedef CacheOf<kKvFp8>::type StepCache;
constexpr int kQueryTiles = ceil_div(min_of(kRows, 8) * kOwnNumAttentionHeads, 8);   // of eight (row, head) pairs that read a page together
constexpr int kGroupTiles = kQueryTiles > 4 ? 6 : kQueryTiles;
typedef MlaFit<StepCache, kOwnNumAttentionHeads, kKvLoraRank, kQkRopeHeadDim, kGroupTiles, kMaxShared>::Shape MlaLayout;

// m and sum of every partial stand before the partials themselves.
K3_DEVICE float2* mla_top_sum(const Step& s) { return (float2*)s.mla_work; }
K3_DEVICE float* mla_partial(const Step& s) { return (float*)(s.mla_work + size_t(s.mla_partials) * sizeof(float2)); }

struct mla_attend : StageDefaults {
  static constexpr int kBlocks = kSms, kThreads = MlaLayout::kThreads, kSmem = sizeof(MlaSmem<MlaLayout>), kBeside = MlaLayout::kBeside;
  static __device__ void run(const Step& s, const OpArgs& op) {
    K3_DYN_SMEM(u8, smem);
    const size_t first = size_t(op.first_row) * kOwnNumAttentionHeads;
    ::mla_attend<MlaLayout>({mla_rows(s, op), mla_q_absorbed(s) + first * kMlaCacheDim, mla_cache(s, op),
                             rsqrtf(float(kMlaQkHeadDim)) * kLog2E, op.kv_scale, mla_partial(s), mla_top_sum(s), mla_next(s), mla_o_latent(s) + first * kKvLoraRank},
                            *(MlaSmem<MlaLayout>*)smem, [] {
      grid_wait();
      grid_launch_next();
    });
  }
};

struct mla_combine : StageDefaults {
  static constexpr int kTogether = mla_combine_slabs(kAttendRows), kThreads = kMlaCombineThreads, kResident = mla_combine_resident(kTogether);
  static constexpr int kBlocks = min_of(kAttendRows * kOwnNumAttentionHeads * ceil_div(kKvLoraRank, kTogether * kMlaSlab), 4 * kSms);
  static __device__ void run(const Step& s, const OpArgs& op) {
    __shared__ MlaCombineSmem<kTogether> m;
    grid_launch_next();
    ::mla_combine<kOwnNumAttentionHeads, kKvLoraRank, kTogether>(
        {mla_rows(s, op), mla_partial(s), mla_top_sum(s), op.kv_scale, mla_next(s), mla_o_latent(s) + size_t(op.first_row) * kOwnNumAttentionHeads * kKvLoraRank}, m, [] { grid_wait(); });
  }
};

struct mla_out : ProductStage<tiles_of(kVHeadDim), kMlaValuesLeaves, kMlaValuesSteps, false, kRows, kNever> {
  static constexpr int kBlocksY = kOwnNumAttentionHeads;
  template <class Kernel = Multiply> static __device__ void run(const Step& s, const OpArgs& op) {
    int head = blockIdx.y;
    product<mla_out, Kernel>(s, w_mla_values(op) + head * kMatrix, mla_o_latent(s) + head * kKvLoraRank,
                       kOwnNumAttentionHeads * kKvLoraRank, [&](int row, int token, float v) {
                         int c = head * kVHeadDim + row;
                         if (row < kVHeadDim) mixer_out(s)[size_t(token) * kOwnKdaDim + c] = float_to_bf16(v * sigmoid(mla_out_gate(s)[size_t(token) * kOwnMlaVDim + c]));
                       });
  }
};

}
