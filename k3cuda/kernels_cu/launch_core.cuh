// Many phases in one launch: a persistent block an SM works off its program, data made by k3cuda/block_program.py. docs/megakernel.md.
//
// Program of a block, 32-bit words, phase after phase in pages (launch_program.cuh; ProgramPhase in launch_fields.cuh): kind | extra << 8 | units << 16; the slots that it reads,
// writes and clears, 4 bits each; how many phases must have been cleaned up before it reads or writes, and which kinds' results lie in what it
// clears; then the units: tiles, or slices of rows. kNoSlot: the launch's input, its result, nothing to clear.
#pragma once
#include "launch_experts.cuh"
#include "launch_janitor.cuh"
#include "launch_kda.cuh"
#include "launch_mla.cuh"
#include "launch_normed.cuh"
#include "launch_ranks.cuh"
#include "launch_shape.cuh"
#include "launch_step.cuh"

// All that it knows lies in shared memory.
template <class S>
struct LaunchBlock : LaunchRanks<S> {
  using LaunchRanks<S>::a, LaunchRanks<S>::smem;
  typename S::Ring ring;
  LaunchState& state;
  typename S::Pages pages;
  ConsumerCounts counts = {};
  Me me;
  int rank;   // in its cluster

  typedef S Shape;
  K3_DEVICE LaunchBlock(u8* memory)
      : LaunchRanks<S>{*(const LaunchArgs*)(memory + S::kArgsAt), memory}, ring(memory, (u64*)(memory + S::kBarrierAt)), state(*(LaunchState*)(memory + S::kStateAt)), pages{memory}, rank(S::kCluster > 1 ? my_cluster_rank() : 0) {}

  K3_DEVICE void begin(const LaunchArgs& args) {   // which thread this is is asked for again and again: else it is kept for all of the launch
    for (int i = Me().thread(); i < int(sizeof(LaunchArgs) / 4); i += kLaunchThreads) ((u32*)(smem + S::kArgsAt))[i] = ((const u32*)&args)[i];
    __syncthreads();
    this->find_peers();
    pages.begin(own_words(), a.words);
    S::Kinds::describe((LaunchGeometry*)(smem + S::kGeometryAt), Me().thread(), S::kTokens);
    if (const int row = Me().thread(); row < S::kTokens) {
      int place = a.logit_rows ? -1 : row;
#pragma unroll 1
      for (int i = 0; i < a.rows; ++i)
        if (a.logit_rows && a.logit_rows[i] == row) place = i;
      state.place[row] = place;
    }
    if (const Me own; own.warp == 0) {
      u32 live = __ballot_sync(kFullWarp, own.lane < a.rows && (!a.row_slot || a.row_slot[own.lane < a.rows ? own.lane : 0] >= 0));
      int rows = 0;
      for (; live; live >>= 1) ++rows;
      if (own.lane == 0) state.live = rows;
    }
    if (Me().thread() == 0) {
      ring.init();
      for (int i = 0; i < S::kBarriers; ++i) barrier_init(heard(i), i < S::kInboxes ? 1 : kConsumers);
      barrier_fence_init();
      state.received = state.cleaned = state.chosen = state.ended = state.late.what = 0;
#if K3_STAMPED
      state.stamps = a.stamps ? *a.stamps : LaunchStamps{};
      compare_clocks(0);
#endif
      for (int i = 0; i < kProducers; ++i) state.produced[i] = S::Pages::kFirst;
      ((LaunchArgs*)(smem + S::kArgsAt))->watch.late = &state.late;
    }
    __syncthreads();
    this->enter();
    if constexpr (S::kCluster > 1) cluster_begin(), cluster_wait();   // every block's inboxes stand
  }

  K3_DEVICE const u32* own_words() const { return a.programs + size_t(rank_block()) * a.words; }

  K3_DEVICE void produce() {
    LaunchProducer<typename S::Ring> producer{ring, a.watch, u32(me.warp - kConsumers), u32(a.window)};
    u32 next = S::Pages::kFirst;
    u64 weights = a.weights[0];
    for (int phase = 0; phase < a.phases; ++phase) {
      const u32 at = pages.turned(next, a.watch, phase);
      __syncwarp();
      state.produced[producer.number] = at;
      const ProgramPhase p(pages.words(at));
      const u8* w = (const u8*)weights;
      if (phase + 1 < a.phases) weights = a.weights[phase + 1];   // under the copies of this phase
      producer.window = p.kind == S::kFirstStreaming ? a.first_window : a.window;
      const u32 before = producer.issued;
      stamp(phase, kProduces, lane_id() == 0);
      producer.source.count = producer.source.skipped = 0;
      if (geometry(p).leaves) produce_product(*this, producer, p, w);
      else if (geometry(p).slices) {
        if (producer.number == 0) fetch_mix_ahead(*this, p, w);
      }
      else S::Kinds::visit(geometry(p).code, [&](auto kind) {
        if constexpr (has_weights<decltype(kind), LaunchBlock, decltype(producer)>(0)) decltype(kind)::produce(*this, producer, p, w, phase);
      });
      u32 brought = 0;   // by this lane
      if (producer.source.count)
        producer.copies(phase, [&](int i, u32 bytes) {
          stamp(phase, kFirstCopy, i == 0);
          brought += bytes;
          issued(phase, bytes);
        });
      copied(phase, brought);
      if (producer.issued > before) stamp(phase, kLastCopy, lane_id() == 0);
      next = state.produced[producer.number], next = pages.behind(ProgramPhase(pages.words(next)), next);   // found anew: not kept meanwhile
    }
  }

  // A test's delays: up to 4 microseconds for a block or for single warps of it, other ones at every turn of the clock.
  K3_DEVICE void stress(int phase) const {
#ifdef K3_STRESS
    const u32 h = random_of(phase);
    if (h >> 30 == 0) pause_ns(h >> 8 & 0xfff);
    else if (h >> 30 == 1 && (h >> 20 & 15) == u32(me.warp)) pause_ns(h & 0xfff);
#endif
  }
  // The same inside a phase, for single warps.
  K3_DEVICE void stress(int phase, u32 turn) const {
#ifdef K3_STRESS
    const u32 h = random_of(u32(phase) ^ turn * 0x27d4eb2fu ^ u32(me.warp) * 0x165667b1u);
    if (h >> 29 == 0) pause_ns(h & 0xfff);
#endif
  }
  static K3_DEVICE u32 random_of(u32 v) {
    v = (u32(device_ns()) >> 12) * 0x9e3779b1u ^ (blockIdx.x * 0x85ebca6bu) ^ (v * 0xc2b2ae35u);
    return (v ^ v >> 15) * 0x2c1b3c6du;
  }

  // The last time of those who are `mine`.
  K3_DEVICE void stamp(int phase, LaunchStamp which, bool mine = threadIdx.x == 0) const {
    if (K3_STAMPED && mine)
      if (u64* to = stamped(phase)) atomicMax(to + which, own_clock());
  }
  // By one thread, when the launch begins (0) and when it ends (1).
  K3_DEVICE void compare_clocks(int when) const {
#if K3_STAMPED
    if (!state.stamps.phases) return;
    u64* to = state.stamps.clocks + (rank_block() * 2 + when) * 2;
    to[0] = clock_ns(), to[1] = own_clock();
    if (when == 0) state.began = to[1];
#endif
  }
  K3_DEVICE void issued(int phase, u32 bytes) const {
#if K3_STAMPED
    if (const u64 bin = (own_clock() - state.began) / kIssueCycles; stamped(phase))
      atomicAdd(state.stamps.issued + size_t(rank_block()) * kIssueBins + (bin < kIssueBins ? int(bin) : kIssueBins - 1), bytes);
#endif
  }
  // By a thread that has brought so many bytes more.
  K3_DEVICE void copied(int phase, u32 bytes) const {
    if (K3_STAMPED && bytes)
      if (u64* to = stamped(phase)) atomicAdd(to + kCopied, u64(bytes));
  }
  K3_DEVICE u64* stamped(int phase) const {
#if K3_STAMPED
    const LaunchStamps& s = state.stamps;
    if (u32(phase - s.first) < u32(s.phases)) return s.words + (size_t(rank_block()) * s.phases + (phase - s.first)) * kStamps;
#endif
    return nullptr;
  }

  // ---- what kinds of phases are made of ----
  // The phase that this warp began last, and its number while it works on what is not a product: found anew where a kind wants all registers.
  K3_DEVICE ProgramPhase now() const { return ProgramPhase(pages.words(kept().began)); }
  K3_DEVICE int phase_now() const { return kept().phase - 1; }
  K3_DEVICE Consumers team() const { return {me}; }
  K3_DEVICE int part() const { return rank; }
  K3_DEVICE const LaunchLink& link(const ProgramPhase& p) const { return a.links[p.kind]; }
  K3_DEVICE const LaunchGeometry& geometry(const ProgramPhase& p) const { return ((const LaunchGeometry*)(smem + S::kGeometryAt))[p.kind]; }
  K3_DEVICE uint4* x() const { return (uint4*)(smem + S::kXAt); }
  K3_DEVICE float* partial(u32 turn) const { return (float*)(smem + S::kPartialAt) + turn % 2 * S::kPartial; }
  K3_DEVICE float* inbox(int i) const { return (float*)(smem + S::kInboxAt) + i * S::kInbox; }
  K3_DEVICE u64* heard(int i) const { return (u64*)(smem + S::kHeardAt) + i; }
  // Of the two buffers of a group's leaf sums that of a turn: all are there; all have been added.
  K3_DEVICE u64* stored(int group, u32 turn) const { return heard(S::kInboxes) + (group * 2 + turn % 2) * 2; }
  K3_DEVICE u64* added(int group, u32 turn) const { return stored(group, turn) + 1; }
  K3_DEVICE ConsumerCounts& kept() const { return ((ConsumerCounts*)(smem + S::kCountsAt))[not_before_here(me.warp)]; }
  K3_DEVICE typename S::Choice& choice() const { return *(typename S::Choice*)(smem + S::kChoiceAt); }

  // Row 0 of field `i` that a phase reads.
  K3_DEVICE const uint4* input(const ProgramPhase& p, int i) const {
    return (p.in(i) == kNoSlot ? a.input : a.exchange + size_t(p.in(i)) * a.slot_vectors) + link(p).in[i].at;
  }
  // A phase's first field into shared memory: of each of `rows` rows `per` vectors from `first` on, at most kMost in all; keep(row, vector, value).
  template <int kMost, class Keep>
  K3_DEVICE void receive(const ProgramPhase& p, int phase, int rows, int per, int first, Keep&& keep) {
    constexpr int kAll = kConsumers * kWarpSize, kBatch = max_of(1, min_of(kReceiveBatch, (kMost + kAll - 1) / kAll));
    const uint4* from = input(p, 0) + first;
    const int row = link(p).in[0].row;
    auto before_keep = [] { warps_sync(kAllConsumers, kAll); };   // all are finished with the phase before
    receive_vectors<kBatch>(me.thread(), kAll, rows * per, a.watch, phase, [&](int i) { return from + i / per * row + i % per; }, before_keep,
                            [&](int i, const uint4& v) { keep(i / per, i % per, v); });
    warps_sync(kAllConsumers, kAll);
  }
  // By all consumers, when the last of them has read the input, or that of a unit.
  K3_DEVICE void arrived(int phase) const {
    stamp(phase, kInputHere);
  }
  // By all consumers: nobody will read the input again.
  K3_DEVICE void received(int phase) const {
    arrived(phase);
    finished(phase);
  }
  K3_DEVICE void finished(int phase) const {
    if (me.thread() == 0) state.received = phase + 1;
  }
  K3_DEVICE uint4* slot_out(const ProgramPhase& p) const {
    const u32 slot = p.out();
    return slot == kNoSlot ? a.result : a.exchange + size_t(slot) * a.slot_vectors;
  }
  // Vector `column` of a field of result row `row`, which `lanes` lanes hold. Rows of a tile's padding end here.
  K3_DEVICE void publish(const ProgramPhase& p, int phase, int row, int column, const uint4& v, int lane, int field = 0, int lanes = 8) const {
    const LaunchLink& to = link(p);
    const LaunchField& f = to.out[field];
    if (column >= f.width) return;
    if (K3_PROBED && a.record && lane == 0) a.record[size_t(phase) * a.record_vectors + row * to.record_row + f.own + column] = v;
    if constexpr (K3_RANKS > 1) {
#pragma unroll 1
      for (int i = lane; i < f.copies; i += lanes) store_exchange(this->made(p, i, row) + f.at + column, v);
      return;
    }
    uint4* slot = slot_out(p) + row * to.row + f.at;
#pragma unroll 1
    for (int copy = lane; copy < f.copies; copy += lanes) {
      const int place = copy * f.width + column;
      if (place < f.limit) store_exchange(slot + place, v);
    }
  }

  // What a kind of phase counts on from the one before it; others keep no registers for it.
  K3_DEVICE ConsumerCounts& kept_anew(const Me& again) const { return ((ConsumerCounts*)(smem + unknown_zero() + S::kCountsAt))[again.warp]; }   // else its address is kept
  template <class K>
  K3_DEVICE void begin_counting() {
    constexpr LaunchCounting kHow = counting_of<K>(nullptr);
    if constexpr (kHow == kCountsNothing) return;
    const ConsumerCounts& from = kept_anew(Me());
    if constexpr (kHow != kCountsExpertTurns) counts.copies = from.copies;
    if constexpr (kHow == kCountsTurns) counts.turns = from.turns;
    if constexpr (kHow == kCountsExpertTurns) counts.expert_turns = from.expert_turns;
  }
  template <class K>
  K3_DEVICE void end_counting() {
    constexpr LaunchCounting kHow = counting_of<K>(nullptr);
    if constexpr (kHow == kCountsNothing) return;
    __syncwarp();
    const Me again;
    if (again.lane) return;
    ConsumerCounts& to = kept_anew(again);
    if constexpr (kHow != kCountsExpertTurns) to.copies = counts.copies;
    if constexpr (kHow == kCountsTurns) to.turns = counts.turns;
    if constexpr (kHow == kCountsExpertTurns) to.expert_turns = counts.expert_turns;
  }

  // A whole warp: the block's copies before this phase, which has `n`.
  K3_DEVICE u32 take_copies(u32 n) const {
    const Me again;
    ConsumerCounts& at = kept_anew(again);
    const u32 before = at.copies;
    __syncwarp();
    if (again.lane == 0) at.copies = before + n;
    return before;
  }

  K3_DEVICE void consume(const u32* at, int phase) {
    const ProgramPhase p(at);
    stress(phase);
    if (p.units) {
      stamp(phase, kBegins);
      for (Spin spin; state.cleaned < p.needs();) spin.turn(a.watch, kWaitClean, phase, 0);
      stamp(phase, kSlotClean);
      S::Kinds::visit(geometry(p).code, [&](auto kind) {
        begin_counting<decltype(kind)>();
        decltype(kind)::consume(*this, p, phase);
        end_counting<decltype(kind)>();
      });
      if (!geometry(ProgramPhase(at)).leaves) stamp(phase, kUnitsDone, me.lane == 0);
    } else if (me.thread() == 0) state.received = phase + 1;
  }
  // What is left of a product's phase when its input is here.
  K3_DEVICE void units() const {
    LaunchUnits<LaunchBlock>(*this).run();
    stamp(kept().phase, kUnitsDone, me.lane == 0);
  }
};

// Kinds of phases must not keep registers of one another's: each begins with a block that the compiler knows nothing of.
template <class S>
K3_DEVICE void launch_consume(u8* smem) {
  if (lane_id() == 0) *(ConsumerCounts*)(smem + S::kCountsAt + warp_id() * sizeof(ConsumerCounts)) = {S::Pages::kFirst, S::Pages::kFirst};
  __syncwarp();
#pragma unroll 1
  for (;;) {   // a turn a phase; a product's units have one of their own, so that they keep no registers through all kinds of inputs
    LaunchBlock<S> block(smem + unknown_zero());
    const int phase = block.kept().phase;
    if (phase >= block.a.phases) return;
    if (block.kept().has_input) {
      block.units();
      __syncwarp();
      if (const Me again; again.lane == 0) block.kept_anew(again).has_input = 0, ++block.kept_anew(again).phase;
    } else {
      const u32 at = block.pages.turned(block.kept().at, block.a.watch, phase);
      const u32* words = block.pages.words(at);
      const ProgramPhase p(words);
      const bool is_product = p.units && block.geometry(p).leaves;
      __syncwarp();
      if (block.me.lane == 0) {
        ConsumerCounts& k = block.kept();
        k.began = at, k.at = block.pages.behind(p, at), k.has_input = is_product, k.phase = phase + !is_product;
      }
      __syncwarp();
      block.consume(words, phase);
    }
    __syncwarp();
  }
}

template <class S>
K3_DEVICE void launch_run(const LaunchArgs& a, u8* smem) {
  LaunchBlock<S>(smem).begin(a);
  if (Me().warp == kJanitor) {
    tidy(LaunchBlock<S>(smem + unknown_zero()));   // found anew: not kept from the start
#if K3_STAMPED
    if (Me().lane == 0) LaunchBlock<S>(smem).compare_clocks(1);
#endif
  } else {
    if (Me().warp < kConsumers) launch_consume<S>(smem);
    else LaunchBlock<S>(smem + unknown_zero()).produce();
    __syncwarp();
    if (Me().lane == 0) atomicAdd(&LaunchBlock<S>(smem + unknown_zero()).state.ended, 1u);
  }
  if constexpr (kRanksAway) LaunchBlock<S>(smem).leave();
  if constexpr (S::kCluster > 1) {
    __syncwarp();
    cluster_arrive(), cluster_wait();   // nobody sends to a block that has ended
  }
}
