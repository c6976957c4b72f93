// The middle of Kimi Delta Attention in parts: decay gate, conv, delta rule, gated norm. The rows of a sequence pass through the state of a
// head in order, a batch of eight at a time; what comes before and after the recurrence is done for the batch at once. kda_mix.cuh, kda_rows.cuh,
// kda_wide.cuh and launch_kda.cuh put them together.
//
// Sums, the same for every slicing and row count:
//   over the 128 keys      kda_state.cuh
//   over 128 channels      squares for the L2 and RMS norms: a balanced tree, neighbours first (docs/numerics.md: 8 chunks of 16)
//   over f_b's 128 inputs  8 chunks of 16, one MMA from zero each, then neighbours first
#pragma once
#include "kda_state.cuh"

// All of one layer, this rank's heads.
struct KdaMix {
  const int* row_slot;                          // [rows]
  int rows, heads;
  const bf16* qkv;                              // [rows][3][heads dim], before the conv
  const bf16* f_a;                              // [rows][dim]
  const float* beta;                            // [rows][heads]
  const float* out_gate;                        // [rows][heads dim], before the sigmoid
  float* state;                                 // [slots][heads][key][value]
  bf16* conv_state;                             // [slots][3][history][heads dim], oldest first
  const bf16* f_b;                              // [heads dim][dim]
  const float *a_log, *dt_bias;                 // [heads], [heads dim]
  const float *q_conv, *k_conv, *v_conv;        // [heads dim][width], newest input on the last tap
  const float* o_norm;                          // [dim]
  float *k, *v, *decay;                         // records [rows][heads dim]
  bf16* out;                                    // [rows][heads dim]
  float lower_bound, l2_eps, eps;
  int advances;                                 // every row stands: state and window are left behind the rows, and no commit follows
};

template <class S>
struct KdaMixSmem {
  uint4 f_b[S::kHeldTiles][S::kSteps][kWarpSize];
  f32x4 taps[S::kChannels];
  float q[S::kBatch][S::kDim], k[S::kBatch][S::kDim], fade[S::kBatch][S::kDim];
  float v[S::kBatch][S::kSlice], o[S::kBatch][S::kSlice];
  bf16 inputs[S::kRing][S::kInputs];            // row p of the sequence's rows of this step at p + kHistory
  float bias[S::kDim], norm[S::kSlice], beta[S::kBatch];
  float squares[2][S::kBatch][S::kSplit];       // of o, by slice; two, so that a fast block can't overwrite what a slow one reads
  u64 inbox[2];
};

// Where a tile of f_b lies: [step][lane]. Only the lane that loads an operand reads it.
struct KdaHeld {
  template <class M> K3_DEVICE auto& operator()(M& m, int tile) const { return m.f_b[tile]; }
};

// Where vector `i` of a row's conv inputs lies in [3][stride], for this head and slice.
template <class S>
K3_DEVICE size_t kda_vector_at(int i, int stride, int head, int part) {
  constexpr int kWhole = S::kDim / 8;
  int which = i < kWhole ? 0 : i < 2 * kWhole ? 1 : 2, c = (i - which * kWhole) * 8 + (which == 2 ? part * S::kSlice : 0);
  return size_t(which) * stride + head * S::kDim + c;
}

// Weights. f_b's rows lie as MMA operands, each lane's own words (row g, then
// row g + 8); inside a chunk of 16 inputs lane 4 g + t holds inputs 4 t to 4 t + 3, on both sides.
template <class S, class Team = WholeBlock, class FB = KdaHeld>
K3_DEVICE void kda_load_weights(const KdaMix& a, KdaMixSmem<S>& m, int head, int part, const Team& team = {}, const FB& f_b = {}) {
  const int tid = team.thread();
  for (int tile = S::kWarps - 1 - team.warp(); tile < S::kTiles; tile += S::kWarps) {
    const bf16* p = a.f_b + (size_t(head) * S::kDim + tile * 16 + team.lane() / 4) * S::kDim + team.lane() % 4 * 4;
    K3_UNROLL
    for (int s = 0; s < S::kSteps; ++s) {
      copy_async<8>(&f_b(m, tile)[s][team.lane()].x, p + s * 16);
      copy_async<8>(&f_b(m, tile)[s][team.lane()].z, p + 8 * S::kDim + s * 16);
    }
  }
  for (int c = tid; c < S::kChannels; c += S::kThreads) {
    int which = c / S::kDim < 2 ? c / S::kDim : 2, channel = head * S::kDim + (which < 2 ? c % S::kDim : part * S::kSlice + c - 2 * S::kDim);
    copy_async<16>(&m.taps[c], (which == 0 ? a.q_conv : which == 1 ? a.k_conv : a.v_conv) + size_t(channel) * S::kWidth);
  }
  if (tid < S::kDim / 4) copy_async<16>(&m.bias[4 * tid], a.dt_bias + head * S::kDim + 4 * tid);
  if (tid < S::kSlice / 4) copy_async<16>(&m.norm[4 * tid], a.o_norm + part * S::kSlice + 4 * tid);
}

// The conv's inputs before the rows: kHistory of them from `from` on, `next` apart, q, k and v each `stride` apart.
template <class S, class Team = WholeBlock>
K3_DEVICE void kda_load_window(KdaMixSmem<S>& m, const bf16* from, int stride, int next, int head, int part, const Team& team = {}) {
  for (int i = team.thread(); i < S::kHistory * S::kConvVectors; i += S::kThreads) {
    int j = i / S::kConvVectors, v = i % S::kConvVectors;
    copy_async<16>(&m.inputs[j][v * 8], from + size_t(j) * next + kda_vector_at<S>(v, stride, head, part));
  }
}

// What earlier kernels of the step left for a batch of rows, on its way through registers.
template <class S>
struct KdaInputs {
  uint4 vector[S::kVectors];
  float gate[S::kGates], beta;

  // At most a batch of the n rows from `first` on.
  K3_DEVICE void load(const KdaMix& a, int head, int part, int first, int n) {
    if (n > S::kBatch) n = S::kBatch;
    const int tid = threadIdx.x, channels = a.heads * S::kDim;
    K3_UNROLL
    for (int i = 0; i < S::kVectors; ++i) {
      int at = tid + i * S::kThreads, row = at / S::kRowVectors, v = at % S::kRowVectors;
      if (row >= n) break;
      const bf16* p = v < S::kConvVectors ? a.qkv + size_t(first + row) * 3 * channels + kda_vector_at<S>(v, channels, head, part)
                                          : a.f_a + size_t(first + row) * S::kDim + (v - S::kConvVectors) * 8;
      vector[i] = *(const uint4*)p;
    }
    K3_UNROLL
    for (int i = 0; i < S::kGates; ++i) {
      int at = tid + i * S::kThreads, row = at / S::kSlice;
      gate[i] = row < n ? a.out_gate[size_t(first + row) * channels + head * S::kDim + part * S::kSlice + at % S::kSlice] : 0;
    }
    if (tid < n) beta = a.beta[size_t(first + tid) * a.heads + head];
  }
  K3_DEVICE void store(KdaMixSmem<S>& m, int done, int n) const {
    K3_UNROLL
    for (int i = 0; i < S::kVectors; ++i) {
      int at = threadIdx.x + i * S::kThreads, row = at / S::kRowVectors;
      if (row < n) *(uint4*)&m.inputs[(done + row + S::kHistory) % S::kRing][at % S::kRowVectors * 8] = vector[i];
    }
    if (threadIdx.x < n) m.beta[threadIdx.x] = beta;
  }
};

// Conv and SiLU of a batch; a thread takes two channels of kRun rows, whose chains of instructions overlap. `done`: rows of the
// sequence before the batch.
template <class S, int kRun, class Team = WholeBlock>
K3_DEVICE void kda_conv(const KdaMix& a, KdaMixSmem<S>& m, int head, int part, int first, int done, int n, const Team& team = {}) {
  constexpr int kPairs = S::kChannels / 2;
  for (int i = team.thread(); i < (n + kRun - 1) / kRun * kPairs; i += S::kThreads) {
    int row = i / kPairs * kRun, c = i % kPairs * 2, v = c - 2 * S::kDim;
    f32x4 t = m.taps[c], u = m.taps[c + 1];
    float x[kRun + S::kHistory], w[kRun + S::kHistory];
    K3_UNROLL
    for (int j = 0; j < kRun + S::kHistory; ++j) {
      u32 both = *(const u32*)&m.inputs[(done + row + j) % S::kRing][c];
      x[j] = __uint_as_float(both << 16), w[j] = __uint_as_float(both & 0xffff0000u);
    }
    float* to = c < S::kDim ? &m.q[row][c] : v < 0 ? &m.k[row][c - S::kDim] : &m.v[row][v];
    const int stride = v < 0 ? S::kDim : S::kSlice;
    float y[kRun], z[kRun];
    K3_UNROLL
    for (int r = 0; r < kRun; ++r) {
      y[r] = fmaf(x[r + 3], t.w, fmaf(x[r + 2], t.z, fmaf(x[r + 1], t.y, x[r] * t.x)));
      z[r] = fmaf(w[r + 3], u.w, fmaf(w[r + 2], u.z, fmaf(w[r + 1], u.y, w[r] * u.x)));
      y[r] *= sigmoid(y[r]);
      z[r] *= sigmoid(z[r]);
    }
    K3_UNROLL
    for (int r = 0; r < kRun; ++r) {
      if (row + r >= n) break;
      *(f32x2*)(to + r * stride) = f32x2{y[r], z[r]};
      if (v >= 0) *(f32x2*)&a.v[(size_t(first + row + r) * a.heads + head) * S::kDim + part * S::kSlice + v] = f32x2{y[r], z[r]};
    }
  }
}

// f + dt_bias of every key channel, where the decay will stand. Its tiles go to the last warps, the conv's channels to the first.
template <class S, class Team = WholeBlock, class FB = KdaHeld>
K3_DEVICE void kda_low_rank(KdaMixSmem<S>& m, int done, int n, const Team& team = {}, const FB& f_b = {}) {
  int g = team.lane() / 4, t = team.lane() % 4;
  const bf16* x = &m.inputs[(done + g + S::kHistory) % S::kRing][S::kChannels] + t * 4;
  for (int tile = S::kWarps - 1 - team.warp(); tile < S::kTiles; tile += S::kWarps) {
    float leaf[S::kSteps][4];
    K3_UNROLL
    for (int s = 0; s < S::kSteps; ++s) {
      K3_UNROLL
      for (int e = 0; e < 4; ++e) leaf[s][e] = 0;
      uint2 f = g < n ? *(const uint2*)(x + s * 16) : uint2{0, 0};
      uint4 w = f_b(m, tile)[s][team.lane()];
      mma(leaf[s], uint4{w.x, w.z, w.y, w.w}, f.x, f.y);
    }
    K3_UNROLL
    for (int e = 0; e < 4; ++e) {
      int row = 2 * t + e % 2, channel = tile * 16 + g + e / 2 * 8;
      if (row < n) m.fade[row][channel] = tree_sum<S::kSteps>(&leaf[0][e], 4) + m.bias[channel];
    }
  }
}

// log decay = lower_bound sigmoid(exp(A_log) (f + dt_bias)); its record, and exp of it for the recurrence.
template <class S, class Team = WholeBlock>
K3_DEVICE void kda_decay(const KdaMix& a, KdaMixSmem<S>& m, float scale, int head, int part, int first, int n, const Team& team = {}) {
#pragma unroll 4
  for (int i = team.thread(); i < n * S::kDim; i += S::kThreads) {
    int row = i / S::kDim, channel = i % S::kDim;
    float decay = a.lower_bound * sigmoid(scale * m.fade[row][channel]);
    m.fade[row][channel] = expf(decay);
    if (channel / S::kSlice == part) a.decay[(size_t(first + row) * a.heads + head) * S::kDim + channel] = decay;
  }
}

// Rows of q and k to unit length, q times dim^-1/2; a warp a row, the last warp first: the first ones are busy with decays.
template <class S, class Team = WholeBlock>
K3_DEVICE void kda_l2norm(const KdaMix& a, KdaMixSmem<S>& m, int head, int part, int first, int n, const Team& team = {}) {
  for (int row = S::kWarps - 1 - team.warp(); row < n; row += S::kWarps) {
    const int at = 4 * team.lane();
    f32x4 q = load4(&m.q[row][at]), k = load4(&m.k[row][at]);
    float qq = (q.x * q.x + q.y * q.y) + (q.z * q.z + q.w * q.w), kk = (k.x * k.x + k.y * k.y) + (k.z * k.z + k.w * k.w);
    K3_UNROLL
    for (int d = 1; d < kWarpSize; d *= 2) {
      qq += __shfl_xor_sync(kFullWarp, qq, d);
      kk += __shfl_xor_sync(kFullWarp, kk, d);
    }
    float iq = inverse_sqrt(qq + a.l2_eps) * inverse_sqrt(float(S::kDim)), ik = inverse_sqrt(kk + a.l2_eps);
    k = f32x4{k.x * ik, k.y * ik, k.z * ik, k.w * ik};
    store4(&m.q[row][at], f32x4{q.x * iq, q.y * iq, q.z * iq, q.w * iq});
    store4(&m.k[row][at], k);
    if (at / S::kSlice == part) store4(a.k + (size_t(first + row) * a.heads + head) * S::kDim + at, k);
  }
}

// Norm over the head first, output gate second: store(row, value's place in the slice, value), rows counted from the batch's first. `turn` counts batches.
template <class S, class Store, class Team = WholeBlock>
K3_DEVICE void kda_gated_norm(const KdaMix& a, KdaMixSmem<S>& m, const float (&gate)[S::kGates], int part, int n, int turn, Store&& store, const Team& team = {}) {
  float(&squares)[S::kBatch][S::kSplit] = m.squares[turn & 1];
  constexpr int kLane = S::kSlice >= kWarpSize ? S::kSlice / kWarpSize : 1;
  for (int row = team.warp(); row < n; row += S::kWarps) {
    float y[kLane];
    K3_UNROLL
    for (int i = 0; i < kLane; ++i) y[i] = team.lane() * kLane + i < S::kSlice ? m.o[row][team.lane() * kLane + i] : 0;
    K3_UNROLL
    for (int i = 0; i < kLane; ++i) y[i] *= y[i];
    float sum = warp_sum(tree_sum<kLane>(y, 1));
    if constexpr (S::kSplit == 1) {
      if (team.lane() == 0) squares[row][0] = sum;
    } else if (team.lane() < S::kSplit) {
      // A head's blocks are neighbours in a cluster that may have more.
      send(&squares[row][part], cluster_rank() - part + team.lane(), sum, m.inbox + (turn & 1));
    }
  }
  if constexpr (S::kSplit > 1) {
    if (team.thread() == 0) inbox_expect(m.inbox + (turn & 1), n * S::kSplit * sizeof(float));
    inbox_wait(m.inbox + (turn & 1), turn / 2 & 1);
  } else {
    team.sync();
  }
  K3_UNROLL
  for (int i = 0; i < S::kGates; ++i) {
    int at = team.thread() + i * S::kThreads, row = at / S::kSlice, c = at % S::kSlice;
    if (row >= n) break;
    float inv = inverse_sqrt(tree_sum<S::kSplit>(squares[row], 1) * (1.0f / S::kDim) + a.eps);
    store(row, c, m.o[row][c] * inv * m.norm[c] * sigmoid(gate[i]));
  }
}

template <class S>
K3_DEVICE void kda_finish(const KdaMix& a, KdaMixSmem<S>& m, const float (&gate)[S::kGates], int head, int part, int first, int n, int turn) {
  kda_gated_norm<S>(a, m, gate, part, n, turn, [&](int row, int c, float v) {
    a.out[(size_t(first + row) * a.heads + head) * S::kDim + part * S::kSlice + c] = float_to_bf16(v);
  });
}

// A batch's rows through the state, one behind the other. Who holds it.
template <class S>
K3_DEVICE void kda_recur(KdaState<S>& state, KdaMixSmem<S>& m, int n) {
  float o[S::kCols] = {};
  for (int r = 0; r < n; ++r) {
    state.template advance<true>(m.k[r], m.fade[r], m.v[r], m.beta[r], o);
    if (r) state.put(o, m.o[r - 1]);
    state.partial(m.q[r], o);
  }
  state.template fold<false>(o, o);
  state.put(o, m.o[n - 1]);
}
