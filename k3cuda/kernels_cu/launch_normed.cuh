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
  static constexpr int vectors(int) { return 0; }
  static constexpr int scale_bytes(int tokens) { return tokens * int(sizeof(Row)); }   // apart: rows are scaled while the phase before still reads

  template <class P> struct Checked { static_assert(P::kLeaves * P::kSteps * 16 == S::kN, "all of the row is multiplied"); typedef LaunchNormed type; };
  template <class P> using Of = typename Checked<P>::type;

  template <class Block>
  static K3_DEVICE void receive(Block& block, const ProgramPhase& p, int phase) {
    typedef typename Block::Shape Shape;
    const Consumers team;   // of this phase alone, as in launch_kda.cuh
    const LaunchGeometry& g = block.geometry(p);
    const bool mix = S::kBlocks > 0 && p.extra() >> 4;
    const int own = g.own_vectors, first = g.is_shared ? block.part() * own : 0;
    const bf16* weight = ((const LaunchMix*)block.a.weights[phase - (p.extra() & 15)])->weight + first * 8;
    Row* rows = (Row*)(block.smem + Shape::kScaleAt);
    const int odd = g.odd, scales = kConsumers - 1 - team.warp();   // the last warps have no values, mostly
    if (scales < block.a.rows) scale(block, p, phase, rows[scales], scales, mix, team);
    bool begins = true;
#pragma unroll 1
    for (int row = 0; row < block.a.rows; ++row)
#pragma unroll 1
      for (int k = team.thread(); k - team.thread() < own; k += Consumers::kThreads) {
        uint4 v[kPieces] = {}, w = {};
        auto wants = [&](int j) { return k < own && (j < 2 || mix); };
        auto at = [&](int j) {
          const Field f = j < 2 ? kJoined : kMixture;
          return block.input(p, f) + row * block.link(p).in[f].row + (first + k) * 2 + j % 2;
        };
        if (k < own) w = *(const uint4*)(weight + k * 8);   // everything is asked for before anything is waited for
        await_all(v, block.a.watch, phase, u32(k), wants, at);
        if (begins) team.sync(), begins = false;   // all are finished with the phase before, and rows have been scaled
        if (k >= own) continue;
        const Row& r = rows[row];
        const float alpha = r.alpha, beta = r.beta, inv = r.inv;
        u32 words[4] = {};
        auto value = [&](u32 mixture, u32 joined, u32 weight) {
          const u32 bits = float_to_bf16(normed_value<S>(mix, alpha, beta, __uint_as_float(mixture), __uint_as_float(joined), inv, __uint_as_float(weight))).bits;
          return bits == 0x8000u ? 0u : bits;
        };
#pragma unroll 1
        for (int i = 0; i < 4; ++i) {   // a pair of values after another: what is used turns up at the front
          words[0] = words[1], words[1] = words[2], words[2] = words[3];
          words[3] = value(v[kPieces - 2].x, v[0].x, w.x << 16) | value(v[kPieces - 2].y, v[0].y, w.x & 0xffff0000u) << 16;
          w.x = w.y, w.y = w.z, w.z = w.w;
          K3_UNROLL
          for (int piece = 0; piece < kPieces; piece += 2) {
            v[piece].x = v[piece].z, v[piece].y = v[piece].w, v[piece].z = v[piece + 1].x, v[piece].w = v[piece + 1].y;
            v[piece + 1].x = v[piece + 1].z, v[piece + 1].y = v[piece + 1].w;
          }
        }
        block.x()[x_at<Shape::kTokens>(odd, row, k)] = {words[0], words[1], words[2], words[3]};
      }
    team.sync();
  }

  // A warp: what all values of a row are scaled by.
  template <class Block>
  static K3_DEVICE void scale(const Block& block, const ProgramPhase& p, int phase, Row& r, int row, bool mix, const Consumers& team) {
    if (team.lane() < S::kLeaves + int(mix)) {
      uint4 v[1];
      const uint4* from = block.input(p, kSums) + row * block.link(p).in[kSums].row + team.lane();
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
