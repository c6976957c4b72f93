// LatentMoE: router and latent beside the shared expert's way up, the choice beside its way down, the routed experts, their norm and way back.
#pragma once
#include "expert_down.cuh"
#include "expert_wide.cuh"
#include "list_wide.cuh"
#include "norm_row.cuh"
#include "norm_wide.cuh"
#include "stages/common.cuh"
#include "route_core.cuh"

namespace stage {

struct moe_in_rows {   // tiles: gate and up of the shared expert in turn, then router, then latent-down
  static constexpr int kShared = 2 * tiles_of(kOwnSharedIntermediateSize), kRouter = kShared, kLatent = kRouter + tiles_of(kOwnNumExperts),
                       kTotal = kLatent + tiles_of(kOwnRoutedExpertHiddenSize);
};

struct moe_in : ProductStage<moe_in_rows::kTotal, kMoeInLeaves, kMoeInSteps, true> {
  static constexpr bool kLate = kRows == 1;
  static __device__ void other(const Step& s, int row, int token, float v) {   // row of the joined matrix, behind the shared expert
    typedef moe_in_rows R;
    if (row >= R::kLatent * kTileRows) {
      int c = row - R::kLatent * kTileRows;
      if (c < kOwnRoutedExpertHiddenSize) put_moe_latent_part(s, token, c, float_to_bf16(v));
    } else {
      int c = row - R::kRouter * kTileRows;
      if (c < kOwnNumExperts) put_router_logits_part(s, token, c, v);
    }
  }
  template <class Kernel = Multiply> static __device__ void run(const Step& s, const OpArgs& op) {
    typedef moe_in_rows R;
    product<moe_in, Kernel>(s, w_moe_in(op), ffn_in(s), kHiddenSize, [&](int row, int token, float even, float odd) {
      int pair = row / kTileRows, in_tile = row % kTileRows;
      if (2 * pair < R::kShared) {
        if (row < kOwnSharedIntermediateSize) shared_act(s)[token * kOwnSharedIntermediateSize + row] = float_to_bf16(situ(even, odd));
      } else {
        K3_ROLLED
        for (int tile = 2 * pair; tile < min_of(2 * pair + 2, R::kTotal); ++tile) other(s, tile * kTileRows + in_tile, token, tile % 2 ? odd : even);
      }
    });
  }
};

// A benchmark's routing: the items of a step take kForcedExperts experts in turn, other ones in every layer, with the router's weights.
K3_DEVICE void force_experts(const Step& s, const OpArgs& op, int row) {
  __syncthreads();   // the router's choice is written
  for (int i = threadIdx.x; i < kNumExpertsPerToken; i += blockDim.x) {
    int item = row * kNumExpertsPerToken + i;
    expert_ids(s)[item] = (item % max_of(kForcedExperts, 1) * kForcedStride + op.layer) % kNumExperts;
  }
}

// The router's choice, a block a row.
struct choose : StageDefaults {
  static constexpr int kBlocks = kRows, kThreads = 128;
  template <int kThreads> using Shape = RouteShape<kNumExperts, kNumExpertsPerToken, kThreads>;
  template <int kThreads> static __device__ void row(const Step& s, const OpArgs& op, int row, RouteSmem<Shape<kThreads>>& smem) {
    const bool live = row < kRows && row_slot(s)[row] >= 0;
    const int first = row * kNumExpertsPerToken;
    route_row<Shape<kThreads>>(router_logits(s) + size_t(row) * kNumExperts, w_e_score_correction_bias(op), live, kRoutedScalingFactor,
                               expert_ids(s) + first, expert_weights(s) + first, smem, [] {
      grid_wait();
      grid_launch_next();
    });
    if (kForcedExperts > 0 && live) force_experts(s, op, row);
  }
  static __device__ void run(const Step& s, const OpArgs& op) {
    __shared__ RouteSmem<Shape<kThreads>> smem;
    row<kThreads>(s, op, blockIdx.x, smem);
  }
};

// Of several leaves in wide steps alone: route has no second kernel.
constexpr Once kSharedDownOnce = kSharedDownProjLeaves == 1 ? kFewToo : kInWideSteps;
struct shared_down : ProductStage<tiles_of(kHiddenSize), kSharedDownProjLeaves, kSharedDownProjSteps, false, kRows, kSharedDownOnce> {
  template <class Kernel = Multiply> static __device__ void run(const Step& s, const OpArgs& op, int others = 0) {
    product<shared_down, Kernel>(s, w_shared_down_proj(op), shared_act(s), kOwnSharedIntermediateSize, in_runs<kPartRun>([&](int row, int token, auto v) {
      if (row < kHiddenSize) put_shared_partial(s, token, row, v);
    }), others);
  }
};

// Both in one kernel: the choice keeps a few multiprocessors busy, the shared expert's way down the others.
struct route : shared_down {
  static constexpr int kChoosers = ceil_div(kRows, kCluster) * kCluster, kBlocks = kChoosers + shared_down::kBlocks;
  static constexpr int kSmem = apart(max_of(shared_down::kSmem, sizeof(RouteSmem<choose::Shape<kThreads>>)), kBlocks, 1);
  static __device__ void run(const Step& s, const OpArgs& op) {
    static_assert(kRows > kDecodeRows || !kSumBlocks, "no second kernel adds leaf sums");
    K3_DYN_SMEM(u8, smem);
    if (blockIdx.x < kChoosers) choose::row<kThreads>(s, op, blockIdx.x, *(RouteSmem<choose::Shape<kThreads>>*)smem);
    else shared_down::run(s, op, kChoosers);
  }
};

constexpr int kMaxItems = kRows * kNumExpertsPerToken;
constexpr bool kListed = kRows > kDecodeRows;   // a wide step lists the experts once, in memory
typedef ExpertList<kMaxItems> StepExperts;
K3_DEVICE StepExperts* step_experts(const Step& s) { return (StepExperts*)expert_list(s); }

// Items of an entry. In a step of 512 rows and more an expert has nine or more on average: several tiles of tokens share its expansion, where
// registers hold them.
constexpr bool kManyTiles = kRows >= 512 && max_of(kExpertW13Steps, kExpertW2Steps) <= 8;
#if __CUDA_ARCH__ >= 1000   // where ptxas finds registers for two
constexpr int kMostTiles = 2;
#else
constexpr int kMostTiles = 3;
#endif
constexpr int kStepEntryTokens = kManyTiles ? kMostTiles * kEntryTokens : kEntryTokens;

// Blocks of a wide step list who needs which expert, each some of the experts.
struct route_list : StageDefaults {
  static constexpr int kBlocks = 16, kThreads = 512;
  typedef WideListShape<kNumExperts, kNumExpertsPerToken, kRows, kBlocks, kThreads, kStepEntryTokens> Shape;
  static __device__ void run(const Step& s, const OpArgs&) {
    __shared__ WideListSmem<Shape> smem;
    StepExperts& to = *step_experts(s);
    list_wide<Shape>(expert_ids(s), row_slot(s), {&to.entries, &to.items, to.entry, to.item}, smem, [] {
      grid_wait();
      grid_launch_next();
    });
  }
};

// Every block of kThreads threads lists them for itself; `ready` comes before the ids are read.
template <int kThreads>
struct ListMaker {
  typedef ListShape<kNumExperts, kNumExpertsPerToken, kRows, kThreads, kEntryTokens> Shape;
  static constexpr int kScratch = Shape::kOneRow || kListed ? 0 : sizeof(ListSmem<Shape>);
  template <class Ready>
  static __device__ void make(const Step& s, StepExperts& list, u8* scratch, Ready&& ready) {
    list_experts<Shape>(expert_ids(s), row_slot(s), kRows, {&list.entries, &list.items, list.entry, list.item}, *(ListSmem<Shape>*)scratch, ready);
  }
};

// With several tiles of tokens one block has the registers of the multiprocessor for itself.
struct expert_up : StageDefaults {
  static constexpr int kWarps = min_of(kExpertW13Leaves, 8), kThreads = kWarps * kWarpSize, kTilePairs = tiles_of(kOwnMoeIntermediateSize);
  static constexpr int kResident = kManyTiles ? 1 : 2, kBlocks = kResident * kSms, kRing = (kManyTiles ? 124 : 62) * 1024;
  static constexpr int kMostEntries = min_of(kMaxItems, kNumExperts + kMaxItems / kStepEntryTokens);
  template <bool kIsSlice, class Unused = void>
  struct Entries {   // all of them, made here
    typedef StepExperts List;
    typedef ListMaker<kThreads> Maker;
    static constexpr int kScratch = Maker::kScratch;
    template <class Ready> static __device__ void make(const Step& s, List& list, u8* scratch, Ready&& ready) { Maker::make(s, list, scratch, ready); }
  };
  template <class Unused>
  struct Entries<true, Unused> {   // those of a block, which a kernel before has listed
    typedef ExpertSlice<ceil_div(ceil_div(kMostEntries * kTilePairs, kBlocks), kTilePairs) + 1, kStepEntryTokens> List;
    static constexpr int kScratch = 0;
    template <class Ready> static __device__ void make(const Step& s, List& list, u8*, Ready&& ready) {
      ready();
      load_slice(list, *step_experts(s), kTilePairs, kBlocks);
    }
  };
  typedef Entries<kListed> Own;
  // One row: as if two, which takes fewer registers.
  typedef ExpertUpShape<kExpertW13Leaves, kExpertW13Steps, Own::List, min_of(max_of(kRows, 2), kStepEntryTokens), kWarps, kRing, Own::kScratch> Shape;
  static constexpr int kSmem = Shape::kSmem;
  static __device__ void run(const Step& s, const OpArgs& op) {
    K3_DYN_SMEM(u8, smem);
    expert_up_product<Shape>((const u8*)w_expert_w13(op), kTilePairs, moe_latent(s), kRoutedExpertHiddenSize, kNumExpertsPerToken, kBlocks, smem,
      [&](Own::List& list, u8* scratch) {
        Own::make(s, list, scratch, [] {
          grid_wait();
          grid_launch_next();
        });
      },
      [&](int item, int row, float gate, float up) {
        if (row < kOwnMoeIntermediateSize) expert_act(s)[size_t(item) * kOwnMoeIntermediateSize + row] = float_to_bf16(situ(gate, up));
      });
  }
};

// expert_up runs between the choice and this kernel, and starts it late: all but the activations may be read before the wait.
struct moe_down : StageDefaults {
  static constexpr int kWarps = 16, kThreads = kWarps * kWarpSize;
  typedef ListMaker<kThreads> List;
  template <int kTiles, int kWindow, int kRing>
  using Layout = ExpertDownShape<kExpertW2Leaves, kExpertW2Steps, StepExperts, kRows, kNumExpertsPerToken, kWarps, kTiles, kRing, kWindow, List::kScratch>;
  // Where all of K is here, the sums of every leaf need room: of one tile instead of two, of a smaller window, then of the copies ahead.
  // Half of the items and one entry more: so two windows are enough.
  static constexpr int kRing = 106 * 1024, kHalf = max_of(512, kMaxItems / 2 + kEntryTokens), kTiles = Layout<2, kHalf, kRing>::kSmem <= kMaxShared ? 2 : 1,
                       kWindow = Layout<kTiles, kHalf, kRing>::kSmem <= kMaxShared ? kHalf : 128;
  typedef Layout<kTiles, kWindow, min_of(kRing, kRing + kMaxShared - Layout<kTiles, kWindow, kRing>::kSmem)> Shape;
  static constexpr int kBlocks = groups_of(tiles_of(kRoutedExpertHiddenSize), Shape::kTiles), kSmem = Shape::kSmem;
  static __device__ void run(const Step& s, const OpArgs& op) {
    K3_DYN_SMEM(u8, smem);
    expert_down_product<Shape>((const u8*)w_expert_w2(op), tiles_of(kRoutedExpertHiddenSize), expert_act(s), kOwnMoeIntermediateSize, expert_weights(s), kRows, smem,
      [&](StepExperts& list, u8* scratch) { List::make(s, list, scratch, [] {}); },
      [] {
        grid_wait();
        grid_launch_next();
      },
      [&](int row, int token, float v) {
        if (row < kRoutedExpertHiddenSize) put_routed_partial(s, token, row, v);
      });
  }
};

// The same in a wide step, as two kernels.
struct expert_items : StageDefaults {
  typedef ExpertItemsShape<kExpertW2Leaves, kExpertW2Steps, kMaxItems, 8, kStepEntryTokens> Shape;
  static constexpr int kBlocks = kSms, kThreads = Shape::kThreads, kSmem = Shape::kSmem;
  static __device__ void run(const Step& s, const OpArgs& op) {
    K3_DYN_SMEM(u8, smem);
    ::expert_items<Shape>((const u8*)w_expert_w2(op), tiles_of(kRoutedExpertHiddenSize), expert_act(s), kOwnMoeIntermediateSize, step_experts(s),
                          (float*)product_work(s), kRoutedExpertHiddenSize, smem);
  }
};

struct expert_sum : StageDefaults {
  // A thread has four columns; a row's blocks are alike, and of up to 256 threads.
  static constexpr int kColumns = ceil_div(kRoutedExpertHiddenSize, 4), kBlocks = kRows, kBlocksY = ceil_div(kColumns, 256),
                       kThreads = ceil_div(ceil_div(kColumns, kBlocksY), kWarpSize) * kWarpSize, kResident = 3;
  static __device__ void run(const Step& s, const OpArgs&) {
    __shared__ int order[kNumExpertsPerToken];
    __shared__ float weight[kNumExpertsPerToken];
    grid_wait();
    grid_launch_next();
    if (row_slot(s)[blockIdx.x] < 0) return;
    ::expert_sum<kExpertW2Leaves, kMaxItems, kNumExpertsPerToken>((const float*)product_work(s), expert_ids(s), expert_weights(s), blockIdx.x,
                                                                  (blockIdx.y * kThreads + threadIdx.x) * 4, kRoutedExpertHiddenSize, order, weight,
                                                                  [&](int row, int column, float v) { put_routed_partial(s, row, column, v); });
  }
};

K3_DEVICE NormRow routed_row(const Step& s, const OpArgs& op) {
  return {row_slot(s), nullptr, kMaxRows, kDecodeRows, routed_parts(s), nullptr, nullptr, nullptr, nullptr, 0, nullptr, w_routed_expert_norm(op),
          routed_normed(s), kRmsNormEps};
}
template <bool kIsWide>
struct RoutedNorm : StageDefaults {
  static constexpr int kSpread = min_of(kLatentNormLeaves, 8);
  typedef NormShape<kRoutedExpertHiddenSize, kLatentNormLeaves, kParts, 0, kSpread, 256> Shape;
  static constexpr int kBlocks = kRows * kSpread, kThreads = Shape::kThreads, kCluster = kSpread,
                       kSmem = apart(sizeof(NormSmem<Shape>), kBlocks, 2);
  static __device__ void run(const Step& s, const OpArgs& op) {
    K3_DYN_SMEM(u8, smem);
    grid_launch_next();
    norm_row<Shape>(routed_row(s, op), *(NormSmem<Shape>*)smem, blockIdx.x / kSpread, blockIdx.x % kSpread, [] { grid_wait(); });
  }
};
template <>
struct RoutedNorm<true> : StageDefaults {
  typedef WideNormShape<kRoutedExpertHiddenSize, kLatentNormLeaves, kParts, 0> Shape;
  static constexpr int kBlocks = kRows, kThreads = Shape::kThreads, kResident = Shape::kResident;
  static __device__ void run(const Step& s, const OpArgs& op) {
    __shared__ WideNormSmem<Shape> smem;
    grid_launch_next();
    wide_norm_row<Shape>(routed_row(s, op), smem, blockIdx.x, [] { grid_wait(); });
  }
};
struct routed_norm : RoutedNorm<kListed> {};

struct latent_up : ProductStage<tiles_of(kOwnHiddenSize), kLatentUpLeaves, kLatentUpSteps> {
  static constexpr int kSmem = apart(ProductStage::kSmem, kBlocks, 2);
  template <class Kernel = Multiply> static __device__ void run(const Step& s, const OpArgs& op) {
    auto shared = [&](int row, int token) {
      return row < kOwnHiddenSize ? tree_sum<kRanks>(shared_parts(s) + token * kOwnHiddenSize + row, kMaxRows * kOwnHiddenSize) : 0.f;
    };
    product<latent_up, Kernel>(s, w_latent_up(op), routed_normed(s), kRoutedExpertHiddenSize, added(shared, [&](int row, int token, float v, float addend) {
      if (row < kOwnHiddenSize) put_moe_out_part(s, token, row, v + addend);
    }));
  }
};

}
