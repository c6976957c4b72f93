// What lies where in a block's shared memory, in a launch of so many rows and these kinds of phases.
#pragma once
#include "launch_choice.cuh"
#include "launch_product.cuh"
#include "launch_program.cuh"

//   kTokens_   rows of a launch at most, up to one token tile
//   kCluster_  blocks that share tiles
//   kTopK_     experts of a row; 0: there are none
//   kRing_     bytes of the ring at most: it gets what the rest of `kShared_` leaves
//   kWords_    of a page of a block's program
//   kFirstStreaming_  number of the first kind that has weights; -1: none has
template <int kTokens_, int kCluster_, int kTopK_, int kRing_, int kSlotBytes_, int kWords_, int kShared_, int kFirstStreaming_, class Kinds_>
struct LaunchShape {
  typedef Kinds_ Kinds;
  static constexpr int kTokens = kTokens_, kCluster = kCluster_, kTopK = kTopK_, kFirstStreaming = kFirstStreaming_;
  static constexpr int kMaxItems = max_of(1, kTokens * kTopK);
  typedef LaunchChoice<kMaxItems> Choice;
  static constexpr int kXBytes = Kinds::x_vectors(kTokens, kMaxItems) * 16;
  static constexpr int kPartial = kConsumers * kTokens * kSumStride;                   // floats of one turn of all warps
  static constexpr int kInbox = kCluster > 1 ? max_of(2 * kTokens, kCluster) * 8 : 0;   // floats of one turn of a group, of one tile
  static constexpr int kInboxes = kInboxTurns * kCluster + (kTopK ? 2 * 2 * 2 * kCluster : 0);   // of products' groups, then of experts': groups, turns, tiles
  static constexpr int kBarriers = kInboxes + (kTopK ? kConsumers * 2 * 2 : 0);               // of inboxes, then of experts' leaf sums
  static constexpr int kGeometryBytes = aligned16(Kinds::kCount * int(sizeof(LaunchGeometry)));
  static constexpr int kScaleBytes = Kinds::scale_bytes(kTokens);
  static constexpr int kPeerBytes = K3_RANKS > 1 ? aligned16(K3_RANKS * sizeof(LaunchPeer)) : 0;
  static constexpr int kCountsBytes = aligned16(kConsumers * sizeof(ConsumerCounts));
  static constexpr int kRest = kPeerBytes + kGeometryBytes + kScaleBytes + kXBytes + 2 * kPartial * 4 + kInboxes * kInbox * 4 + kBarriers * 8 + aligned16(sizeof(LaunchState))
                               + aligned16(sizeof(Choice)) + aligned16(sizeof(LaunchArgs)) + kCountsBytes + 2 * kWords_ * 4;
  static constexpr int kSlots = min_of(kRing_, kShared_ - kRest - 32) / (kSlotBytes_ + 20);   // 20: two barriers, and the copy it has
  typedef LaunchRing<kSlots, kSlotBytes_> Ring;
  static constexpr int kXAt = Ring::kBytes, kPartialAt = kXAt + kXBytes, kInboxAt = kPartialAt + 2 * kPartial * 4;
  static constexpr int kBarrierAt = kInboxAt + kInboxes * kInbox * 4, kHeardAt = kBarrierAt + Ring::kBarrierBytes, kStateAt = aligned16(kHeardAt + kBarriers * 8);
  static constexpr int kChoiceAt = kStateAt + aligned16(sizeof(LaunchState)), kArgsAt = kChoiceAt + aligned16(sizeof(Choice)), kCountsAt = kArgsAt + aligned16(sizeof(LaunchArgs));
  static constexpr int kGeometryAt = kCountsAt + kCountsBytes, kScaleAt = kGeometryAt + kGeometryBytes, kPeersAt = kScaleAt + kScaleBytes, kProgramAt = kPeersAt + kPeerBytes;
  typedef LaunchPages<kWords_, kProgramAt> Pages;
  static constexpr int kSmem = kProgramAt + Pages::kBytes;
  static_assert(kTokens <= min_of(kTokenTile, kMaxRows) && kSlots >= Kinds::held_slots() && kSmem <= kShared_ && kSlotBytes_ % 16 == 0, "one tile of tokens, and room for a ring");
};
