// A move of a collective as a library or another process sees it: vectors of 16 bytes in the order [rank][row][vector of the slice], whatever
// pitches its buffers have. A slice whose bytes are no multiple of 16 ends in a vector that is zero behind them.
#pragma once
#include "exchange_sizes.cuh"   // made by runtime/peer_exchange.py
#include "prims.cuh"

// emit.py's MoveLayout with addresses. `unit`: 16 where everything lies on multiples of it, else 2.
struct RankMove {
  const u8* source;
  u8* target;
  u64 slot;
  int rows, slice, source_row, target_row, ranks, is_cut, unit;

  K3_DEVICE int row_vectors() const { return (slice + 15) / 16; }
  K3_DEVICE int rank_vectors() const { return rows * row_vectors(); }
  // Vector i of what goes to the group's rank `receiver`.
  K3_DEVICE uint4 load(int receiver, int i) const {
    const int row = i / row_vectors(), at = i % row_vectors() * 16;
    const u8* p = source + size_t(row) * source_row + (is_cut ? size_t(receiver) * slice : 0) + at;
    if (unit == 16) return load_activations((const uint4*)p);
    u32 word[4] = {};
    K3_UNROLL
    for (int j = 0; j < 8; ++j)
      if (at + 2 * j < slice) word[j / 2] |= u32(((const u16*)p)[j]) << 16 * (j % 2);
    return {word[0], word[1], word[2], word[3]};
  }
  // Vector i of what came from the group's rank `sender`.
  K3_DEVICE void store(int sender, int i, const uint4& v) const {
    const int row = i / row_vectors(), at = i % row_vectors() * 16;
    u8* p = target + size_t(sender) * slot + size_t(row) * target_row + at;
    if (unit == 16) {
      *(uint4*)p = v;
      return;
    }
    const u32 word[4] = {v.x, v.y, v.z, v.w};
    K3_UNROLL
    for (int j = 0; j < 8; ++j)
      if (at + 2 * j < slice) ((u16*)p)[j] = u16(word[j / 2] >> 16 * (j % 2));
  }
};

// What is sent: to each rank of the group where that differs, else once.
extern "C" __global__ void __launch_bounds__(kMoveThreads) move_pack(const __grid_constant__ RankMove m, uint4* sent) {
  const int part = m.rank_vectors(), all = (m.is_cut ? m.ranks : 1) * part;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < all; i += gridDim.x * blockDim.x) sent[i] = m.load(i / part, i % part);
}

// What came from all ranks of the group.
extern "C" __global__ void __launch_bounds__(kMoveThreads) move_spread(const __grid_constant__ RankMove m, const uint4* got) {
  const int part = m.rank_vectors(), all = m.ranks * part;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < all; i += gridDim.x * blockDim.x) m.store(i / part, i % part, load_activations(got + i));
}
