// One row of logits, one token: the law of reference/sample.py, step by step.
#pragma once
#include "sample_likely.cuh"

// What one thread of a row's cluster hands out when all is done.
K3_DEVICE void hand_out(const SampleArgs& a, const SampleRow& r, int row, int token) {
  a.token[row] = token;
  if (r.slot >= 0) a.slot_tokens[r.slot] = token;
  a.ended[row] = device_ns();
}

// All blocks of the cluster of row `row`, S::kThreads threads.
template <class S>
K3_DEVICE void sample_row(const SampleArgs& a, SampleSmem<S>& m, int row) {
  const SampleRow& r = a.rows[row];
  if (!r.active) return;
  cluster_arrive();
  SampleBlock<S> b(m);
  const float* logits = a.logits + size_t(row) * S::kVocab;
  const int last = r.after_sampled ? a.slot_tokens[r.slot] : -1;   // before any block of the cluster can set it
  b.load(logits);
  cluster_wait();                     // every block's shared memory stands
  float top = b.largest();
  if (!(top <= kLargestFloat)) {
    if (b.rank == 0 && threadIdx.x == 0) hand_out(a, r, row, -1);
    return;
  }
  if (r.logprobs >= 0) {
    b.tell(b.subtree([=](float v) { return expf(v - top); }));
    const float log_sum = logf(b.sum(0));
    if (threadIdx.x == 0) m.raw_top = top, m.log_sum = log_sum;   // for the end, when only one thread needs them
    if (r.logprobs > 0) {
      most_likely(b, a, row, r.logprobs, top, log_sum);
      b.load(logits);
    }
  }
  if (r.penalty_count || last >= 0) {
    b.penalise(logits, r, a.penalties + r.penalty_begin, last);
    top = b.largest();
  }
  int token;
  if (r.greedy) {
    token = b.first_of(top);
    if (b.rank != 0 || threadIdx.x != 0) return;
  } else {
    const float t = r.temperature, inverse = 1.0f / t;
    b.each([=](float& s, int, int) { s = divide(s - top, t, inverse); });
    b.filter(r);
    const u32 word = philox(r.position, r.stream, 0, 0, r.seed_low, r.seed_high);
    token = b.pick(float(word >> 8) * 0x1p-24f);
    if (token < 0 || b.lane != 0) return;
  }
  if (r.logprobs >= 0) a.logprob[row] = fmaxf(logits[token] - m.raw_top - m.log_sum, -kLargestFloat);
  hand_out(a, r, row, token);
}
