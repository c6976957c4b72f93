// Which drafts of a sequence stand and the token behind them, as reference/accept.py, in three kernels: the laws of all rows, the target's and the
// draft's, then a cluster of blocks a sequence that judges. Numbers that decide are read or summed alike by every block.
#pragma once
#include "sample_row.cuh"

constexpr int kMostDrafts = 8;
constexpr int kUnread = -2;
constexpr u32 kStreamAccept = 0, kStreamSample = 1;
enum AcceptRule { kAcceptStandard, kAcceptBlock, kAcceptSynthetic };

struct JudgeRow {
  int active;                      // 0: nothing of this sequence is read or written
  int first_row, num_drafts;       // its rows are neighbours: that of the token before the drafts, then theirs
  int rule, one_point;             // AcceptRule; whether the drafts are the draft's likeliest and were not drawn
  int ids[kMostDrafts];            // kUnread - i: entry i of AcceptArgs::draft_ids, where a draft that has no token is -1
  float chance[kMostDrafts];       // synthetic: that draft i stands if those before it do
};

// Probabilities not normalised, and the log of their sum. The log of one is that of its weight less the sum's: of z = log weight itself it is off by
// what e^z was rounded, but a row's z and weights do not fit the registers together.
struct AcceptLaw {
  float *weight, *log_mass;        // [rows][vocab], [rows]
  template <class S> K3_DEVICE const float* row(int row) const { return weight + size_t(row) * S::kVocab; }
};

struct AcceptArgs {
  SampleArgs sample;               // logits, laws and log-probabilities of the rows; `token` of a row is the step's token behind it, -1: none
  const float* draft_logits;       // [..][vocab]
  const int* draft_ids;
  const int* draft_row;            // [rows]: what the draft that the row judges was drawn from; -1: nothing
  const JudgeRow* judges;          // [sequences]
  AcceptLaw target, draft;         // of each row: work
  int* best;                       // [rows]: likeliest token of a greedy row, else 0; -1 where the row is not finite: work
  float *raw_top, *log_sum;        // [rows], of raw logits, where log-probabilities are asked for: work
  int* accepted;                   // [sequences]
};

// Weights in b.x to row `row`, with their mass.
template <class S>
K3_DEVICE void store_law(SampleBlock<S>& b, const AcceptLaw& law, int row) {
  float* to = law.weight + size_t(row) * S::kVocab;
  K3_UNROLL
  for (int j = 0; j < 8; ++j)
    if (b.exists(j)) *(uint4*)(to + b.id(j, 0)) = {__float_as_uint(b.x[j][0]), __float_as_uint(b.x[j][1]), __float_as_uint(b.x[j][2]), __float_as_uint(b.x[j][3])};
  b.tell(b.subtree([](float w) { return w; }));
  const float log_mass = logf(b.sum(0));
  if (b.rank == 0 && threadIdx.x == 0) law.log_mass[row] = log_mass;
}

// Log of a probability; minus infinity where there is none.
K3_DEVICE float log_of(float weight, float log_mass) { return logf(weight) - log_mass; }

// Scores to z.
template <class S>
K3_DEVICE void scale(SampleBlock<S>& b, const SampleRow& r, float top) {
  const float t = r.temperature, inverse = 1.0f / t;
  b.each([=](float& s, int, int) { s = divide(s - top, t, inverse); });
}

// Log of the target's law of one row; its likeliest token; log-probabilities that are asked for.
template <class S>
K3_DEVICE void law_of_target(const AcceptArgs& a, SampleSmem<S>& m, int row) {
  const SampleRow& r = a.sample.rows[row];
  if (!r.active) return;
  const float* logits = a.sample.logits + size_t(row) * S::kVocab;
  cluster_arrive();
  SampleBlock<S> b(m);
  b.load(logits);
  cluster_wait();
  float top = b.largest();
  if (!(top <= kLargestFloat)) {
    if (b.rank == 0 && threadIdx.x == 0) a.best[row] = -1;
    return;
  }
  if (!r.greedy && b.rank == 0 && threadIdx.x == 0) a.best[row] = 0;
  if (r.logprobs >= 0) {
    b.tell(b.subtree([=](float v) { return expf(v - top); }));
    const float log_sum = logf(b.sum(0));
    if (b.rank == 0 && threadIdx.x == 0) a.raw_top[row] = top, a.log_sum[row] = log_sum;
    if (r.logprobs > 0) {
      most_likely(b, a.sample, row, r.logprobs, top, log_sum);
      b.load(logits);
    }
  }
  if (r.penalty_count) {
    b.penalise(logits, r, a.sample.penalties + r.penalty_begin, -1);
    top = b.largest();
  }
  if (r.greedy) {
    const int best = b.first_of(top);
    if (b.rank == 0 && threadIdx.x == 0) a.best[row] = best;
    return;
  }
  scale(b, r, top);
  b.filter(r);
  store_law(b, a.target, row);
}

// Log of what a draft was drawn from: no filters there.
template <class S>
K3_DEVICE void law_of_draft(const AcceptArgs& a, SampleSmem<S>& m, int row) {
  const SampleRow& r = a.sample.rows[row];
  if (!r.active || r.greedy || a.draft_row[row] < 0) return;
  cluster_arrive();
  SampleBlock<S> b(m);
  b.load(a.draft_logits + size_t(a.draft_row[row]) * S::kVocab);
  cluster_wait();
  scale(b, r, b.largest());
  b.each([](float& z, int, int) { z = expf(z); });   // of an id that does not exist: e to minus infinity
  store_law(b, a.draft, row);
}

template <class S>
struct JudgeSmem {
  SampleSmem<S> sample;
  float log_p[kMostDrafts], log_q[kMostDrafts], u[kMostDrafts], log_w[kMostDrafts + 1];   // of the drafts themselves
  int ids[kMostDrafts + 1], best[kMostDrafts + 1];
};

// Weights of the law behind a rejected draft, in b.x: (w P - Q) where positive, P without the draft where Q is one point; P where nothing is left.
template <class S>
K3_DEVICE void residual_weights(const AcceptArgs& a, SampleBlock<S>& b, const JudgeRow& g, int row, int token, float log_w) {
  const float *draft = a.draft.row<S>(row), log_p = a.target.log_mass[row], log_q = g.one_point ? 0 : a.draft.log_mass[row];
  b.load(a.target.row<S>(row));
  b.each([&](float& p, int j, int c) {
    if (!b.exists(j)) return;
    p = log_of(p, log_p);
    if (g.one_point) {
      if (b.id(j, c) == token) p = __uint_as_float(0xff800000u);
    } else {
      const float weighted = p + log_w, q = log_of(draft[b.id(j, c)], log_q);
      p = weighted > q ? weighted + log1pf(-expf(q - weighted)) : __uint_as_float(0xff800000u);
    }
  });
}

// Largest value of all blocks.
template <class S>
K3_DEVICE float largest_of(SampleBlock<S>& b) {
  float v = __uint_as_float(0xff800000u);
  b.each([&](float& p, int, int) { v = fmaxf(v, p); });
  b.tell(warp_max(v));
  return b.max(0);
}

// Drafts that stand, of the first `k`, under a rule for drawn tokens. All threads of all blocks come to the same.
template <class S>
K3_DEVICE int count_of(const AcceptArgs& a, JudgeSmem<S>& m, SampleBlock<S>& b, const JudgeRow& g, int k) {
  if (g.rule == kAcceptStandard) {
    for (int i = 0; i < k; ++i)
      if (!(m.log_p[i] > logf(m.u[i]) + m.log_q[i])) return i;
    return k;
  }
  int count = 0;
  for (int i = 1; i < k; ++i) {     // the last one is w itself
    const float log_w = m.log_w[i], w = expf(log_w);
    float s = w * (1 - expf(m.log_p[i]));
    if (!g.one_point) {
      // Probabilities themselves: w / Z times weights, no log is needed.
      const int row = g.first_row + i;
      const float *draft = a.draft.row<S>(row), of_p = expf(log_w - a.target.log_mass[row]), of_q = expf(-a.draft.log_mass[row]);
      b.load(a.target.row<S>(row));
      b.each([&](float& p, int j, int c) { p = b.exists(j) ? fmaxf(of_p * p - of_q * draft[b.id(j, c)], 0.0f) : 0; });
      b.tell(b.subtree([](float v) { return v; }));
      s = b.sum(0);
    }
    const float below = s + (1 - w), h = below > 0 ? s / below : 1.0f;
    if (m.u[i - 1] < h) count = i;
  }
  return k && m.u[k - 1] < expf(m.log_w[k]) ? k : count;
}

K3_DEVICE int draft_of(const AcceptArgs& a, const JudgeRow& g, int i) { return g.ids[i] > kUnread ? g.ids[i] : a.draft_ids[kUnread - g.ids[i]]; }

template <class S>
K3_DEVICE void judge_sequence(const AcceptArgs& a, JudgeSmem<S>& m, int seq) {
  const JudgeRow& g = a.judges[seq];
  if (!g.active) return;
  const SampleRow* rows = a.sample.rows + g.first_row;
  cluster_arrive();
  SampleBlock<S> b(m.sample);
  // A thread a draft: the memory is asked for all of them at once.
  const int thread = threadIdx.x, num = g.num_drafts;
  if (thread <= num) {
    m.ids[thread] = thread < num ? draft_of(a, g, thread) : -1;
    m.best[thread] = a.best[g.first_row + thread];
  }
  __syncthreads();
  const int* best = m.best;
  int drafts = 0;                   // that have a token
  while (drafts < num && m.ids[drafts] >= 0) ++drafts;
  int finite = 0;                   // rows before the first that is not
  while (finite <= drafts && best[finite] >= 0) ++finite;
  const int k = finite > drafts ? drafts : finite;
  if (const int i = thread; i < k) {
    const int row = g.first_row + i;
    const SampleRow& r = rows[i];
    m.u[i] = float(philox(r.position, kStreamAccept, i, 0, r.seed_low, r.seed_high) >> 8) * 0x1p-24f;
    if (!r.greedy) {
      m.log_p[i] = log_of(a.target.row<S>(row)[m.ids[i]], a.target.log_mass[row]);
      m.log_q[i] = g.one_point ? 0 : log_of(a.draft.row<S>(row)[m.ids[i]], a.draft.log_mass[row]);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    m.log_w[0] = 0;
    for (int i = 0; i < k && !rows[0].greedy; ++i) m.log_w[i + 1] = fminf(0.0f, m.log_w[i] + m.log_p[i] - m.log_q[i]);
  }
  __syncthreads();
  cluster_wait();
  int count = 0;
  if (g.rule == kAcceptSynthetic)
    while (count < k && m.u[count] < g.chance[count]) ++count;
  else if (rows[0].greedy)
    while (count < k && best[count] == m.ids[count]) ++count;
  else
    count = count_of(a, m, b, g, k);

  int token = -1;
  bool mine = b.rank == 0 && threadIdx.x == 0;   // the thread that hands it out
  if (count < finite) {
    if (rows[0].greedy) {
      token = best[count];
    } else {
      const int row = g.first_row + count;
      bool is_left = false;
      if (count < k) {
        residual_weights(a, b, g, row, m.ids[count], g.rule == kAcceptBlock ? m.log_w[count] : 0);
        const float top = largest_of(b);
        is_left = fabsf(top) <= kLargestFloat;
        b.each([=](float& p, int, int) { p = expf(p - top); });
      }
      if (!is_left) b.load(a.target.row<S>(row));
      b.each([&](float& p, int j, int) { p = b.exists(j) ? p : 0; });
      const SampleRow& r = rows[count];
      token = b.pick(float(philox(r.position, kStreamSample, 0, 0, r.seed_low, r.seed_high) >> 8) * 0x1p-24f);
      mine = token >= 0 && b.lane == 0;
    }
  }
  if (!mine) return;
  for (int i = 0; i <= count; ++i) {
    const int row = g.first_row + i, id = i < count ? m.ids[i] : token;
    a.sample.token[row] = id;
    if (id >= 0 && rows[i].logprobs >= 0)
      a.sample.logprob[row] = fmaxf(a.sample.logits[size_t(row) * S::kVocab + id] - a.raw_top[row] - a.log_sum[row], -kLargestFloat);
  }
  a.accepted[seq] = count;
  a.sample.ended[g.first_row] = device_ns();
}

#define K3_ACCEPT_KERNEL(NAME, SMEM, BODY, CLUSTER)                                                                           \
  extern "C" __global__ void __launch_bounds__(AcceptLayout::kThreads, 1) NAME(const __grid_constant__ AcceptArgs a) {       \
    __shared__ SMEM<AcceptLayout> m;                                                                                         \
    grid_wait();                                                                                                             \
    grid_launch_next();                                                                                                      \
    BODY<AcceptLayout>(a, m, blockIdx.x / CLUSTER);                                                                          \
  }
// Defines k_laws and k_draft_laws, a cluster a row, and k_judge, a cluster a sequence. (The two laws in one kernel spill.)
#define K3_ACCEPT(VOCAB, CLUSTER, WARPS)                         \
  using AcceptLayout = SampleShape<VOCAB, CLUSTER, WARPS>;      \
  K3_ACCEPT_KERNEL(k_laws, SampleSmem, law_of_target, CLUSTER)  \
  K3_ACCEPT_KERNEL(k_draft_laws, SampleSmem, law_of_draft, CLUSTER) \
  K3_ACCEPT_KERNEL(k_judge, JudgeSmem, judge_sequence, CLUSTER)
