// What the single launch is given, which kinds of phases it has, and what its consumers keep from one phase to the next.
#pragma once
#include "launch_fields.cuh"

template <class A, class B> constexpr bool is_same = false;
template <class A> constexpr bool is_same<A, A> = true;
constexpr int log2_of(int n) { return n > 1 ? 1 + log2_of(n / 2) : 0; }

// What runs a kind, and its sizes: itself where it has no others.
template <class P> typename P::Code code_of(typename P::Code*);
template <class P> P code_of(...);
template <class P> constexpr auto geometry_of(int tokens, int) -> decltype(P::geometry(tokens)) { return P::geometry(tokens); }
template <class P> constexpr LaunchGeometry geometry_of(int, long) { return {}; }

// Bytes of shared memory that a product keeps apart for what it scales rows by.
template <class P> constexpr auto scale_bytes_of(int tokens, int) -> decltype(P::In::scale_bytes(tokens)) { return P::In::scale_bytes(tokens); }
template <class P> constexpr int scale_bytes_of(int, long) { return 0; }

// Slots of the ring that a kind needs at once.
template <class P> constexpr auto held_slots_of(int) -> decltype(P::kHeldSlots) { return P::kHeldSlots; }
template <class P> constexpr int held_slots_of(long) { return 0; }

// Kinds of phases, by their place in the program's words. Those of one code have the number of the first of them.
template <class... P>
struct LaunchKinds {
  static constexpr int kCount = sizeof...(P);
  static constexpr int x_vectors(int tokens, int items) {
    int most = 0;
    ((most = max_of(most, P::x_vectors(tokens, items))), ...);
    return most;
  }
  static constexpr int scale_bytes(int tokens) {
    int most = 0;
    ((most = max_of(most, scale_bytes_of<P>(tokens, 0))), ...);
    return most;
  }
  static constexpr int held_slots() {
    int most = 4;
    ((most = max_of(most, held_slots_of<P>(0))), ...);
    return most;
  }
  template <class Code>
  static constexpr int number_of() {
    int at = 0, found = -1;
    ((found = found < 0 && is_same<decltype(code_of<P>(nullptr)), Code> ? at : found, ++at), ...);
    return found;
  }
  template <class F>
  static K3_DEVICE void visit(int code, F&& f) { visit_from<0, F, P...>(code, f); }
  template <int kAt, class F, class Own, class... More>
  static K3_DEVICE void visit_from(int code, F& f) {
    typedef decltype(code_of<Own>(nullptr)) Code;
    if constexpr (number_of<Code>() == kAt)
      if (code == kAt) {
        f(Code{});
        return;
      }
    if constexpr (sizeof...(More) > 0) visit_from<kAt + 1, F, More...>(code, f);
  }
  // One thread of each kind writes down its sizes.
  static K3_DEVICE void describe(LaunchGeometry* to, int thread, int tokens) {
    int at = 0;
    ((at == thread ? (void)(to[at] = described<P>(tokens)) : (void)0, ++at), ...);
  }
  template <class Own>
  static constexpr LaunchGeometry described(int tokens) {
    LaunchGeometry g = geometry_of<Own>(tokens, 0);
    g.code = number_of<decltype(code_of<Own>(nullptr))>();
    return g;
  }
};

// Of a consumer warp, between phases: where the next one's words stand and those of the last one that it began, the block's copies before it, units
// that its groups finished with other blocks, the next one's number, and whether that is a product whose input is here.
struct ConsumerCounts { u32 at, began, copies, turns, expert_turns; int phase, has_input; };

// What a kind of phase counts on: its kCounting, copies alone where it has none.
template <class K> constexpr LaunchCounting counting_of(decltype(K::kCounting)*) { return K::kCounting; }
template <class K> constexpr LaunchCounting counting_of(...) { return kCountsCopies; }

// Whether a kind has something to fetch ahead.
template <class K, class Block, class Producer> constexpr auto has_weights(int) -> decltype(&K::template produce<Block, Producer>, true) { return true; }
template <class K, class Block, class Producer> constexpr bool has_weights(long) { return false; }

constexpr int kReceiveBatch = K3_RECEIVE_BATCH;   // vectors that a thread asks for at once; launch_source.py defines it

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
  const LaunchStamps* stamps;   // null: not kept
  LaunchCounts* counts;
  const LaunchPeer* peers;   // [rank]; null: a rank alone
  Watch watch;
  // block_rows: of a closed block; first_window: of phases of kind S::kFirstStreaming
  int phases, clearings, words, rows, block_rows, slot_vectors, record_vectors, window, first_window;
  float situ_beta, situ_linear_beta, routed_scale, norm_eps;
  LaunchLink links[kMaxKinds];
  int rank;                // this one's number, where there are several
};
