// The recurrence of Kimi Delta Attention, shared by the forward and the commit: their bytes must agree.
// Letters: S is a head's state [key, value]. A block owns a slice of value columns of one head; S stays in registers.
//
// Sum over the 128 keys, the same for every slicing: a leaf is four neighbouring keys, fmaf in rising order from the first product;
// the 32 leaves are folded by adding the upper half onto the lower, five times (distances 16, 8, 4, 2, 1).
#pragma once
#include "exchange.cuh"

// kSplit: blocks a head (one cluster). kCols: value columns of a thread that holds state. kThreads: of a block; those beyond the
// holders help with everything but the recurrence. kBatch: rows at a time, up to 8, the width of one MMA. kGroups: lanes of a warp that share
// columns, each with every kGroups-th leaf.
template <int kDim_, int kWidth_, int kSplit_, int kCols_, int kThreads_ = 0, int kBatch_ = 8, int kGroups_ = 8>
struct KdaShape {
  static constexpr int kDim = kDim_, kHistory = kWidth_ - 1, kWidth = kWidth_, kSplit = kSplit_, kCols = kCols_;
  static constexpr int kGroups = kGroups_, kLaneCols = kWarpSize / kGroups;   // of keys, and of columns: lane / kLaneCols, lane % kLaneCols
  static constexpr int kRuns = kDim / (4 * kGroups);       // leaves a thread holds, 4 kGroups keys apart
  static constexpr int kSlice = kDim / kSplit;
  static constexpr int kHolders = kGroups * kSlice / kCols;
  static constexpr int kThreads = kThreads_ > kHolders ? kThreads_ : kHolders, kWarps = kThreads / kWarpSize;
  static constexpr int kBatch = kBatch_;
  static constexpr int kTiles = kDim / 16, kSteps = kDim / 16, kHeldTiles = kTiles;   // kHeldTiles: of f_b, in KdaMixSmem
  static constexpr int kChannels = 2 * kDim + kSlice;      // q and k whole, v of the slice
  static constexpr int kRing = kBatch > 4 ? 16 : kBatch > 1 ? 8 : 4;   // rows of conv inputs: a batch and the history before it
  static constexpr int kInputs = kChannels + kDim;         // conv inputs of a row, then its low-rank decay
  static constexpr int kRowVectors = kInputs / 8, kConvVectors = kChannels / 8;   // of 16 bytes
  static constexpr int kVectors = (kBatch * kRowVectors + kThreads - 1) / kThreads;
  static constexpr int kGates = (kBatch * kSlice + kThreads - 1) / kThreads;
  static_assert(kDim == 4 * kWarpSize && kHolders % kWarpSize == 0 && kThreads % kWarpSize == 0 && kSlice % (kLaneCols * kCols) == 0,
                "a lane's four keys are a leaf");
  static_assert(kBatch <= 8 && kBatch + kHistory <= kRing, "a batch is one MMA wide");
  static_assert(kWidth == 4 && kSlice % 8 == 0, "a channel's taps are one vector");
};

template <class S>
struct KdaState {
  float s[4 * S::kRuns][S::kCols];              // [4 run + i]: key 32 run + 4 group + i

  static K3_DEVICE int group() { return lane_id() / S::kLaneCols; }
  static K3_DEVICE int column() { return (warp_id() * S::kLaneCols + lane_id() % S::kLaneCols) * S::kCols; }

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
  // From pieces of four keys, `stride` apart in shared memory, of a whole head.
  K3_DEVICE void load_pieces(const float* pieces, int stride) {
    K3_UNROLL
    for (int j = 0; j < S::kRuns; ++j)
      K3_UNROLL
      for (int i = 0; i < 4; ++i) {
        static_assert(S::kCols == 4, "a thread's columns of a key are one vector");
        f32x4 t = load4(pieces + (j * S::kGroups + group()) * stride + i * S::kDim + column());
        float(&v)[S::kCols] = s[4 * j + i];
        v[0] = t.x, v[1] = t.y, v[2] = t.z, v[3] = t.w;
      }
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
  // kPending: also `more`, sums of an earlier row, so that their way through the warp costs nothing.
  template <bool kPending>
  static K3_DEVICE void fold(float (&sum)[S::kCols], float (&more)[S::kCols]) {
    K3_UNROLL
    for (int d = kWarpSize / 2; d >= S::kLaneCols; d /= 2) {
      K3_UNROLL
      for (int c = 0; c < S::kCols; ++c) {
        sum[c] += __shfl_xor_sync(kFullWarp, sum[c], d);
        if constexpr (kPending) more[c] += __shfl_xor_sync(kFullWarp, more[c], d);
      }
    }
  }
  // Sums that every group has, written by one.
  static K3_DEVICE void put(const float (&sum)[S::kCols], float* row) {
    if (group() != 0) return;
    K3_UNROLL
    for (int c = 0; c < S::kCols; ++c) row[column() + c] = sum[c];
  }
  // One token: decay along the keys, predict v from k, correct. `fade` is exp of the log decay.
  // kPending: folds `more` meanwhile.
  template <bool kPending>
  K3_DEVICE void advance(const float* k, const float* fade, const float* v, float beta, float (&more)[S::kCols]) {
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
    fold<kPending>(seen, more);
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

constexpr int kStepRows = 1024;                 // of a step at most

// Of a set that is not empty. Bits one by one cost a microsecond of a step's kernel.
K3_DEVICE int lowest_bit(u64 set) {
#ifdef K3_HOST_SHIM
  return __builtin_ctzll(set);
#else
  return __ffsll((long long)set) - 1;
#endif
}

// Calls work(first row, slot) for the sequences `lane`, lane + lanes, ... of a step, counted by their first row. The whole block.
template <class Work>
K3_DEVICE void kda_each_sequence(const int* row_slot, int rows, int lane, int lanes, Work&& work) {
  int sequence = 0;
  for (int base = 0; base < rows; base += kWarpSize) {
    int r = base + lane_id();
    int slot = r < rows ? row_slot[r] : -1;
    u32 starts = __ballot_sync(kFullWarp, slot >= 0 && (r == 0 || row_slot[r - 1] != slot));
    while (starts) {
      const int bit = lowest_bit(starts);
      starts &= starts - 1;
      int its = __shfl_sync(kFullWarp, slot, bit);
      if (sequence++ % lanes == lane) work(base + bit, its);
    }
  }
}

// The conv window of one layer and sequence moved on over `taken` rows, in this slice's channels from `channel` on. row_of(j): the row of qkv whose inputs
// become entry j, asked only where they do. The whole block.
template <class S, class RowOf>
K3_DEVICE void kda_move_window(bf16* conv_state, const bf16* qkv, int channels, int channel, int taken, RowOf&& row_of) {
  for (int i = threadIdx.x; i < 3 * S::kSlice; i += S::kThreads) {
    const int which = i / S::kSlice, c = channel + i % S::kSlice;
    bf16* window = conv_state + size_t(which) * S::kHistory * channels + c;
    bf16 moved[S::kHistory];
    K3_UNROLL
    for (int j = 0; j < S::kHistory; ++j)
      moved[j] = taken + j < S::kHistory ? window[(taken + j) * channels] : qkv[(size_t(row_of(j)) * 3 + which) * channels + c];
    K3_UNROLL
    for (int j = 0; j < S::kHistory; ++j) window[j * channels] = moved[j];
  }
}

// Of the rows of a step of up to 64. Bit r: row r is live, and opens a sequence.
struct KdaRowBits {
  u64 live = 0, opens = 0;
  int slots[2] = {-1, -1};                      // of rows lane and 32 + lane
  K3_DEVICE KdaRowBits(const int* row_slot, int rows) {
    K3_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int r = half * kWarpSize + lane_id(), before = r > 0 && r < rows ? row_slot[r - 1] : -1;
      if (r < rows) slots[half] = row_slot[r];
      live |= u64(__ballot_sync(kFullWarp, slots[half] >= 0)) << half * kWarpSize;
      opens |= u64(__ballot_sync(kFullWarp, slots[half] >= 0 && slots[half] != before)) << half * kWarpSize;
    }
  }
  // The whole warp.
  K3_DEVICE int slot(int row) const { return __shfl_sync(kFullWarp, row < kWarpSize ? slots[0] : slots[1], row % kWarpSize); }
};

// Rows of `slot` from `first` on: neighbours of one sequence.
K3_DEVICE int kda_sequence_rows(const int* row_slot, int rows, int first, int slot) {
  for (int n = 0;; n += kWarpSize) {
    int r = first + n + lane_id();
    u32 same = __ballot_sync(kFullWarp, r < rows && row_slot[r < rows ? r : first] == slot);
    if (same != kFullWarp) return n + lowest_bit(~same);
  }
}
