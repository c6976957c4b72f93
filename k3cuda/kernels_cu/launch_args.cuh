// What the single launch is given, which kinds of phases it has, and what its consumers keep from one phase to the next.
#pragma once
#include "launch_fields.cuh"

// Kinds of phases, by their place in the program's words.
template <class... P> struct LaunchKinds;
template <> struct LaunchKinds<> {
  static constexpr int x_vectors(int, int) { return 0; }
  template <int kAt, class F> static K3_DEVICE void visit(int, F&&) {}
};
template <class P, class... More>
struct LaunchKinds<P, More...> {
  static constexpr int x_vectors(int tokens, int items) { return max_of(P::x_vectors(tokens, items), LaunchKinds<More...>::x_vectors(tokens, items)); }
  template <int kAt = 0, class F> static K3_DEVICE void visit(int kind, F&& f) {
    if (kind == kAt) f(P{});
    else LaunchKinds<More...>::template visit<kAt + 1>(kind, f);
  }
};

// Of a consumer warp, between phases: where the next one's words stand and those of the last one that it began, the block's copies before it, units
// that its groups finished with other blocks.
struct ConsumerCounts { u32 at, began, copies, turns, expert_turns; };

// What a kind of phase counts on: its kCounting, copies alone where it has none.
template <class K> constexpr LaunchCounting counting_of(decltype(K::kCounting)*) { return K::kCounting; }
template <class K> constexpr LaunchCounting counting_of(...) { return kCountsCopies; }

constexpr int kReceiveBatch = K3_RECEIVE_BATCH;   // vectors that a thread asks for at once; launch_source.py defines it

// Of a phase in a block: it begins, its input is here, its units are done, its slot was clean; what it cleared is clean everywhere; the producer came to it
// and issued its last copy. kStamps is launch_source.py's STAMPS.
enum LaunchStamp { kBegins, kInputHere, kUnitsDone, kSlotClean, kCleared, kProduces, kLastCopy, kStamps };

constexpr int kMaxKinds = 32;
struct LaunchArgs {
  const u64* weights;      // [phase]: where its packed weights lie; a LaunchTokens, LaunchMix, KdaMix, LaunchMla, LaunchChoice or the router's bias of other phases
  const u32* programs;     // [block][words], whole pages
  const int* row_slot;     // [rows], -1 pads, behind all other rows; null: there is no padding
  const int* logit_rows;   // [rows]: row i of the logits is of this row of the step, -1: of none; null: of row i
  const uint4* input;      // [rows][row of the first phase], BF16 without kNotThere
  uint4* exchange;         // [slot][slot_vectors], all kNotThere between launches
  uint4* result;           // [rows][row of the last phase]: of a step its logits
  uint4* record;           // [phase][row][vector], what every phase makes; null: not kept
  u64* stamps;             // [block][phase][kStamps] nanoseconds (LaunchStamp); null: not kept
  LaunchCounts* counts;
  const LaunchPeer* peers;   // [rank]; null: a rank alone
  Watch watch;
  u64 meet_ns;             // that ranks in launches of their own wait for one another when they begin, at most
  // block_rows: of a closed block; first_window: of phases of kind S::kFirstStreaming
  int phases, clearings, words, rows, block_rows, slot_vectors, record_vectors, window, first_window, prefetch;
  float situ_beta, situ_linear_beta, routed_scale, norm_eps;
  LaunchLink links[kMaxKinds];
  int rank;                // this one's number, where there are several
};
