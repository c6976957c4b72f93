// What stages share: defaults of a launch, how a product is laid over the machine, activations.
#pragma once
#include "buffers.cuh"
#include "exchange.cuh"
#include "row_core.cuh"

// kBlocks x kBlocksY blocks of kThreads threads in clusters of kCluster, kSmem bytes of shared memory, kResident blocks an SM.
struct StageDefaults {
  static constexpr int kBlocksY = 1, kCluster = 1, kSmem = 0, kResident = 1;
};

#ifdef K3_TRACE
// Of every launch, over its blocks: first begin, last begin, last end of the wait, first end, last end. Nanoseconds.
template <class Stage>
K3_DEVICE void traced(const Step& s, const OpArgs& op) {
  u64 begin = trace_now();
  if (threadIdx.x == 0) trace_waited = 0;   // a block with nothing to do does not wait
  Stage::run(s, op);
  __syncthreads();
  if (threadIdx.x) return;
  u64 end = trace_now(), *to = s.trace + op.launch * 8;
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

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
constexpr int tiles_of(int rows) { return ceil_div(rows, kTileRows); }

constexpr int kTokenTiles = kRows <= kTokenTile ? 1 : kRows / kTokenTile;

// A stage that is one product over kTotal row tiles, for every block of kBlocksY once.
template <int kTotal, int kLeaves, int kSteps, bool kPair = false>
struct ProductStage : StageDefaults {
  typedef RowAuto<kTotal, kLeaves, kSteps, kTokenTiles, kPair, kSms> Shape;
  static constexpr int kTiles = kTotal, kBlocks = row_blocks<Shape>(kTotal, kSms), kThreads = Shape::kThreads,
                       kCluster = Shape::kCS, kSmem = Shape::kSmem;
};

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
  ffn_out(s)[at] = tree_sum<kRanks>(parts + at, kMaxRows * kHiddenSize);
}

// [b tanh(g / b) sigmoid(g)] [c tanh(u / c)]: the sigmoid takes the raw gate.
K3_DEVICE float situ(float gate, float up) {
  return kSituBeta * tanhf(gate / kSituBeta) * sigmoid(gate) * (kSituLinearBeta * tanhf(up / kSituLinearBeta));
}
