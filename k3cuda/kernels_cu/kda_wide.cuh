// The middle of KDA for steps of many rows, as three kernels with the arithmetic and the bytes of kda_core.cuh: what eight rows need of
// no state (conv, decay gate, norms), for all rows at once; the recurrence and nothing else, a head's columns spread over the machine;
// the norm and gate of what it gave.
#pragma once
#include "kda_core.cuh"
#include "row_shape.cuh"

constexpr int kScanSlice = 8;    // columns that a block of the recurrence takes
// A row of it is one chain, and a multiprocessor is kept busy by what its columns load from shared memory: few columns, many lanes on each.
template <int kDim, int kWidth>
using KdaScanShape = KdaShape<kDim, kWidth, kDim / kScanSlice, 1, 0, 8, 16>;

// What passes between them, F32. `rows`, `v`: as the recurrence takes them, so that a batch of rows is two copies.
struct KdaWork {
  float* rows;   // [heads][rows of the step][3][dim]: q, k, exp of the log decay
  float* v;      // [heads][slices][rows of the step][kScanSlice]
  float* o;      // [rows][heads dim]: outputs before their norm
};

template <class S>
struct KdaGatesSmem {
  KdaMixSmem<S> m;
  bf16 before[S::kBatch][S::kHistory][S::kChannels];   // the conv's inputs before each row, oldest first
};

// The conv's inputs before n rows from `first` on, of whatever sequences; bit r of `live`: row r is no padding. Of them what comes from windows,
// what from rows of the step, or both.
template <class S, bool kWindows = true, bool kRows = true>
K3_DEVICE void kda_before(const KdaMix& a, KdaGatesSmem<S>& g, int head, int first, int n, u32 live) {
  const int channels = a.heads * S::kDim;
  for (int i = threadIdx.x; i < n * S::kHistory * S::kConvVectors; i += S::kThreads) {
    const int v = i % S::kConvVectors, j = i / S::kConvVectors % S::kHistory, r = i / S::kConvVectors / S::kHistory, row = first + r;
    if (!(live >> r & 1)) continue;
    const int slot = a.row_slot[row];
    int own = 0;                                // rows of the sequence before this one in the step, so far as the conv reaches
    while (own < S::kHistory && row > own && a.row_slot[row - own - 1] == slot) ++own;
    if (!(j + own < S::kHistory ? kWindows : kRows)) continue;
    const bf16* from = j + own < S::kHistory
        ? a.conv_state + (size_t(slot) * 3 * S::kHistory + own + j) * channels + kda_vector_at<S>(v, channels * S::kHistory, head, 0)
        : a.qkv + size_t(row - S::kHistory + j) * 3 * channels + kda_vector_at<S>(v, channels, head, 0);
    copy_async<16>(&g.before[r][j][v * 8], from);
  }
}

// Their conv and SiLU, as kda_conv. keep(row, column, two values) puts v where the recurrence finds it.
template <class S, class Keep>
K3_DEVICE void kda_conv_rows(const KdaMix& a, KdaGatesSmem<S>& g, int head, int first, int n, Keep&& keep) {
  KdaMixSmem<S>& m = g.m;
  constexpr int kPairs = S::kChannels / 2;
  for (int i = threadIdx.x; i < n * kPairs; i += S::kThreads) {
    const int r = i / kPairs, c = i % kPairs * 2, vc = c - 2 * S::kDim;
    const f32x4 t = m.taps[c], u = m.taps[c + 1];
    float x[S::kWidth], w[S::kWidth];
    K3_UNROLL
    for (int j = 0; j < S::kWidth; ++j) {
      u32 both = *(const u32*)(j < S::kHistory ? &g.before[r][j][c] : &m.inputs[r + S::kHistory][c]);
      x[j] = __uint_as_float(both << 16), w[j] = __uint_as_float(both & 0xffff0000u);
    }
    float y = fmaf(x[3], t.w, fmaf(x[2], t.z, fmaf(x[1], t.y, x[0] * t.x))), z = fmaf(w[3], u.w, fmaf(w[2], u.z, fmaf(w[1], u.y, w[0] * u.x)));
    y *= sigmoid(y);
    z *= sigmoid(z);
    if (vc < 0) *(f32x2*)(c < S::kDim ? &m.q[r][c] : &m.k[r][c - S::kDim]) = f32x2{y, z};
    else {
      *(f32x2*)&a.v[(size_t(first + r) * a.heads + head) * S::kDim + vc] = f32x2{y, z};
      keep(r, vc, f32x2{y, z});
    }
  }
}

// Rows `first` to first + 7 of the step, of whatever sequences, for one head. Shape: a whole head. Padding rows get numbers without meaning.
template <class S, class Ready>
K3_DEVICE void kda_gates(const KdaMix& a, const KdaWork& work, KdaGatesSmem<S>& g, int head, int first, Ready ready) {
  static_assert(S::kSplit == 1, "decays and norms are over a whole head");
  KdaMixSmem<S>& m = g.m;
  const int channels = a.heads * S::kDim, left = a.rows - first, n = left < S::kBatch ? left : S::kBatch;
  const u32 live = __ballot_sync(kFullWarp, lane_id() < n && a.row_slot[first + (lane_id() < n ? lane_id() : 0)] >= 0);
  if (!live) {
    if (first == 0) ready();                    // a step of nothing but padding still keeps its place in the order of kernels
    return;
  }
  kda_load_weights<S>(a, m, head, 0);
  const float scale = expf(a.a_log[head]);
  ready();
  kda_before<S>(a, g, head, first, n, live);
  KdaInputs<S> in;
  in.load(a, head, 0, first, n);
  in.store(m, 0, n);
  copy_wait();
  __syncthreads();
  kda_conv_rows<S>(a, g, head, first, n, [&](int r, int column, const f32x2& v) {
    *(f32x2*)&work.v[((size_t(head) * (S::kDim / kScanSlice) + column / kScanSlice) * a.rows + first + r) * kScanSlice + column % kScanSlice] = v;
  });
  kda_low_rank<S>(m, 0, n);
  __syncthreads();
  kda_decay<S>(a, m, scale, head, 0, first, n);
  kda_l2norm<S>(a, m, head, 0, first, n);
  __syncthreads();
  for (int i = threadIdx.x; i < n * S::kDim / 4; i += S::kThreads) {
    const int row = i / (S::kDim / 4), c = i % (S::kDim / 4) * 4;
    float* to = work.rows + (size_t(head) * a.rows + first + row) * 3 * S::kDim + c;
    store4(to, load4(&m.q[row][c]));
    store4(to + S::kDim, load4(&m.k[row][c]));
    store4(to + 2 * S::kDim, load4(&m.fade[row][c]));
  }
}

// kRun: batches of rows that come and are given back together: each time all threads meet, and one of them asks for the next. Where blocks share an SM
// there is room for one.
template <class S, int kRun>
struct KdaScanSmem {
  static constexpr int kRows = kRun * S::kBatch, kSlots = kRun == 1 ? 4 : 2;   // kSlots: runs that are on their way
  float row[kSlots][kRows][3 * S::kDim];                       // q, k, fade
  float v[kSlots][kRows][S::kSlice];
  float beta[kStepRows];
  int slot[kStepRows];                                         // of every row of the step: looking for sequences waits for no memory
  u64 full[kSlots];
};

// Slice `part` of a head for the sequences `lane`, lane + lanes, ... of the step. All threads hold state. `ready` as of kda_mix.
template <class S, int kRun, class Ready>
K3_DEVICE void kda_scan(const KdaMix& a, const KdaWork& work, KdaScanSmem<S, kRun>& m, int head, int part, int lane, int lanes, Ready ready) {
  static_assert(S::kThreads == S::kHolders && S::kSlice == kScanSlice, "all threads hold state");
  constexpr int kRows = KdaScanSmem<S, kRun>::kRows, kSlots = KdaScanSmem<S, kRun>::kSlots;
  const int channels = a.heads * S::kDim, tid = threadIdx.x;
  if (tid == 0) {
    for (int i = 0; i < kSlots; ++i) barrier_init(m.full + i, 1);
    barrier_fence_init();
  }
  for (int i = tid; i < a.rows; i += S::kThreads) m.slot[i] = a.row_slot[i];
  ready();
  __syncthreads();
  int runs = 0;                                 // so far; run i lies in slot i % kSlots
  kda_each_sequence(m.slot, a.rows, lane, lanes, [&](int first, int slot) {
    const int length = kda_sequence_rows(m.slot, a.rows, first, slot), end = runs + (length + kRows - 1) / kRows;
    auto bring = [&](int run) {                 // one thread
      if (run >= end) return;
      const int slot = run % kSlots, done = (run - runs) * kRows, n = min_of(kRows, length - done);
      constexpr int kRow = 3 * S::kDim * sizeof(float), kValues = S::kSlice * sizeof(float);
      barrier_expect(m.full + slot, n * (kRow + kValues));
      bulk_copy(m.row[slot], work.rows + (size_t(head) * a.rows + first + done) * 3 * S::kDim, n * kRow, m.full + slot);
      bulk_copy(m.v[slot], work.v + ((size_t(head) * S::kSplit + part) * a.rows + first + done) * S::kSlice, n * kValues, m.full + slot);
    };
    if (tid == 0)
      for (int i = 0; i < kSlots; ++i) bring(runs + i);
    for (int i = tid; i < length; i += S::kThreads) m.beta[i] = a.beta[size_t(first + i) * a.heads + head];
    KdaState<S> state;
    float* state_at = a.state + (size_t(slot) * a.heads + head) * S::kDim * S::kDim + part * S::kSlice;
    state.load(state_at);
    float* out = work.o + size_t(first) * channels + head * S::kDim + part * S::kSlice;
    float o[S::kCols] = {};
    __syncthreads();
#pragma unroll 1
    for (int run = runs; run < end; ++run) {
      barrier_wait(m.full + run % kSlots, run / kSlots & 1);
      const int begin = (run - runs) * kRows;
#pragma unroll 1
      for (int done = begin; done < min_of(length, begin + kRows); done += S::kBatch) {
        const int n = min_of(int(S::kBatch), length - done);
        const float(*row)[3 * S::kDim] = m.row[run % kSlots] + (done - begin);
        const float(*v)[S::kSlice] = m.v[run % kSlots] + (done - begin);
        auto pass = [&](int r) {
          state.template advance<true>(row[r] + S::kDim, row[r] + 2 * S::kDim, v[r], m.beta[done + r], o);
          if (done + r) state.put(o, out + size_t(done + r - 1) * channels);
          state.partial(row[r], o);
        };
        if (n == S::kBatch) {                   // without branches, so that loads of later rows come before this row's end
          K3_UNROLL
          for (int r = 0; r < S::kBatch; ++r) pass(r);
        } else {
#pragma unroll 1
          for (int r = 0; r < n; ++r) pass(r);
        }
      }
      __syncthreads();                          // the run is used up
      if (tid == 0) bring(run + kSlots);
    }
    state.template fold<false>(o, o);
    state.put(o, out + size_t(length - 1) * channels);
    if (a.advances) {                           // kda_gates, which reads windows, is done
      state.store(state_at);
      kda_move_window<S>(a.conv_state + size_t(slot) * 3 * S::kHistory * channels, a.qkv, channels, head * S::kDim + part * S::kSlice, length,
                         [&](int j) { return first + length - S::kHistory + j; });
    }
    runs = end;
  });
}

// Norm over the head first, output gate second; a warp a row and head. As kda_finish.
template <class S>
K3_DEVICE void kda_norm(const KdaMix& a, const KdaWork& work, int job) {
  const int row = job / a.heads, head = job % a.heads;
  if (row >= a.rows || a.row_slot[row] < 0) return;
  const size_t at = size_t(row) * a.heads * S::kDim + head * S::kDim + 4 * lane_id();
  const f32x4 o = load4(work.o + at), gate = load4(a.out_gate + at), norm = load4(a.o_norm + 4 * lane_id());
  const float inv = inverse_sqrt(warp_sum((o.x * o.x + o.y * o.y) + (o.z * o.z + o.w * o.w)) * (1.0f / S::kDim) + a.eps);
  bf16* out = a.out + at;
  out[0] = float_to_bf16(o.x * inv * norm.x * sigmoid(gate.x));
  out[1] = float_to_bf16(o.y * inv * norm.y * sigmoid(gate.y));
  out[2] = float_to_bf16(o.z * inv * norm.z * sigmoid(gate.z));
  out[3] = float_to_bf16(o.w * inv * norm.w * sigmoid(gate.w));
}
