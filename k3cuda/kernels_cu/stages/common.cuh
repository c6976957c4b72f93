// What stages share: defaults of a launch, how a product is laid over the machine, activations.
#pragma once
#include "buffers.cuh"
#include "exchange.cuh"
#include "situ.cuh"
#include "many_core.cuh"

// kBlocks x kBlocksY x kBlocksZ blocks of kThreads threads in clusters of kCluster, kSmem bytes of shared memory, kResident blocks an SM. kBeside: threads
// of other kernels that shall find registers beside a block.
struct StageDefaults {
  static constexpr int kBlocksY = 1, kBlocksZ = 1, kCluster = 1, kSmem = 0, kResident = 1, kBeside = 0;
};

// Shared memory that a block asks for, so that no more than `most` of a kernel's `blocks`, or as many as there must be, share an SM. Blocks that start under the
// kernel before all go to the SMs that it leaves first, as many as fit, and take turns there while others idle (docs/kernels.md, "Where blocks go"). Clusters of
// four and eight do not get every SM: parts of the machine have 16 or 18.
constexpr int spread_out(int bytes, int blocks, int most) {
  return max_of(bytes, (kMaxShared + 1024) / (max_of(most, groups_of(blocks, max_of(1, kSms / 16 * 16))) + 1) - 1024 + 16);
}
// The same in steps of few rows alone: kernels of more rows have long blocks.
constexpr int apart(int bytes, int blocks, int most) { return kRows > kTokenTile ? bytes : spread_out(bytes, blocks, most); }

#ifdef K3_TRACE
// Of every launch, over its blocks: first begin, last begin, last end of the wait, first end, last end. Nanoseconds.
template <class Stage>
K3_DEVICE void traced(const Step& s, const OpArgs& op) {
  u64 begin = device_ns();
  if (threadIdx.x == 0) trace_waited = 0;   // a block with nothing to do does not wait
  Stage::run(s, op);
  __syncthreads();
  if (threadIdx.x) return;
  u64 end = device_ns(), *to = s.trace + op.launch * 8;
  atomicMin(to, begin);
  atomicMax(to + 1, begin);
  atomicMax(to + 2, trace_waited);
  atomicMin(to + 3, end);
  atomicMax(to + 4, end);
}
#else
template <class Stage>
K3_DEVICE void traced(const Step& s, const OpArgs& op) { Stage::run(s, op); }
#endif

constexpr float kLog2E = 1.44269504088896340736f;   // scores times it are exponents of 2
constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
constexpr int tiles_of(int rows) { return ceil_div(rows, kTileRows); }

// The two kernels of a wide product; a narrow one is the first alone.
struct Multiply { static constexpr bool kAdds = false; };
struct Sum { static constexpr bool kAdds = true; };

// A stage that is one product over kTotal row tiles, for every block of kBlocksY once.
//   kTokens  rows of the step that it is for
//   kOnce    whether more than kDecodeRows of them are one product (wide_core.cuh) where they fit; else slices of so many, along z.
//            kFewToo: fewer rows as well, from kLeast on: what row_core.cuh does with them is bound by x, which every block reads again.
//            kNever: a step of more than 16 rows is slices of so many, whose clusters of blocks are fewer at a time
enum Once { kNever, kInWideSteps, kFewToo };
template <int kTotal, int kLeaves, int kSteps, bool kPair_ = false, int kTokens = kRows, Once kOnce = kFewToo>
struct ProductStage : StageDefaults {
  static constexpr bool kPair = kPair_;
  static constexpr bool kLate = false;          // row_core.cuh: measured to be better for a single row of some (docs/kernels.md, "Where blocks go")
  static constexpr int kTiles = kTotal, kSlice = min_of(kTokens, kOnce == kNever ? 16 : kDecodeRows);
  static constexpr size_t kMatrix = size_t(kTotal) * kLeaves * kSteps * kWarpSize;   // elements of its weights: where each head has a matrix, to the next one
  typedef RowAuto<kTotal, kLeaves, kSteps, kSlice <= kTokenTile ? 1 : kSlice / kTokenTile, kPair, kSms> Shape;
  typedef WideShape<kTotal, kLeaves, kSteps, max_of(kTokens, kLeastWide), kSms> Wide;
  static constexpr bool kIsLong = kLeaves == 16 && kSteps > 16;
  // The fewest rows from which on it is faster so (docs/kernels.md, "Steps of 16 to 64 rows").
  static constexpr int kLeast = !kWideColumns ? (kIsLong ? kDecodeRows : kDecodeRows + 1) : kLeaves == 1 && kSteps > 16 ? 32 : kLeaves < 16 ? kDecodeRows + 1
                                : !kIsLong ? kDecodeRows : kTotal >= 150 ? 16 : 32;
  static constexpr bool kIsOnce = kTokens > kDecodeRows ? kOnce != kNever : kOnce == kFewToo && kHasLeafSums && kTokens >= kLeast;
  static constexpr bool kIsWide = kIsOnce && Wide::kFits && !(kPair && kLeaves == 1);
  typedef ManyShape<kTotal, kLeaves, kSteps, max_of(kSlice / kTokenTile, 1), kPair ? 2 : 1, kSms> Many;
  // Sixteen long leaves of fewer rows are faster in row_core.cuh (docs/kernels.md, "Steps of 16 to 64 rows").
  static constexpr bool kIsMany = !kIsWide && kOnce != kNever && kSlice > kTokenTile && (kLeaves == 16 ? !kIsLong : kLeaves == 1 && kSteps > 32) && Many::kFits;
  static constexpr int kBlocks = kIsWide ? Wide::kBlocks : kIsMany ? Many::kBlocks : row_blocks<Shape>(kTotal, kSms),
                       kBlocksZ = kIsWide ? 1 : kTokens / kSlice, kThreads = kIsWide ? Wide::kThreads : kIsMany ? Many::kThreads : Shape::kThreads,
                       kCluster = kIsWide ? 1 : kIsMany ? Many::kCS : Shape::kCS, kSmem = kIsWide ? Wide::kSmem : kIsMany ? Many::kSmem : Shape::kSmem;
  static constexpr int kSumBlocks = kIsWide ? wide_sum_blocks<Wide, kPair>() : 0;   // 0: there is no second kernel
};

// The second kernel of a product as a stage.
template <class S>
struct TreeOf : StageDefaults {
  static constexpr int kBlocks = S::kSumBlocks, kThreads = S::Wide::kSumThreads, kResident = 4, kSmem = spread_out(0, kBlocks, 1);
  static __device__ void run(const Step& s, const OpArgs& op) { S::template run<Sum>(s, op); }
};

// The product of stage S, one of its kernels. w: [tile][leaf][step][lane]. x: row-major, `stride` elements a row. epilogue as in row_product.
// others: blocks before those of the product, which do something else.
template <class S, class Kernel, class Epilogue>
K3_DEVICE void product(const Step& s, const uint4* w, const bf16* x, int stride, const Epilogue& epilogue, int others = 0) {
  K3_DYN_SMEM(u8, smem);
  if constexpr (S::kIsWide) {
    if constexpr (Kernel::kAdds && S::kSumBlocks > 0) wide_sum<typename S::Wide, S::kPair>((const f32x4*)product_work(s), epilogue);
    else if constexpr (!Kernel::kAdds) wide_product<typename S::Wide>(w, x, stride, (f32x4*)product_work(s), smem, epilogue, others);
  } else if constexpr (!Kernel::kAdds) {
    const int first = S::kBlocksZ > 1 ? int(blockIdx.z) * S::kSlice : 0;
    if constexpr (S::kIsMany)
      many_product<typename S::Many>(w, x + size_t(first) * stride, stride, smem,
                                     [&](int row, int token, auto... v) { epilogue(row, first + token, v...); }, others);
    else if constexpr (S::kPair)
      row_product<typename S::Shape, true, S::kLate>(w, S::kTiles, x + size_t(first) * stride, stride, S::kSlice, smem,
                                           [&](int row, int token, float even, float odd) { epilogue(row, first + token, even, odd); }, others);
    else if constexpr (S::kBlocksZ > 1)
      row_product<typename S::Shape, false, S::kLate>(w, S::kTiles, x + size_t(first) * stride, stride, S::kSlice, smem,
                                     [&](int row, int token, float v) { epilogue(row, first + token, v); }, others);
    else
      row_product<typename S::Shape, false, S::kLate>(w, S::kTiles, x, stride, S::kSlice, smem, epilogue, others);
  }
}

// A stage that is elementwise over the hidden size: row blockIdx.x, a run of columns a block along y.
struct ElementStage : StageDefaults {
  static constexpr int kRun = 512, kBlocks = kRows, kBlocksY = ceil_div(kHiddenSize, kRun), kThreads = 256;
  template <class Body>
  static __device__ void columns(Body&& body) {
    int end = min_of(int(blockIdx.y + 1) * kRun, kHiddenSize);
    for (int i = blockIdx.y * kRun + threadIdx.x; i < end; i += kThreads) body(int(blockIdx.x), i);
  }
};

// An element of ffn_out: the ranks' parts, neighbours first.
K3_DEVICE void sum_to_ffn_out(const Step& s, const float* parts, int row, int column) {
  int at = row * kHiddenSize + column;
  ffn_out(s)[at] = tree_sum<kParts>(parts + at, kDecodeRows * kHiddenSize);
}

// Rows of a part that all ranks hold, as many as are stored at once.
constexpr int kPartRun = kHiddenSize % (4 * kRanks) == 0 ? 4 : 1;

K3_DEVICE float situ(float gate, float up) { return ::situ(gate, up, kSituBeta, kSituLinearBeta); }
