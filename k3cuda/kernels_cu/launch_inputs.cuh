// What stands before the units of a product inside the single launch: what it multiplies comes into shared memory, and what goes with its rows.
#pragma once
#include "launch_args.cuh"
#include "situ.cuh"

// Where vector `k` of a token's share of x lies; `odd`: k-steps of a leaf, if that is odd, else 0.
template <int kTokens>
K3_DEVICE int x_at(int odd, int token, int k) {
  if (!odd) return ((k >> 2) * kTokens + token) * 4 + (k & 3);
  const int leaf = k / (odd * 2), own = k - leaf * odd * 2, pair = own / 4;
  return (leaf * odd * 2 + pair * 4) * kTokens + token * (pair < odd / 2 ? 4 : 2) + own % 4;
}

// What a product multiplies, into shared memory as [pair][token][quarter]: BF16 as it comes. A block that has all leaves reads all of the field,
// though it may use less.
struct LaunchPlain {
  static constexpr int kUnits = 1;   // units of a block that have an x of their own; 1: it is the same of all
  static constexpr int vectors(int) { return 0; }   // of shared memory that it takes behind the rest
  template <class P> using Of = LaunchPlain;        // what products share of it
  template <class Block>
  static K3_DEVICE void receive(Block& block, const ProgramPhase& p, int phase) {
    typedef typename Block::Shape S;
    const LaunchGeometry& g = block.geometry(p);
    uint4* shared = block.x();
    const int odd = g.odd, own = g.own_vectors, per = g.is_shared ? own : block.link(p).in[0].vectors, total = block.a.rows * per;
    const u32 part = 0xffffffffu / u32(per) + 1;   // i / per for the few that there are
    const uint4* from = block.input(p, 0) + (g.is_shared ? block.part() * own : 0);
    const int row = block.link(p).in[0].row;
    const Consumers team;   // of this phase alone, as in launch_kda.cuh
    receive_vectors<S::kTokens == 1 ? 1 : kReceiveBatch>(team.thread(), Consumers::kThreads, total, block.a.watch, phase,
      [&](int i) { const int token = u32(u64(u32(i)) * part >> 32); return from + token * row + (i - token * per); }, [&] { team.sync(); },   // all are finished with the phase before
      [&](int i, const uint4& v) {
        const int token = u32(u64(u32(i)) * part >> 32), k = i - token * per;
        if (k < own) shared[x_at<S::kTokens>(odd, token, k)] = v;
      });
    team.sync();
  }
};

// SiTU of F32 gates and ups, whose tiles of 16 come in turn. A thread a value: eight of a vector behind one another in a few threads took 3.6
// microseconds at one row.
struct LaunchSitu {
  static constexpr int kUnits = 1;
  static constexpr int vectors(int) { return 0; }
  template <class P> using Of = LaunchSitu;
  template <class Block>
  static K3_DEVICE void receive(Block& block, const ProgramPhase& p, int phase) {
    typedef typename Block::Shape S;
    constexpr int kBatch = min_of(4, S::kTokens);
    const int inputs = block.geometry(p).own_vectors * 8, odd = block.geometry(p).odd;   // a block has all of K
    uint4* shared = block.x();
    const u32* from = (const u32*)block.input(p, 0);
    const int row = block.link(p).in[0].row * 4;
    const Consumers team;   // of this phase alone, as in launch_kda.cuh
    team.sync();            // all are finished with the phase before
#pragma unroll 1
    for (int k = team.thread(); k < inputs; k += Consumers::kThreads) {
      const u32* at = from + k / kTileRows * 2 * kTileRows + k % kTileRows;
#pragma unroll 1
      for (int token = 0; token < block.a.rows; token += kBatch) {
        u32 v[2 * kBatch] = {};   // gates, then ups
        await_all(v, block.a.watch, phase, u32(k), [&](int j) { return token + j % kBatch < block.a.rows; },
                  [&](int j) { return at + (token + j % kBatch) * row + j / kBatch * kTileRows; });
        K3_UNROLL
        for (int j = 0; j < kBatch; ++j)
          if (token + j < block.a.rows)
            ((bf16*)&shared[x_at<S::kTokens>(odd, token + j, k / 8)])[k % 8] = float_to_bf16(situ(__uint_as_float(v[j]), __uint_as_float(v[kBatch + j]), block.a.situ_beta, block.a.situ_linear_beta));
      }
    }
    team.sync();
  }
};

// F32 values that go with the rows of a block's units, value(address) each, of field kField that a phase reads: to where LaunchUnits finds them.
template <int kField, class Block, class Value>
K3_DEVICE void fetch_more(Block& block, const ProgramPhase& p, Value&& value) {
  const u32* from = (const u32*)block.input(p, kField);
  const int row = block.link(p).in[kField].row * 4, rows = block.a.rows;
  float* to = (float*)(block.x() + block.geometry(p).more_at);
  const Consumers team;   // of this phase alone, as in launch_kda.cuh
  team.sync();            // all are finished with the phase before
#pragma unroll 1
  for (int i = team.thread(); i < p.units * rows * kTileRows; i += Consumers::kThreads) {
    const int unit = i / kTileRows / rows, token = i / kTileRows % rows;
    to[(unit * Block::Shape::kTokens + token) * kTileRows + i % kTileRows] = value(from + token * row + p.tiles[unit] * kTileRows + i % kTileRows);
  }
}

// What is added to a product's rows, F32: nothing, or the parts of all ranks, [part][row] in field kField_ that the phase reads. Sums of parts
// lie behind the tokens in shared memory, [unit][token][row of the tile], of kUnits_ units of a block at most.
struct LaunchNothing {
  static constexpr LaunchMore kMore = kMoreNothing;
  static constexpr int floats(int) { return 0; }
  template <class Block> static K3_DEVICE void fetch(Block&, const ProgramPhase&, int) {}
};
template <int kRanks, int kTiles, int kUnits_, int kField_>
struct LaunchAdd {
  static constexpr LaunchMore kMore = kMoreAdds;
  static constexpr int floats(int tokens) { return kUnits_ * tokens * kTileRows; }
  template <class Block>
  static K3_DEVICE void fetch(Block& block, const ProgramPhase& p, int phase) {
    constexpr int kBatch = min_of(kRanks, 8);   // of loads: more of them fill the registers
    fetch_more<kField_>(block, p, [&](const u32* at) {
      float parts[kRanks / kBatch];
      K3_UNROLL
      for (int h = 0; h < kRanks / kBatch; ++h) {
        u32 v[kBatch];
        await_all(v, block.a.watch, phase, 0, [](int) { return true; }, [&](int k) { return at + (h * kBatch + k) * kTiles * kTileRows; });
        float part[kBatch];
        K3_UNROLL
        for (int k = 0; k < kBatch; ++k) part[k] = __uint_as_float(v[k]);
        parts[h] = tree_sum<kBatch>(part, 1);
      }
      return tree_sum<kRanks / kBatch>(parts, 1);
    });
  }
};

// All that is a product's own: what stands before its units.
template <class In, class Add>
struct LaunchProductInput {
  static constexpr LaunchCounting kCounting = kCountsNothing;
  template <class Block>
  static K3_DEVICE void consume(Block& block, const ProgramPhase& p, int phase) {
    Add::fetch(block, p, phase);
    In::receive(block, p, phase);
    block.hop(p);
    block.received(phase);
  }
};
