// A product that norms for itself what it multiplies: instead of a round that leaves the norm's result, blocks read the joined row, the mixture of
// closed blocks and the sums over the row, and each makes the values of its leaves. A hand-over less; four times the volume, or eight.
#pragma once
#include "launch_mix.cuh"
#include "launch_product.cuh"

//   S  a LaunchMixShape
// Fields: joined row, F32; sums of its chunks and, behind them, the mixture's two scalars; the mixture, F32. extra: how many phases before this one
// the sums were made | whether closed blocks are mixed in << 4.
template <class S>
struct LaunchNormed {
  enum Field { kJoined, kSums, kMixture };
  static constexpr int kUnits = 1;
  static constexpr int kPieces = S::kBlocks ? 4 : 2;   // F32 vectors that a BF16 one follows from
  struct __align__(16) Row { float sums[S::kLeaves][4], top, total, alpha, beta, inv; };
  static constexpr int vectors(int tokens) { return tokens * int(sizeof(Row)) / 16; }

  template <class P, class Block>
  static K3_DEVICE void receive(Block& block, const ProgramPhase& p, int phase) {
    typedef typename Block::Shape Shape;
    static_assert(P::kLeaves * P::kSteps * 16 == S::kN, "all of the row is multiplied");
    const Consumers team;   // of this phase alone, as in launch_kda.cuh
    const bool mix = S::kBlocks > 0 && p.extra() >> 4;
    const bf16* weight = ((const LaunchMix*)block.a.weights[phase - (p.extra() & 15)])->weight;
    Row* rows = (Row*)(block.x() + P::in_at(Shape::kTokens));
    const int first = P::kParts > 1 ? block.part() * P::kOwnVectors : 0, total = block.a.rows * P::kOwnVectors;
    uint4 v[kPieces] = {}, w = {};
    int i = team.thread();
    auto wants = [&](int j) { return i < total && (j < 2 || mix); };
    auto at = [&](int j) {
      const Field f = j < 2 ? kJoined : kMixture;
      return block.input(p, f) + i / P::kOwnVectors * block.link(p).in[f].row + (first + i % P::kOwnVectors) * 2 + j % 2;
    };
    auto ask = [&] {   // everything before anything is waited for
      if (i < total) w = *(const uint4*)(weight + (first + i % P::kOwnVectors) * 8);
      ask_all(v, wants, at);
    };
    auto await = [&] { await_asked(v, block.a.watch, phase, u32(i), wants, at); };
    ask();
    await();       // here before the sums over it are
    team.sync();   // all are finished with the phase before
    if (team.warp() < block.a.rows) scale(block, p, phase, rows[team.warp()], mix, team);
    team.sync();
#pragma unroll 1
    while (i < total) {
      const int row = i / P::kOwnVectors, k = i % P::kOwnVectors;
      const Row& r = rows[row];
      u32 words[4];
      K3_UNROLL
      for (int half = 0; half < 2; ++half) {
        const f32x4 joined = as_floats(v[half]), mixture = as_floats(v[S::kBlocks ? 2 + half : half]);
        const u32 w0 = half ? w.z : w.x, w1 = half ? w.w : w.y;
        auto value = [&](float c, float p, u32 weight) {
          const u32 bits = float_to_bf16(normed_value<S>(mix, r.alpha, r.beta, c, p, r.inv, __uint_as_float(weight))).bits;
          return bits == 0x8000u ? 0u : bits;
        };
        words[half * 2] = value(mixture.x, joined.x, w0 << 16) | value(mixture.y, joined.y, w0 & 0xffff0000u) << 16;
        words[half * 2 + 1] = value(mixture.z, joined.z, w1 << 16) | value(mixture.w, joined.w, w1 & 0xffff0000u) << 16;
      }
      block.x()[P::template x_at<Shape::kTokens>(row, k)] = {words[0], words[1], words[2], words[3]};
      i += Consumers::kThreads;
      ask();
      await();
    }
    team.sync();
  }

  // A warp: what all values of a row are scaled by.
  template <class Block>
  static K3_DEVICE void scale(const Block& block, const ProgramPhase& p, int phase, Row& r, bool mix, const Consumers& team) {
    if (team.lane() < S::kLeaves + int(mix)) {
      uint4 v[1];
      const uint4* from = block.input(p, kSums) + team.warp() * block.link(p).in[kSums].row + team.lane();
      await_all(v, block.a.watch, phase, u32(team.lane()), [](int) { return true; }, [&](int) { return from; });
      if (team.lane() < S::kLeaves) *(uint4*)r.sums[team.lane()] = v[0];
      else r.top = __uint_as_float(v[0].x), r.total = __uint_as_float(v[0].y);
    }
    __syncwarp();
    NormRow a = {};
    a.eps = block.a.norm_eps;
    float alpha, beta;
    const float inv = mixed<S>(a, r.sums, mix, r.top, r.total, alpha, beta, team);
    if (team.lane() == 0) r.alpha = alpha, r.beta = beta, r.inv = inv;
  }
};
