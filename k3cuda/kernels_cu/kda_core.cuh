// Kimi Delta Attention: decay gate, conv, delta rule, gated norm in one kernel, and the commit that replays accepted rows.
// Letters: S is a head's state [key, value]. A block owns a slice of value columns of one head of one sequence; S stays in
// registers, and the rows of the sequence pass through it in order, kBatch at a time.
//
// Sums, the same for every slicing and row count:
//   over the 128 keys      a leaf is four neighbouring keys, fmaf in rising order from the first product; 32 leaves are folded by
//                          adding the upper half onto the lower, five times (distances 16, 8, 4, 2, 1)
//   over 128 channels      squares for the L2 and RMS norms: a balanced tree, neighbours first (docs/numerics.md: 8 chunks of 16)
//   over f_b's 128 inputs  8 chunks of 16, one MMA from zero each, then neighbours first
#pragma once
#include "exchange.cuh"

// kSplit: blocks a head (one cluster). kCols: value columns a thread.
template <int kDim_, int kWidth_, int kSplit_, int kCols_>
struct KdaShape {
  static constexpr int kDim = kDim_, kHistory = kWidth_ - 1, kWidth = kWidth_, kSplit = kSplit_, kCols = kCols_;
  static constexpr int kGroups = 8;                        // of keys: lane / 4
  static constexpr int kRuns = kDim / (4 * kGroups);       // leaves a thread holds, 4 kGroups keys apart
  static constexpr int kSlice = kDim / kSplit;
  static constexpr int kThreads = kGroups * kSlice / kCols, kWarps = kThreads / kWarpSize;
  static constexpr int kBatch = 8;                         // rows: the width of one MMA
  static constexpr int kTiles = kDim / 16, kSteps = kDim / 16;
  static constexpr int kChannels = 2 * kDim + kSlice;      // q and k whole, v of the slice
  static constexpr int kItems = (kChannels + kThreads - 1) / kThreads;
  static constexpr int kGates = kBatch * kSlice / kThreads;
  static_assert(kDim == 4 * kWarpSize && kThreads % kWarpSize == 0 && kSlice % (4 * kCols) == 0, "a lane's four keys are a leaf");
};

// All of one layer, this rank's heads.
struct KdaMix {
  const int* row_slot;                          // [rows]
  int rows, heads;
  const bf16* qkv;                              // [rows][3][heads dim], before the conv
  const bf16* f_a;                              // [rows][dim]
  const float* beta;                            // [rows][heads]
  const float* out_gate;                        // [rows][heads dim], before the sigmoid
  const float* state;                           // [slots][heads][key][value]
  const bf16* conv_state;                       // [slots][3][history][heads dim], oldest first
  const bf16* f_b;                              // [heads dim][dim]
  const float *a_log, *dt_bias;                 // [heads], [heads dim]
  const float *q_conv, *k_conv, *v_conv;        // [heads dim][width], newest input on the last tap
  const float* o_norm;                          // [dim]
  float *k, *v, *decay;                         // records [rows][heads dim]
  bf16* out;                                    // [rows][heads dim]
  float lower_bound, l2_eps, eps;
};

// ---- the recurrence, shared by mix and commit: their bytes must agree ----

template <class S>
struct KdaState {
  float s[4 * S::kRuns][S::kCols];              // [4 run + i]: key 32 run + 4 group + i

  static K3_DEVICE int group() { return lane_id() / 4; }
  static K3_DEVICE int column() { return (warp_id() * 4 + lane_id() % 4) * S::kCols; }

  template <class F> K3_DEVICE void each(F f) {
    K3_UNROLL
    for (int j = 0; j < S::kRuns; ++j)
      K3_UNROLL
      for (int i = 0; i < 4; ++i) f(s[4 * j + i], (j * S::kGroups + group()) * 4 + i);
  }
  K3_DEVICE void load(const float* slice) {
    each([&](float (&v)[S::kCols], int key) {
      const float* p = slice + size_t(key) * S::kDim + column();
      if constexpr (S::kCols == 4) { f32x4 t = *(const f32x4*)p; v[0] = t.x; v[1] = t.y; v[2] = t.z; v[3] = t.w; }
      else if constexpr (S::kCols == 2) { f32x2 t = *(const f32x2*)p; v[0] = t.x; v[1] = t.y; }
      else v[0] = *p;
    });
  }
  K3_DEVICE void store(float* slice) {
    each([&](float (&v)[S::kCols], int key) {
      float* p = slice + size_t(key) * S::kDim + column();
      if constexpr (S::kCols == 4) *(f32x4*)p = f32x4{v[0], v[1], v[2], v[3]};
      else if constexpr (S::kCols == 2) *(f32x2*)p = f32x2{v[0], v[1]};
      else *p = v[0];
    });
  }
  // This thread's leaves of x^T S, folded as far as one thread can.
  K3_DEVICE void partial(const float* x, float (&sum)[S::kCols]) const {
    f32x4 a[S::kRuns];
    K3_UNROLL
    for (int j = 0; j < S::kRuns; ++j) a[j] = load4(x + (j * S::kGroups + group()) * 4);
    K3_UNROLL
    for (int c = 0; c < S::kCols; ++c) {
      float leaf[S::kRuns];
      K3_UNROLL
      for (int j = 0; j < S::kRuns; ++j)
        leaf[j] = fmaf(a[j].w, s[4 * j + 3][c], fmaf(a[j].z, s[4 * j + 2][c], fmaf(a[j].y, s[4 * j + 1][c], a[j].x * s[4 * j][c])));
      K3_UNROLL
      for (int d = S::kRuns / 2; d; d /= 2)
        K3_UNROLL
        for (int j = 0; j < d; ++j) leaf[j] += leaf[j + d];
      sum[c] = leaf[0];
    }
  }
  static K3_DEVICE void fold(float (&sum)[S::kCols]) {
    K3_UNROLL
    for (int d = 16; d >= 4; d /= 2)
      K3_UNROLL
      for (int c = 0; c < S::kCols; ++c) sum[c] += __shfl_xor_sync(kFullWarp, sum[c], d);
  }
  // One token: decay along the keys, predict v from k, correct. `fade` is exp of the log decay.
  K3_DEVICE void advance(const float* k, const float* fade, const float* v, float beta) {
    K3_UNROLL
    for (int j = 0; j < S::kRuns; ++j) {
      f32x4 f = load4(fade + (j * S::kGroups + group()) * 4);
      K3_UNROLL
      for (int c = 0; c < S::kCols; ++c) {
        s[4 * j][c] *= f.x; s[4 * j + 1][c] *= f.y; s[4 * j + 2][c] *= f.z; s[4 * j + 3][c] *= f.w;
      }
    }
    float seen[S::kCols];
    partial(k, seen);
    fold(seen);
    K3_UNROLL
    for (int c = 0; c < S::kCols; ++c) seen[c] = beta * (v[column() + c] - seen[c]);
    K3_UNROLL
    for (int j = 0; j < S::kRuns; ++j) {
      f32x4 x = load4(k + (j * S::kGroups + group()) * 4);
      K3_UNROLL
      for (int c = 0; c < S::kCols; ++c) {
        s[4 * j][c] = fmaf(x.x, seen[c], s[4 * j][c]);
        s[4 * j + 1][c] = fmaf(x.y, seen[c], s[4 * j + 1][c]);
        s[4 * j + 2][c] = fmaf(x.z, seen[c], s[4 * j + 2][c]);
        s[4 * j + 3][c] = fmaf(x.w, seen[c], s[4 * j + 3][c]);
      }
    }
  }
};

// Rows of `slot` from `first` on, at most kBatch: neighbours of one sequence.
template <class S>
K3_DEVICE int kda_batch_rows(const int* row_slot, int rows, int first, int slot) {
  int r = first + lane_id();
  u32 same = __ballot_sync(kFullWarp, lane_id() < S::kBatch && r < rows && row_slot[r < rows ? r : first] == slot);
  int n = 0;
  while (same >> n & 1) ++n;
  return n;
}

// ---- mix ----

template <class S>
struct KdaMixSmem {
  uint4 f_b[S::kTiles][S::kSteps][kWarpSize];
  float q[S::kBatch][S::kDim], k[S::kBatch][S::kDim], fade[S::kBatch][S::kDim];
  float v[S::kBatch][S::kSlice], o[S::kBatch][S::kSlice], beta[S::kBatch];
  float squares[2][S::kBatch][S::kSplit];       // of o, by slice; two, so that a fast block can't overwrite what a slow one reads
  u64 inbox[2];
};

// f_b's rows of this head as MMA operands, each lane's own words, which no other lane reads: they are needed again for every batch of
// rows and would cost 64 registers. Inside a chunk of 16 inputs lane 4 g + t holds inputs 4 t to 4 t + 3, on both sides.
template <class S>
K3_DEVICE void kda_load_f_b(KdaMixSmem<S>& m, const bf16* f_b) {
  for (int tile = warp_id(); tile < S::kTiles; tile += S::kWarps) {
    const bf16* p = f_b + size_t(tile * 16 + lane_id() / 4) * S::kDim + lane_id() % 4 * 4;
    K3_UNROLL
    for (int s = 0; s < S::kSteps; ++s) {
      uint2 low = *(const uint2*)(p + s * 16), high = *(const uint2*)(p + 8 * S::kDim + s * 16);
      m.f_b[tile][s][lane_id()] = uint4{low.x, high.x, low.y, high.y};
    }
  }
}

// log decay = lower_bound sigmoid(exp(A_log) (f + dt_bias)); its record, and exp of it for the recurrence.
template <class S>
K3_DEVICE void kda_gate(const KdaMix& a, KdaMixSmem<S>& m, int head, int part, int first, int n) {
  if (warp_id() >= S::kTiles) return;
  int g = lane_id() / 4, t = lane_id() % 4;
  uint2 x[S::kSteps];
  K3_UNROLL
  for (int s = 0; s < S::kSteps; ++s)
    x[s] = g < n ? load_activations((const uint2*)(a.f_a + size_t(first + g) * S::kDim + s * 16 + t * 4)) : uint2{0, 0};
  float scale = expf(a.a_log[head]);
  for (int tile = warp_id(); tile < S::kTiles; tile += S::kWarps) {
    float leaf[S::kSteps][4];
    K3_UNROLL
    for (int s = 0; s < S::kSteps; ++s) {
      K3_UNROLL
      for (int e = 0; e < 4; ++e) leaf[s][e] = 0;
      mma(leaf[s], m.f_b[tile][s][lane_id()], x[s].x, x[s].y);
    }
    K3_UNROLL
    for (int e = 0; e < 4; ++e) {
      int row = 2 * t + e % 2, channel = tile * 16 + g + e / 2 * 8;
      float f = tree_sum<S::kSteps>(&leaf[0][e], 4);
      if (row >= n) continue;
      float decay = a.lower_bound * sigmoid(scale * (f + a.dt_bias[head * S::kDim + channel]));
      m.fade[row][channel] = expf(decay);
      if (channel / S::kSlice == part) a.decay[size_t(first + row) * a.heads * S::kDim + head * S::kDim + channel] = decay;
    }
  }
}

// Squares of one row of q or k over the head, then unit length; a warp.
template <class S>
K3_DEVICE void kda_l2norm(const KdaMix& a, KdaMixSmem<S>& m, int head, int part, int first, int n) {
  for (int job = warp_id(); job < 2 * n; job += S::kWarps) {
    int row = job / 2, at = 4 * lane_id();
    bool is_k = job % 2;
    float* p = (is_k ? m.k[row] : m.q[row]) + at;
    f32x4 y = load4(p);
    float inv = 1.0f / sqrtf(warp_sum((y.x * y.x + y.y * y.y) + (y.z * y.z + y.w * y.w)) + a.l2_eps);
    float unit = is_k ? 1.0f : 1.0f / sqrtf(float(S::kDim));
    y = f32x4{y.x * inv * unit, y.y * inv * unit, y.z * inv * unit, y.w * inv * unit};
    store4(p, y);
    if (is_k && at / S::kSlice == part) store4(a.k + size_t(first + row) * a.heads * S::kDim + head * S::kDim + at, y);
  }
}

// Block `part` of the cluster of `head`, for the sequence whose oldest row of this step is `first`; a block of another row, or
// of padding, does nothing. `ready` is called once, when weights, conv window and state are on their way and all that this
// step's earlier kernels wrote is needed: state and window may be loaded before it because no kernel between commit and here
// writes them.
template <class S, class Ready>
K3_DEVICE void kda_mix(const KdaMix& a, KdaMixSmem<S>& m, int head, int part, int first, Ready ready) {
  int slot = a.row_slot[first];
  if (slot < 0 || (first > 0 && a.row_slot[first - 1] == slot)) {
    if (first == 0) ready();                    // a step of nothing but padding still keeps its place in the order of kernels
    return;
  }
  const int tid = threadIdx.x, channels = a.heads * S::kDim;
  if constexpr (S::kSplit > 1) {
    if (tid == 0) {
      barrier_init(m.inbox, 1);
      barrier_init(m.inbox + 1, 1);
      barrier_fence_init();
    }
    __syncthreads();
    cluster_arrive();
  }
  KdaState<S> state;
  state.load(a.state + (size_t(slot) * a.heads + head) * S::kDim * S::kDim + part * S::kSlice);
  kda_load_f_b<S>(m, a.f_b + size_t(head) * S::kDim * S::kDim);

  float taps[S::kItems][S::kWidth], window[S::kItems][S::kHistory];
  int which[S::kItems], channel[S::kItems];     // which: 0 q, 1 k, 2 v, 3 nothing
  K3_UNROLL
  for (int i = 0; i < S::kItems; ++i) {
    int c = tid + i * S::kThreads;
    which[i] = c < S::kChannels ? c / S::kDim : 3;
    channel[i] = head * S::kDim + (c < 2 * S::kDim ? c % S::kDim : part * S::kSlice + c - 2 * S::kDim);
    if (which[i] == 3) continue;
    const float* tap = (which[i] == 0 ? a.q_conv : which[i] == 1 ? a.k_conv : a.v_conv) + size_t(channel[i]) * S::kWidth;
    K3_UNROLL
    for (int j = 0; j < S::kWidth; ++j) taps[i][j] = tap[j];
    K3_UNROLL
    for (int j = 0; j < S::kHistory; ++j)
      window[i][j] = bf16_to_float(a.conv_state[((size_t(slot) * 3 + which[i]) * S::kHistory + j) * channels + channel[i]]);
  }
  if constexpr (S::kSplit > 1) cluster_wait();
  ready();

  for (int batch = 0;; ++batch, first += S::kBatch) {
    int n = kda_batch_rows<S>(a.row_slot, a.rows, first, slot);
    if (n == 0) break;
    float gate[S::kGates];
    K3_UNROLL
    for (int i = 0; i < S::kGates; ++i) {
      int at = tid + i * S::kThreads, row = at / S::kSlice;
      gate[i] = row < n ? a.out_gate[size_t(first + row) * channels + head * S::kDim + part * S::kSlice + at % S::kSlice] : 0;
    }
    if (tid < n) m.beta[tid] = a.beta[size_t(first + tid) * a.heads + head];
    K3_UNROLL
    for (int i = 0; i < S::kItems; ++i) {
      if (which[i] == 3) continue;
      float u[S::kBatch];
      K3_UNROLL
      for (int r = 0; r < S::kBatch; ++r)
        u[r] = r < n ? bf16_to_float(a.qkv[(size_t(first + r) * 3 + which[i]) * channels + channel[i]]) : 0;
      K3_UNROLL
      for (int r = 0; r < S::kBatch; ++r) {
        if (r >= n) break;
        float y = window[i][0] * taps[i][0];
        K3_UNROLL
        for (int j = 1; j < S::kHistory; ++j) y = fmaf(window[i][j], taps[i][j], y);
        y = fmaf(u[r], taps[i][S::kHistory], y);
        y = y * sigmoid(y);
        K3_UNROLL
        for (int j = 0; j + 1 < S::kHistory; ++j) window[i][j] = window[i][j + 1];
        window[i][S::kHistory - 1] = u[r];
        if (which[i] == 2) {
          m.v[r][channel[i] % S::kSlice] = y;
          a.v[size_t(first + r) * channels + channel[i]] = y;
        } else {
          (which[i] ? m.k[r] : m.q[r])[channel[i] % S::kDim] = y;
        }
      }
    }
    kda_gate<S>(a, m, head, part, first, n);
    __syncthreads();
    kda_l2norm<S>(a, m, head, part, first, n);
    __syncthreads();
    for (int r = 0; r < n; ++r) {
      state.advance(m.k[r], m.fade[r], m.v[r], m.beta[r]);
      float o[S::kCols];
      state.partial(m.q[r], o);
      state.fold(o);
      K3_UNROLL
      for (int c = 0; c < S::kCols; ++c)
        if (state.group() == c) m.o[r][state.column() + c] = o[c];
    }
    __syncthreads();
    // Norm over the head first, output gate second.
    float(&squares)[S::kBatch][S::kSplit] = m.squares[batch & 1];
    constexpr int kLane = S::kSlice >= kWarpSize ? S::kSlice / kWarpSize : 1;
    for (int row = warp_id(); row < n; row += S::kWarps) {
      float y[kLane];
      K3_UNROLL
      for (int i = 0; i < kLane; ++i) y[i] = lane_id() * kLane + i < S::kSlice ? m.o[row][lane_id() * kLane + i] : 0;
      K3_UNROLL
      for (int i = 0; i < kLane; ++i) y[i] *= y[i];
      float sum = warp_sum(tree_sum<kLane>(y, 1));
      if constexpr (S::kSplit == 1) {
        if (lane_id() == 0) squares[row][0] = sum;
      } else if (lane_id() < S::kSplit) {
        send(&squares[row][part], lane_id(), sum, m.inbox + (batch & 1));
      }
    }
    if constexpr (S::kSplit > 1) {
      if (tid == 0) inbox_expect(m.inbox + (batch & 1), n * S::kSplit * sizeof(float));
      inbox_wait(m.inbox + (batch & 1), batch / 2 & 1);
    } else {
      __syncthreads();
    }
    K3_UNROLL
    for (int i = 0; i < S::kGates; ++i) {
      int at = tid + i * S::kThreads, row = at / S::kSlice, c = part * S::kSlice + at % S::kSlice;
      if (row >= n) break;
      float inv = 1.0f / sqrtf(tree_sum<S::kSplit>(squares[row], 1) / float(S::kDim) + a.eps);
      a.out[size_t(first + row) * channels + head * S::kDim + c] =
          float_to_bf16(m.o[row][at % S::kSlice] * inv * a.o_norm[c] * sigmoid(gate[i]));
    }
    if (n < S::kBatch) break;
    // The next batch overwrites q, k and fade, which all have read by the barrier before the norm; o and v come after two more.
  }
}
