// Products of latent attention inside the single launch: what they multiply and what becomes of it, for LaunchProduct.
#pragma once
#include "launch_product.cuh"
#include "mla_combine.cuh"

// Of a layer: the step's tables, its norms, its cache, room for partial results. What mla_norm, mla_attend and mla_combine have for weights.
struct LaunchMla {
  MlaAttend attend;   // without queries, results and counts
  MlaWrite write;     // without inputs and results
};

// Rows of F32 that are normed where they are read: a block norms whole rows and keeps its own leaves' share. Its norm is that of the next phase's
// LaunchMla: mla_norm is right behind it in every program.
//   kN, kNormLeaves  values of a row, leaves of its sum
template <int kN, int kNormLeaves>
struct LaunchQueryNorm {
  static constexpr int kUnits = 1;
  static constexpr int vectors(int tokens) { return tokens * kN / 4; }   // the rows as they come
  template <class P> using Of = LaunchQueryNorm;
  template <class Block>
  static K3_DEVICE void receive(Block& block, const ProgramPhase& p, int phase) {
    typedef typename Block::Shape S;
    typedef MlaLeaf<kN, kNormLeaves> Leaf;
    const Consumers team;   // of this phase alone, as in launch_kda.cuh
    const MlaWrite& norm = ((const LaunchMla*)block.a.weights[phase + 1])->write;
    const float eps = norm.eps;
    float weight[Leaf::kValues];
    K3_UNROLL
    for (int i = 0; i < Leaf::kValues; ++i) weight[i] = Leaf::has(i, team) ? bf16_to_float(norm.query_norm[Leaf::at(i, team)]) : 0;
    const uint4* from = block.input(p, 0);
    const int row = block.link(p).in[0].row, rows = block.a.rows;
    uint4* shared = block.x();
    const LaunchGeometry& g = block.geometry(p);
    float* values = (float*)(shared + g.in_at);   // [token][kN]
    receive_vectors<min_of(4, (S::kTokens * kN / 4 + Consumers::kThreads - 1) / Consumers::kThreads)>(
      team.thread(), Consumers::kThreads, rows * (kN / 4), block.a.watch, phase, [&](int i) { return from + i / (kN / 4) * row + i % (kN / 4); },
      [&] { team.sync(); },   // all are finished with the phase before
      [&](int i, const uint4& v) { ((uint4*)values)[i] = v; });
    float* leaves = block.partial(0);                          // [token][leaf]
    team.sync();
#pragma unroll 1
    for (int token = 0; token < rows; ++token) {
      float own[Leaf::kValues];
      K3_UNROLL
      for (int i = 0; i < Leaf::kValues; ++i) own[i] = Leaf::has(i, team) ? values[token * kN + Leaf::at(i, team)] : 0;
      const float sum = Leaf::squares(own);
      if (team.lane() == 0) leaves[token * kConsumers + team.warp()] = sum;
    }
    team.sync();
    const int own = g.own_vectors * 8, first = g.is_shared ? block.part() * own : 0;
#pragma unroll 1
    for (int token = 0; token < rows; ++token) {
      const float inverse = Leaf::inverse(leaves + token * kConsumers, eps);
      K3_UNROLL
      for (int i = 0; i < Leaf::kValues; ++i) {
        const int e = Leaf::at(i, team) - first;
        if (Leaf::has(i, team) && e >= 0 && e < own)
          ((bf16*)&shared[x_at<S::kTokens>(g.odd, token, e / 8)])[e % 8] = float_to_bf16(mla_normed(values[token * kN + first + e], inverse, weight[i]));
      }
    }
    team.sync();
  }
};

// Every head has a matrix of its own: a unit is a tile of one head's and reads that head's share of each row. `kRope` vectors behind it go to where the
// head's results end, by the block that has the head's first tile.
//   kHeadTiles  tiles of a head. kUnits_  units of a block at most
template <int kHeadTiles, int kRope, int kUnits_>
struct LaunchHeads {
  static constexpr int kUnits = kUnits_;
  static constexpr int vectors(int) { return 0; }
  template <class P> struct Of {
    static_assert(P::kParts == 1, "a block has all of K");
    static constexpr int kOwn = P::kOwnVectors, kPer = kOwn + kRope, kOdd = P::kSteps % 2 ? P::kSteps : 0;
    template <class Block>
    static K3_DEVICE void receive(Block& block, const ProgramPhase& p, int phase) {
      typedef typename Block::Shape S;
      const Consumers team;   // of this phase alone, as in launch_kda.cuh
      uint4* shared = block.x();
      const uint4* from = block.input(p, 0);
      const int row = block.link(p).in[0].row, rows = block.a.rows;
      receive_vectors<1>(team.thread(), Consumers::kThreads, p.units * rows * kPer, block.a.watch, phase,
        [&](int i) { return from + i / kPer % rows * row + p.tiles[i / kPer / rows] / kHeadTiles * kPer + i % kPer; }, [&] { team.sync(); },
        [&](int i, const uint4& v) {
          const int k = i % kPer, token = i / kPer % rows, unit = i / kPer / rows, tile = p.tiles[unit];
          if (k < kOwn) shared[unit * S::kTokens * kOwn + x_at<S::kTokens>(kOdd, token, k)] = v;
          else if (tile % kHeadTiles == 0) block.publish(p, phase, token, tile / kHeadTiles * (kHeadTiles * 2 + kRope) + kHeadTiles * 2 + k - kOwn, v, 0, 0, 1);
        });
      team.sync();
    }
  };
};

// Results of heads, BF16, each with `kRope` vectors behind it.
template <int kHeadTiles, int kRope>
struct LaunchHeadOut {
  static constexpr void describe(LaunchGeometry& g) { g.fields = 1, g.head_tiles = kHeadTiles, g.rope = kRope; }
};

// Rows are multiplied with the sigmoid of the second field that the phase reads, F32, which lies behind the tokens in shared memory.
template <int kUnits_>
struct LaunchGate {
  static constexpr LaunchMore kMore = kMoreGates;
  static constexpr int floats(int tokens) { return kUnits_ * tokens * kTileRows; }
  template <class Block>
  static K3_DEVICE void fetch(Block& block, const ProgramPhase& p, int phase) {
    fetch_more<1>(block, p, [&](const u32* at) {
      u32 v[1];
      await_all(v, block.a.watch, phase, 0, [](int) { return true; }, [&](int) { return at; });
      return sigmoid(__uint_as_float(v[0]));
    });
  }
};
