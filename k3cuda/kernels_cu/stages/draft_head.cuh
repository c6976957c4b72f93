// Drafts one after the other: the bias of the token before, an estimate of acceptance, a draw.
#pragma once
#include "draft_core.cuh"
#include "sample_core.cuh"

namespace stage {

struct markov : ProductStage<tiles_of(kOwnVocabSize), kMarkovW2Leaves, kMarkovW2Steps, false, kSeqs> {
  template <class Kernel = Multiply> static __device__ void run(const Step& s, const OpArgs& op) {
    product<markov, Kernel>(s, w_markov_w2(op), markov_in(s), kMarkovRank, [&](int row, int seq, float v) {
      if (row >= kOwnVocabSize || first_row_of(s, seq) < 0) return;
      put_draft_logits_part(s, op, seq, row, logits_part(s)[size_t(logit_row_of(seq, op.kind_index)) * kOwnVocabSize + row] + v);
    });
  }
};

// A block a sequence: the row's hidden state and, where kMarkov, the Markov embedding behind it.
template <bool kMarkov>
struct Confidence : StageDefaults {
  static constexpr int kBlocks = kSeqs, kThreads = 512;
  static __device__ void run(const Step& s, const OpArgs& op) {
    __shared__ float sums[kThreads / kWarpSize];
    grid_wait();
    grid_launch_next();
    const int seq = blockIdx.x;
    if (first_row_of(s, seq) < 0) return;
    const bf16 *h = head_in(s) + size_t(logit_row_of(seq, op.kind_index)) * kHiddenSize, *e = markov_in(s) + seq * kMarkovRank, *w = w_confidence_proj(op);
    float sum = 0;
    for (int i = threadIdx.x; i < kHiddenSize; i += kThreads) sum = fmaf(bf16_to_float(h[i]), bf16_to_float(w[i]), sum);
    if (kMarkov)
      for (int i = threadIdx.x; i < kMarkovRank; i += kThreads) sum = fmaf(bf16_to_float(e[i]), bf16_to_float(w[kHiddenSize + i]), sum);
    sum = warp_sum(sum);
    if (lane_id() == 0) sums[warp_id()] = sum;
    __syncthreads();
    if (threadIdx.x == 0) draft_confidence(s, op)[seq] = sigmoid(tree_sum<kThreads / kWarpSize>(sums, 1) + bf16_to_float(*w_confidence_bias(op)));
  }
};
struct confidence : Confidence<true> {};
struct confidence_plain : Confidence<false> {};

// A cluster of blocks a sequence, as the sampler's. Logits that are not finite give id -1, and what is drawn behind it means nothing.
struct draft_pick : StageDefaults {
  static constexpr int kCluster = kVocabSize <= 16 * kSampleNode ? 1 : 8;
  typedef SampleShape<kVocabSize, kCluster, ceil_div(kVocabSize, kCluster * kSampleNode)> Shape;
  static constexpr int kBlocks = kSeqs * kCluster, kThreads = Shape::kThreads;
  static constexpr u32 kStreamDraft = 2;

  static __device__ void run(const Step& s, const OpArgs& op) {
    __shared__ SampleSmem<Shape> m;
    grid_wait();
    grid_launch_next();
    const int seq = blockIdx.x / kCluster, first = first_row_of(s, seq);
    if (first < 0) return;                // of all blocks of the cluster
    cluster_arrive();
    SampleBlock<Shape> b(m);
    b.load(draft_logits(s, op) + size_t(seq) * kVocabSize);
    cluster_wait();                       // every block's shared memory stands
    const float top = b.largest(), t = seq_temperature(s)[seq];
    int token = -1;
    bool mine = b.rank == 0 && b.warp == 0;   // the warp that hands it out
    if (top <= kLargestFloat) {
      if (t == 0) {
        token = b.first_of(top);
      } else {
        const float inverse = 1.0f / t;
        b.each([&](float& z, int j, int) { z = b.exists(j) ? expf(divide(z - top, t, inverse)) : 0; });
        const u32 word = philox(u32(row_position(s)[first] + 1 + op.kind_index), kStreamDraft, op.kind_index, 0, u32(seq_seed(s)[2 * seq]), u32(seq_seed(s)[2 * seq + 1]));
        token = b.pick(float(word >> 8) * 0x1p-24f);
        mine = token >= 0;
      }
    }
    if (!mine) return;
    const bf16* from = w_markov_w1(op) + size_t(token < 0 ? 0 : token) * kMarkovRank;
    for (int i = b.lane; i < kMarkovRank; i += kWarpSize) markov_in(s)[seq * kMarkovRank + i] = from[i];
    if (b.lane == 0) draft_ids(s, op)[seq] = token;
  }
};

}
