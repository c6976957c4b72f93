// Collectives on one GPU or over mapped peers: every rank writes its part into every rank's target. Nothing is added.
#pragma once
#include "stages/common.cuh"

// In place of what kWidth F32 columns of kRowsOf rows hold on every rank: their sum over the ranks, neighbours first. Each rank adds its
// share of the columns, which nobody else reads, and gives it to all. Looped back, the one rank stands for all and sums every share: as many
// equal parts as ranks, a power of two, make the bytes of their tree.
template <size_t kAt, int kRowsOf, int kWidth>
K3_DEVICE void sum_ranks(const Step& s) {
  constexpr int kShare = kWidth / kRanks, kVector = kShare % 4 == 0 ? 4 : 1, kUnits = kShare / kVector;
  struct alignas(4 * kVector) Vector { float v[kVector]; };
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < kRowsOf * kUnits; i += gridDim.x * blockDim.x) {
    const size_t at = size_t(i / kUnits) * kWidth + i % kUnits * kVector;
    Vector part[kRanks], sum;
    K3_UNROLL
    for (int r = 0; r < kRanks; ++r) part[r] = *(const Vector*)((const float*)(s.peers[r] + kAt) + at + (s.loopback ? r : s.rank) * kShare);
    K3_UNROLL
    for (int j = 0; j < kVector; ++j) sum.v[j] = tree_sum<kRanks>(&part[0].v[j], kVector);
    K3_UNROLL
    for (int r = 0; r < kRanks; ++r) {
      if (s.loopback)
        K3_UNROLL
        for (int j = 0; j < kVector; ++j) sum.v[j] = kRanks * part[r].v[j];
      *(Vector*)((float*)(s.peers[r] + kAt) + at + (s.loopback ? r : s.rank) * kShare) = sum;
    }
  }
}

// A unit that divides every run of bytes a move copies, so that one thread moves one unit.
template <int kBytes> struct Unit { typedef typename Unit<(kBytes % 16 == 0 ? 16 : kBytes % 8 == 0 ? 8 : kBytes % 4 == 0 ? 4 : 2) + 1000>::type type; };
template <> struct Unit<1016> { typedef uint4 type; };
template <> struct Unit<1008> { typedef uint2 type; };
template <> struct Unit<1004> { typedef u32 type; };
template <> struct Unit<1002> { typedef u16 type; };

// kSource, kTarget: offsets in the arena. kSlice: bytes of one row that a rank sends. kSourceRow, kTargetRow: bytes between rows there.
// kSlot: bytes between ranks' places in the target. kCut: the slice that is sent depends on who receives it (scatter). kOf: neighbours that take
// part, all ranks or a group. Behind the offsets: where the operation's layer begins.
template <size_t kSource, size_t kTarget, int kRowsOf, int kSlice, int kSourceRow, int kTargetRow, size_t kSlot, bool kCut, int kOf>
K3_DEVICE void move(const Step& s, size_t source_layer = 0, size_t target_layer = 0) {
  typedef typename Unit<kSlice>::type T;
  constexpr int kUnits = kSlice / sizeof(T), kAll = kOf * kRowsOf * kUnits;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < kAll; i += gridDim.x * blockDim.x) {
    int unit = i % kUnits, row = i / kUnits % kRowsOf, other = i / kUnits / kRowsOf, peer = s.rank / kOf * kOf + other;
    // Looped back, the one rank stands for all: it fills every place of its own target.
    int place = s.loopback ? other : s.rank % kOf, cut = kCut ? other : 0;
    const T* from = (const T*)(s.arena + kSource + source_layer + size_t(row) * kSourceRow + size_t(cut) * kSlice) + unit;
    T* to = (T*)(s.peers[peer] + kTarget + target_layer + size_t(row) * kTargetRow + place * kSlot) + unit;
    *to = *from;
  }
}
