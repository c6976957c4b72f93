// What stands around the layers of a step inside the single launch: embedding, the sum that the dense layer leaves, and where logits go. Output mix and head are
// kinds of the layers otherwise: a mix, a product. k3cuda/launch_step.py says what everything points to.
#pragma once
#include "launch_product.cuh"

// Of the embedding: what its phase has for weights.
struct LaunchTokens {
  const int* token_ids;   // [rows]
  const bf16* table;      // [own vocabulary][n]
  float* hidden;          // [rows][n]: the prefix sum, which begins at zero
};

// Slices of rows, kSlices of a row, as those of a mix: a value of the prefix sum is its own thread's.
template <int kN, int kSlices>
struct LaunchRowSlices {
  static constexpr int kOwn = kN / kSlices, kThreads = Consumers::kThreads, kPer = (kOwn + kThreads - 1) / kThreads;
  static_assert(kOwn % 4 == 0 && kOwn * kSlices == kN, "slices are whole vectors");
  static constexpr LaunchCounting kCounting = kCountsNothing;
  static constexpr int x_vectors(int, int) { return 0; }
};

// As stage embed and the sum of what all ranks made of it. Looped back, a rank gives the row that stands where the token's does in its owner's part.
template <int kN, int kSlices, int kParts, int kOwnVocab>
struct LaunchEmbed : LaunchRowSlices<kN, kSlices> {
  typedef LaunchRowSlices<kN, kSlices> Base;
  // With zeros of all others, or of equal parts, a power of two.
  static K3_DEVICE float sum(float v) { return K3_RANKS > 1 ? v + 0.f : kParts * v; }
  template <class Block>
  static K3_DEVICE void consume(Block& block, const ProgramPhase& p, int phase) {
    const Consumers team;   // of this phase alone, as in launch_kda.cuh
    block.received(phase);  // of other phases it reads nothing
    const LaunchTokens t = *(const LaunchTokens*)block.a.weights[phase];
#pragma unroll 1
    for (int u = 0; u < p.units; ++u) {
      const int row = p.tiles[u] / kSlices, own = p.tiles[u] % kSlices * Base::kOwn, token = t.token_ids[row];
      const int at = K3_RANKS > 1 ? token - block.a.rank * kOwnVocab : kParts > 1 ? token % kOwnVocab : token;
      const bool mine = at >= 0 && at < kOwnVocab;
      const bf16* from = t.table + size_t(mine ? at : 0) * kN + own;
#pragma unroll 1
      for (int i = 0; i < Base::kPer; ++i) {
        const int e = team.thread() + i * Base::kThreads;
        const float v = mine && e < Base::kOwn ? sum(bf16_to_float(from[e])) : 0;
        const uint4 vector = pack_floats(v, team.lane());
        if (e >= Base::kOwn) continue;
        t.hidden[size_t(row) * kN + own + e] = 0;
        if (e % 4) continue;
        if constexpr (K3_RANKS > 1) {   // who has the token gives the row to all; the first rank, where it is nobody's
          if (!mine && (u32(token) < u32(K3_RANKS * kOwnVocab) || block.a.rank)) continue;
#pragma unroll 1
          for (int rank = 0; rank < K3_RANKS; ++rank) store_exchange(block.made(p, rank, row) + (own + e) / 4, vector);
        } else block.publish(p, phase, row, (own + e) / 4, vector, 0, 0, 1);
      }
    }
  }
};

// The ranks' parts of a row, neighbours first.
template <int kN, int kSlices, int kParts>
struct LaunchPartsSum : LaunchRowSlices<kN, kSlices> {
  typedef LaunchRowSlices<kN, kSlices> Base;
  static constexpr int kBatch = min_of(kParts, 8), kGroups = kParts / kBatch;   // parts of a batch of loads
  template <class Block>
  static K3_DEVICE void consume(Block& block, const ProgramPhase& p, int phase) {
    const Consumers team;   // of this phase alone, as in launch_kda.cuh
    const int total = p.units * Base::kOwn;
#pragma unroll 1
    for (int i = team.thread(); i - team.lane() < total; i += Base::kThreads) {   // a thread a value: vectors of all parts would take too many registers
      const int at = min_of(i, total - 1), unit = p.tiles[at / Base::kOwn], row = unit / kSlices, column = unit % kSlices * Base::kOwn + at % Base::kOwn;
      const u32* from = (const u32*)(block.input(p, 0) + row * block.link(p).in[0].row) + column;
      float parts[kGroups];
      K3_UNROLL
      for (int g = 0; g < kGroups; ++g) {
        u32 v[kBatch];
        await_all(v, block.a.watch, phase, 0, [](int) { return true; }, [&](int j) { return from + (g * kBatch + j) * kN; });
        float part[kBatch];
        K3_UNROLL
        for (int j = 0; j < kBatch; ++j) part[j] = __uint_as_float(v[j]);
        parts[g] = tree_sum<kBatch>(part, 1);
      }
      if (i == team.thread()) block.hop(p);   // a value's first: those of later turns have come meanwhile
      const uint4 vector = pack_floats(tree_sum<kGroups>(parts, 1), team.lane());
      if (i < total && i % 4 == 0) block.publish(p, phase, row, column / 4, vector, 0, 0, 1);
    }
    team.sync();
    block.received(phase);
  }
};

// The head's rows: into the launch's result, at the place of the row's that are wanted (LaunchState).
struct LaunchLogits {
  static constexpr void describe(LaunchGeometry& g) { g.fields = g.f32 = g.to_logits = 1; }
};
