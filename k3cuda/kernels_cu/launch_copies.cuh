// What a phase of the single launch brings into a block's ring, and the producers that bring it.
#pragma once
#include "launch_ring.cuh"

// The copies of a phase, for the producers: `count` of them, of `bytes` at most, as the window counts, in pieces of `each`. What they are of: tiles of the phase's
// program; pairs of tiles of chosen experts, counted over the list's entries; `per` entries of the list at a time, leaf by leaf; nothing, a slot alone. The first `skipped` of these nobody wants either.
enum LaunchCopies { kTilesOfPhase, kPairsOfEntries, kEntries, kEmptySlots };
struct LaunchCopy { const u8* from; const u32* entries; int parts; };   // of kEntries: where its leaf begins, and its entries; how many pieces it has
struct LaunchSource {
  LaunchCopies which;
  int count, skipped;
  u32 bytes, each;
  const u8* weights;
  const u32* list;                     // tiles, or entries
  int first, pairs;                    // of kPairsOfEntries: the first unit, and pairs of an expert
  int entries, per, of_leaf, tile_shift;   // of kEntries: how many there are, those of a copy, copies of a leaf, logarithm of an entry's pieces
  u32 unit_copies, leaf_shift;         // of a unit; logarithm of those of a chunk
  u32 expert_bytes, tile_bytes, leaf_bytes, chunk_bytes;   // from expert to expert of kEntries; from tile to tile; from copy to copy of a chunk, or leaf to leaf; from chunk to chunk

  // Where copy `i` lies.
  K3_DEVICE LaunchCopy copy(u32 i) const {
    if (which == kEmptySlots) return {};
    if (which == kEntries) {
      const int leaf = int(i) / of_leaf, first = (int(i) - leaf * of_leaf) * per;
      return {weights + leaf * leaf_bytes, list + first, min_of(per, entries - first) << tile_shift};
    }
    const u32 unit = i / unit_copies, j = i - unit * unit_copies;
    u32 tile;
    if (which == kTilesOfPhase) tile = list[unit];
    else {
      const u32 u = first + unit, e = u / pairs;
      tile = (list[e] & 0xffff) * pairs + (u - e * pairs);
    }
    return {weights + size_t(tile) * tile_bytes + (j & ((1u << leaf_shift) - 1)) * leaf_bytes + (j >> leaf_shift) * chunk_bytes, nullptr, 1};
  }
  K3_DEVICE const u8* piece(const LaunchCopy& c, int j) const {
    return which == kEntries ? c.from + size_t(c.entries[j >> tile_shift] & 0xffff) * expert_bytes + (j & ((1 << tile_shift) - 1)) * tile_bytes : c.from;   // entry_expert
  }
};

// A producer, one warp of kProducers. A lane owns a slot of the ring, for all of the launch, and does nothing but wait for it and fill it: 120 instructions a
// copy, one copy behind the other, made 0.3 microseconds of three warps, which was the stream's pace. Lanes work out side by side where the copies of the next
// round lie; who waits sleeps at the barrier of the copy that comes first, and takes no issue slots from the warps that expand and multiply.
template <class Ring>
struct LaunchProducer {
  Ring& ring;
  const Watch& watch;
  u32 number;                   // of the producers
  u32 window;                   // bytes of all of them in flight at most
  u32 issued = 0, choices = 0;  // copies of the phases before this one; choices of experts that it has come by
  LaunchSource source = {};     // of the phase that it is in
  static_assert(Ring::kSlots <= kProducers * kWarpSize, "a lane has a slot");

  // issued_copy(i, bytes) behind each of this warp's.
  template <class Issued>
  K3_DEVICE void copies(int phase, Issued&& issued_copy) {
    const LaunchSource& s = source;
    constexpr int kSlots = Ring::kSlots;
    const int lane = lane_id(), slot = lane * kProducers + int(number), begin = int(issued % kSlots), back = max_of(1, int(window / s.bytes));
    const u32 early = __ballot_sync(kFullWarp, slot >= begin);   // whose copies come first in each round
    int i = slot < kSlots ? slot - begin + (slot < begin ? kSlots : 0) : s.count;
    LaunchCopy own = {}, next = {};
    if (i < s.count) own = s.copy(i);
#pragma unroll 1
    for (; __any_sync(kFullWarp, i < s.count); i += kSlots, own = next) {
      if (i + kSlots < s.count) next = s.copy(i + kSlots);
      const u32 n = issued + i, capped = n - back, at = capped % kSlots;   // `capped` has landed when this one is issued
      const u32 used = n / kSlots & 1 ^ 1, landed = capped / kSlots & 1;
      bool waits = i < s.count;
      Spin spin;
#pragma unroll 1
      for (u32 all; (all = __ballot_sync(kFullWarp, waits)) != 0;) {
        if (lane == first_lane(all & early ? all & early : all)) {
          if (int(capped) >= 0 && ring.issued[at] == capped + 1) barrier_try(ring.full + at, landed);
          if (n >= u32(kSlots)) barrier_try(ring.empty + slot, used);
        }
        __syncwarp();
        bool ready = waits && (n < u32(kSlots) || barrier_test(ring.empty + slot, used));
        if (ready && int(capped) >= 0) {
          const int ahead = int(ring.issued[at] - (capped + 1));   // its slot has had another one since, or has not had it yet
          ready = ahead > 0 || ahead == 0 && barrier_test(ring.full + at, landed);
        }
        if (ready) {
          barrier_expect(ring.full + slot, own.parts * s.each);
#pragma unroll 1
          for (int j = 0; j < own.parts; ++j) bulk_copy(ring.slots + slot * Ring::kSlotBytes + j * s.each, s.piece(own, j), s.each, ring.full + slot);
          ring.issued[slot] = n + 1;
          if (i < s.skipped) barrier_arrive_times(ring.empty + slot, kConsumers);
          issued_copy(i, own.parts * s.each);
          waits = false;
        }
        if (!__any_sync(kFullWarp, ready)) spin.turn(watch, kWaitRoom, phase, n, K3_PRODUCER_LIMITS);
      }
    }
    issued += s.count;
  }
};
