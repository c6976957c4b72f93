// Rows of hidden state in slices, as the rounds of launch_mix.cuh have them: where a phase finds what it mixes, which slice a unit is, and what of it
// lies in shared memory.
#pragma once
#include "launch_fields.cuh"
#include "norm_core.cuh"

// Of a phase: where its weights lie, and what stays between steps. hidden: null where nothing but the parts joins. taps: null where no draft model reads
// what it mixes. The round of the stream leaves them, of which a row has so many (LaunchGeometry): `sums` the prefix sum, `out` the mixture; of others it has none.
struct LaunchMix {
  const float* score;   // [n]
  const bf16* weight;   // [n]
  float *hidden, *blocks;   // [rows][n], [blocks][rows][n]
  bf16* taps;   // [rows][taps][n], from the mix's own one on
};

//   kSlices_  of a row
//   kUnits_   slices of a block, at most
template <int kN_, int kLeaves_, int kBlocks_, int kSlices_, int kUnits_>
struct LaunchMixShape : NormShape<kN_, kLeaves_, 1, kBlocks_, kSlices_, Consumers::kThreads> {
  typedef NormShape<kN_, kLeaves_, 1, kBlocks_, kSlices_, Consumers::kThreads> Base;
  static constexpr int kSlices = kSlices_, kUnits = kUnits_, kMost = max_of(kBlocks_, 1);
  static constexpr int kVectors = Base::kOwn / 4;   // F32 vectors of a slice
  static_assert(Base::kOwn % 8 == 0, "slices are whole vectors");
};

// Of a slice, from `sums` to `out`.
template <class S>
struct __align__(16) LaunchMixRoom {
  float source[S::kRows][S::kOwn], score[S::kBlocks ? S::kOwn : 4];   // closed blocks, then p and c
  float closed[S::kLeaves][2][8], sums[S::kLeaves][4], own[S::kOwnLeaves][4], top, total;
};

// A phase's row arithmetic, and which slice a unit is. extra: closed blocks | whether the row's sum becomes one << 4.
template <class S>
struct LaunchSlice {
  NormRow a;
  bf16* taps;
  int row, own;   // first element of the slice
  bool mix;
  template <class Block>
  K3_DEVICE LaunchSlice(const Block& block, const ProgramPhase& p, int phase, int unit) : row(unit / S::kSlices), own(unit % S::kSlices * S::kOwn) {
    const LaunchMix m = *(const LaunchMix*)block.a.weights[phase];
    const int closed = p.extra() & 15, rows = block.a.block_rows;
    taps = m.taps;
    a = {nullptr, nullptr, rows, 0, nullptr, m.hidden, m.hidden, p.extra() >> 4 ? m.blocks + size_t(closed) * rows * S::kN : nullptr, m.blocks, closed, m.score, m.weight,
         nullptr, block.a.norm_eps};
    mix = S::kBlocks > 0 && closed > 0;
  }
  K3_DEVICE size_t at() const { return size_t(row) * S::kN + own; }
  K3_DEVICE void leave_tap(const LaunchGeometry& g, int e, float v) const {
    if (g.taps && taps) taps[size_t(row) * g.taps * S::kN + own + e] = float_to_bf16(v);
  }
};

// A slice of the closed blocks and its scores into shared memory, all loads before the team meets. Each thread keeps its own elements.
template <class S>
K3_DEVICE void keep_closed(const LaunchSlice<S>& slice, float (*source)[S::kOwn], float* score, const Consumers& team) {
  float v[S::kMost][S::kPer], own[S::kPer];
  if constexpr (S::kBlocks > 0) {
    K3_UNROLL
    for (int i = 0; i < S::kPer; ++i) own[i] = team.thread() + i * S::kThreads < S::kOwn ? slice.a.score[slice.own + team.thread() + i * S::kThreads] : 0;
    load_closed<S>(v, slice.a, slice.at(), true, team);
  }
  team.sync();
  if constexpr (S::kBlocks > 0) {
    K3_UNROLL
    for (int i = 0; i < S::kPer; ++i) {
      const int e = team.thread() + i * S::kThreads;
      if (e >= S::kOwn) continue;
      score[e] = own[i];
      K3_UNROLL
      for (int j = 0; j < S::kBlocks; ++j) source[j][e] = v[j][i];
    }
  }
}

K3_DEVICE uint4 floats_vector(const float* v) { return {exchange_word(v[0]), exchange_word(v[1]), exchange_word(v[2]), exchange_word(v[3])}; }

// What a round reads of its own, into the L2 by the producer, phases before the block comes there; its LaunchMix is in the L1 behind this.
template <class Block>
K3_DEVICE void fetch_mix_ahead(const Block& block, const ProgramPhase& p, const u8* w) {
  const LaunchGeometry& g = block.geometry(p);
  const int closed = g.ahead & kAheadBlocks ? p.extra() & 15 : 0, j = lane_id() - 2, slice = g.slice, n = slice * g.slices;
  const LaunchMix m = *(const LaunchMix*)w;
#pragma unroll 1
  for (int u = 0; u < p.units; ++u) {
    const int own = p.tiles[u] % g.slices * slice;
    const size_t at = size_t(p.tiles[u] / g.slices) * n + own;
    const void* from = nullptr;
    int bytes = slice * 4;
    if (lane_id() == 0) {
      if (g.ahead & kAheadWeight) from = m.weight + own, bytes = slice * 2;
      else if (m.score) from = m.score + own;
    } else if (lane_id() == 1) {
      if (g.ahead & kAheadSum && m.hidden) from = m.hidden + at;
    } else if (j < closed) from = m.blocks + size_t(j) * block.a.block_rows * n + at;
    if (from) bulk_prefetch(from, bytes);
  }
}
