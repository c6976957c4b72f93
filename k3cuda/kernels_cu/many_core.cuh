// The product of a step of 16 to 64 rows: the arithmetic and the packed weights of row_core.cuh, laid out so that tokens cost little.
// A cluster takes a run of row tiles, its blocks take leaves of K. A block brings its leaves' part of every token into shared memory once
// and lets the weights of all its tiles pass; each warp takes tiles of its own. Leaf sums meet as neighbours: in a warp, then at the block
// that owns a fragment (16 rows of 8 tokens), to which all others of the cluster send theirs as they lie in registers.
#pragma once
#include "wide_core.cuh"

//   kTotal, kLeaves, kSteps  16-row tiles of the product; leaves of K that this rank holds, and k-steps in each
//   kNT                      tiles of eight tokens
//   kPer                     neighbouring row tiles that meet in the epilogue: 1 or 2
//   kCS_                     blocks of a cluster, at most; kMT_: row tiles of a warp at once, 0: by size
template <int kTotal_, int kLeaves_, int kSteps_, int kNT_, int kPer_, int kSms, int kCS_ = 8, int kWK_ = 0, int kMT_ = 0, bool kAlias_ = true, int kMost_ = 0>
struct ManyShape {
  static constexpr int kTotal = kTotal_, kLeaves = kLeaves_, kSteps = kSteps_, kNT = kNT_, kPer = kPer_;
  static constexpr int kWarps = 8, kThreads = kWarps * kWarpSize;
  static constexpr int kCS = kLeaves == 16 ? kCS_ : 1, kOwn = kLeaves / kCS;                     // leaves of a block
  static constexpr int kUnits = groups_of(kTotal, kPer), kClusters = max_of(1, min_of(kSms / kCS, kUnits));
  static constexpr int kBlocks = kClusters * kCS, kRun = groups_of(kUnits, kClusters) * kPer;                            // tiles of a cluster, at most
  // Few tiles: leaves of a block go to different warps. Many: a warp multiplies each part of x by two tiles.
  static constexpr int kWK = kWK_ ? kWK_ : kCS > 1 && kRun <= 4 ? kOwn : 1, kWM = kWarps / kWK, kWarpLeaves = kOwn / kWK;
  static constexpr int kMT = kMT_ ? kMT_ : kRun > kWM ? 2 : 1, kTurn = min_of(kWM * kMT, kRun), kTurns = groups_of(kRun, kWM * kMT);
  static constexpr int kPairs = (kSteps + 1) / 2, kX = kOwn * kPairs * kNT * kStepBytes;
  static constexpr int kSources = kCS * kWK, kJobs = groups_of(groups_of(kTurn, kPer) * kNT, kCS);   // sums of a fragment; fragments that a block owns
  static constexpr bool kMeets = kSources > 1 || kPer > 1;
  static constexpr int kInbox = kMeets ? kJobs * kPer * kSources * kStepBytes : 0;
  static constexpr bool kAlias = kAlias_ && kTurns == 1 && kInbox <= kX;                       // the inbox takes the place of tokens
  static constexpr int kChunkSteps = chunk_steps(kSteps, (kMost_ ? kMost_ : kSteps <= 16 ? 16 : 8) / kMT, false), kLeafChunks = kSteps / kChunkSteps;
  static constexpr int kTileChunk = kChunkSteps * kStepBytes, kChunkBytes = kMT * kTileChunk;
  static constexpr int kInboxAt = kAlias ? 0 : kX, kRingAt = kX + (kAlias ? 0 : kInbox);
  static constexpr int kSlots = min_of(min_of(8, kTurns * kWarpLeaves * kLeafChunks), (kWideShared - kRingAt - 64) / (kWarps * (kChunkBytes + 8)));
  static constexpr int kBarrierAt = kRingAt + kWarps * kSlots * kChunkBytes, kHeardAt = kBarrierAt + kWarps * kSlots * 8, kSmem = kHeardAt + 16;
  static constexpr bool kFits = kX <= kWideTokens && kSlots >= min_of(2, kTurns * kWarpLeaves * kLeafChunks);
  static_assert(kWarpLeaves * kWK * kCS == kLeaves && (kWM * kMT) % kPer == 0, "warps and blocks take equal runs of leaves");
};

// What a warp does in turn `turn` of a cluster's run of tiles: `count` tiles from `tile` on.
template <class S>
struct ManyTurn {
  int base, tiles, tile, count;   // of the turn; of this warp
  K3_DEVICE ManyTurn(int begin, int end, int turn, int wm) {
    base = begin + turn * S::kWM * S::kMT;
    tiles = min_of(S::kWM * S::kMT, end - base);
    int first = tiles * wm / S::kWM;
    tile = base + first, count = tiles * (wm + 1) / S::kWM - first;
  }
};

// A warp's tiles leaf by leaf, chunk by chunk.
template <class S>
struct ManyRing : WarpRing<S, ManyRing<S>> {
  using WarpRing<S, ManyRing>::slots, WarpRing<S, ManyRing>::full;
  const uint4* w;        // of the warp's first leaf, tile 0
  int begin, end, wm;
  int turn = 0, leaf = 0, chunk = 0;   // of the next copy

  K3_DEVICE ManyRing(const uint4* w, int begin, int end, int wm, u8* smem) : WarpRing<S, ManyRing>(smem), w(w), begin(begin), end(end), wm(wm) {}
  K3_DEVICE void issue(int to) {   // lane 0
    if (begin + turn * S::kWM * S::kMT >= end) return;
    ManyTurn<S> now(begin, end, turn, wm);
    if (now.count == 0) return;    // only in the last turn
    barrier_expect(full + to, now.count * S::kTileChunk);
    for (int m = 0; m < now.count; ++m)
      bulk_copy(slots + to * S::kChunkBytes + m * S::kTileChunk,
                w + ((size_t(now.tile + m) * S::kLeaves + leaf) * S::kSteps + chunk * S::kChunkSteps) * kWarpSize, S::kTileChunk, full + to);
    if (++chunk == S::kLeafChunks) {
      chunk = 0;
      if (++leaf == S::kWarpLeaves) leaf = 0, ++turn;
    }
  }
};

// Leaves kFirst .. kFirst + kCount of the warp, neighbours first.
template <class S, int kFirst, int kCount>
K3_DEVICE void many_leaves(float (&c)[S::kMT][S::kNT][4], ManyRing<S>& ring, const uint4* x, int count) {
  if constexpr (kCount == 1) {
    wide_leaf<S, false>(c, ring, x + kFirst * S::kPairs * S::kNT * kWarpSize, count);
  } else {
    float right[S::kMT][S::kNT][4];
    many_leaves<S, kFirst, kCount / 2>(c, ring, x, count);
    many_leaves<S, kFirst + kCount / 2, kCount / 2>(right, ring, x, count);
    K3_UNROLL
    for (int i = 0; i < S::kMT * S::kNT * 4; ++i) (&c[0][0][0])[i] += (&right[0][0][0])[i];
  }
}

// epilogue(row, token, value) for every row and every token of kNT tiles; with kPer 2 epilogue(row, token, even, odd) of two tiles, row counted
// within either half. kClusters x kCS blocks, S::kSmem bytes. others: as in row_product.
template <class S, class Epilogue>
K3_DEVICE void many_product(const uint4* w, const bf16* x, int stride, u8* smem, Epilogue&& epilogue, int others = 0) {
  const int cluster = (int(blockIdx.x) - others) / S::kCS, rank = S::kCS > 1 ? int(cluster_rank()) : 0;
  const int wk = warp_id() % S::kWK, wm = warp_id() / S::kWK;
  const int begin = S::kUnits * cluster / S::kClusters * S::kPer, end = min_of(S::kTotal, S::kUnits * (cluster + 1) / S::kClusters * S::kPer);
  const int first_leaf = rank * S::kOwn + wk * S::kWarpLeaves;
  ManyRing<S> ring(w + size_t(first_leaf) * S::kSteps * kWarpSize, begin, end, wm, smem);
  u64* heard = (u64*)(smem + S::kHeardAt);
  ring.start();
  if constexpr (S::kCS > 1) inboxes_begin<1>(heard);
  grid_launch_next();
  grid_wait();
  wide_tokens<S, S::kOwn>(x + first_leaf / S::kOwn * S::kOwn * S::kSteps * 16, stride, (uint4*)smem);
  f32x4* inbox = (f32x4*)(smem + S::kInboxAt);   // [owned fragment][tile of a pair][source][lane]
#pragma unroll 1
  for (int turn = 0; begin + turn * S::kWM * S::kMT < end; ++turn) {
    const ManyTurn<S> now(begin, end, turn, wm);
    float c[S::kMT][S::kNT][4];
    if (now.count > 0) many_leaves<S, 0, S::kWarpLeaves>(c, ring, (const uint4*)smem + wk * S::kWarpLeaves * S::kPairs * S::kNT * kWarpSize, now.count);
    if constexpr (!S::kMeets) {
      static_assert(S::kMeets || S::kPer == 1, "tiles meet in the inbox");
      K3_UNROLL
      for (int m = 0; m < S::kMT; ++m) {
        if (m >= now.count) break;
        K3_UNROLL
        for (int n = 0; n < S::kNT; ++n)
          K3_UNROLL
          for (int i = 0; i < 4; ++i)
            epilogue((now.tile + m) * kTileRows + lane_id() / 4 + i / 2 * 8, n * kTokenTile + lane_id() % 4 * 2 + i % 2, c[m][n][i]);
      }
    } else {
      if constexpr (S::kCS > 1) {
        __syncwarp();
        if (turn == 0) cluster_wait();            // every block's inbox stands
        if (S::kAlias || turn > 0) {              // and nobody uses what lies in its place
          cluster_begin();
          cluster_wait();
        }
      } else __syncthreads();
      if (S::kCS > 1 && threadIdx.x == 0) {
        int tiles = 0;
        for (int job = rank; job < groups_of(now.tiles, S::kPer) * S::kNT; job += S::kCS) tiles += min_of(S::kPer, now.tiles - job / S::kNT * S::kPer);
        inbox_expect(heard, tiles * S::kSources * kStepBytes);
      }
      K3_UNROLL
      for (int m = 0; m < S::kMT; ++m) {
        if (m >= now.count) break;
        const int at = now.tile + m - now.base;
        K3_UNROLL
        for (int n = 0; n < S::kNT; ++n) {
          const int job = at / S::kPer * S::kNT + n;
          f32x4* to = inbox + ((job / S::kCS * S::kPer + at % S::kPer) * S::kSources + rank * S::kWK + wk) * kWarpSize + lane_id();
          const f32x4 v = {c[m][n][0], c[m][n][1], c[m][n][2], c[m][n][3]};
          if constexpr (S::kCS > 1) send4(to, job % S::kCS, v, heard);
          else *to = v;
        }
      }
      if constexpr (S::kCS > 1) inbox_wait(heard, turn & 1);
      else __syncthreads();
      for (int job = rank + warp_id() * S::kCS; job < groups_of(now.tiles, S::kPer) * S::kNT; job += S::kWarps * S::kCS) {
        const int unit = job / S::kNT, n = job % S::kNT;
        f32x4 v[S::kPer];
        K3_UNROLL
        for (int t = 0; t < S::kPer; ++t)
          v[t] = wide_tree<S::kSources>(inbox + (job / S::kCS * S::kPer + t) * S::kSources * kWarpSize + lane_id());
        K3_UNROLL
        for (int i = 0; i < 4; ++i) {
          const int row = (now.base / S::kPer + unit) * kTileRows + lane_id() / 4 + i / 2 * 8, token = n * kTokenTile + lane_id() % 4 * 2 + i % 2;
          if constexpr (S::kPer == 2) epilogue(row, token, (&v[0].x)[i], (&v[1].x)[i]);
          else epilogue(row, token, (&v[0].x)[i]);
        }
      }
    }
  }
}
