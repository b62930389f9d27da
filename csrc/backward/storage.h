// The shared memory of the main kernel: buffers, and the barriers that say when each is full or empty.
#pragma once

#include <type_traits>

#include "../device/barrier.h"
#include "../device/ring.h"
#include "../placement/work_tile.h"
#include "config.h"

namespace dash_attn::backward {

constexpr int kNoMoreWork = -2;   // value of kv_tile of a work tile
constexpr int kNoMoreTiles = -1;  // value of dq_tile of a planned step
constexpr int kNoScale = -1;      // value of scale_tile of a partial that stays in fp32

// A step as the planner announces it to the loader and an adder. It is aligned so that a vector load of a step reads no
// word of the step before, which the planner may be writing.
struct alignas(16) PlannedStep {
  int query_tile;
  int dq_tile;  // its index among the query tiles of all heads, or kNoMoreTiles
  int rank;     // of the KV tile in the sum of dQ there
  int packed;   // the query head, shifted by kHeadShift, and the flags below

  static constexpr int kIsLast = 1, kIsFirst = 2;  // of its work tile; kIsFirst is set only if dQ may be finished
  static constexpr int kNeedsMasking = 4;
  static constexpr int kIsOrdered = 8;    // whether its partial waits for those of lower rank
  static constexpr int kFinishesDq = 16;  // whether it finishes dQ
  static constexpr int kIsOddSum = 32;    // among the sums that are loaded into its buffer for that
  static constexpr int kHeadShift = 6;

  __device__ __forceinline__ bool is(int flag) const { return packed & flag; }
  __device__ __forceinline__ int head() const { return packed >> kHeadShift; }
};

// What a consumer needs to know about a step.
struct StepTile {
  int query_tile;
  int needs_masking;
};

// Whether a step's partial finishes dQ (finish_dq.h) and, if so, whether other partials are in the sum. Their sum is
// loaded into its buffer, and this gives the parity of sum_full then.
enum class DqSum : uint8_t { kNotLast, kAlone, kEvenSum, kOddSum };

// The other partials of an order-free sum.
struct OtherPartials {
  uint16_t count : 15;      // suffices for a sum of integers: kMaxKeys in tiles of 80 keys or more
  uint16_t have_marks : 1;  // whether rows are marked as not finite, maybe of other tiles
};

template <typename Variant, bool kIsWide = Variant::kWide>
struct alignas(1024) SharedStorage {
  using Element = typename Variant::Element;
  static constexpr int kStages = Variant::kStages;

  // K of a work tile, and V until the consumers have it in registers. The two swap buffers from work tile to work tile,
  // so that the next K is loaded while this one is used.
  Element kv[2][Variant::kKey * Variant::kHeadDim];
  Element q[kStages][Variant::kQuery * Variant::kHeadDim];
  Element dout[kStages][Variant::kQuery * Variant::kHeadDim];
  // (block of keys, query, key): dS, keys contiguous. After a work tile dK is staged here, and dV too with kStageInDs.
  Element ds[kStages][Variant::kQuery * Variant::kKey];
  float dq[kStages][Variant::kDqTileFloats];  // in the order of dq_layout.h; without kStageInDs dV is staged here
  float lse[kStages][Variant::kQuery];        // base 2
  float delta[kStages][Variant::kQuery];      // D = rowsum(dO * O)
  StepTile step[kStages];
  float slope[Variant::Score::kMayHaveSlopes ? kStages : 1];  // the ALiBi slope of the step's head
  int head[Variant::Score::kDrops ? kStages : 1];             // the head of the step, for its bits of dropout
  // In clusters the number that the first CTA sends. With divided KV tiles, and then without clusters, the leader's own
  // variable: other CTAs must take all numbers below it before this CTA takes one (whole_tiles.h).
  static constexpr int kNumberSlots = Variant::kClusterSize > 1 ? Variant::kWorkSlots : 1;
  union {
    int work_number[kNumberSlots];
    int others_until;
  };
  std::conditional_t<Variant::kMayFinishDq && Variant::kOrderFree, OtherPartials, Empty> others[kStages];
  // For order-free sums: the scales of the tile's rows, whose units the partial is rounded to, and the tile's number,
  // or kNoScale.
  alignas(16) uint8_t scales[Variant::kScaleSlots][Variant::kScaleBytes ? Variant::kQuery : 16];
  int scale_tile[Variant::kScaleSlots];
  DqSum dq_sum[Variant::kScaleSlots];
  uint8_t sum_parities;  // the planner's: for each buffer of dQ, whether the next sum loaded there is an odd one
  PlannedStep plan[Variant::kPlanSlots];
  WorkTile work[Variant::kWorkSlots];

  TransactionBarrier k_full, v_full;
  Barrier v_empty;  // the consumers have V in registers or no longer need it
  Barrier k_empty;  // the consumers no longer need K
  TransactionBarrier q_full[kStages], dout_full[kStages];
  Barrier q_empty[kStages], dout_empty[kStages];
  Barrier ds_full[kStages];  // both consumers have written dS and no longer need the other buffer
  Barrier dq_full[kStages], dq_empty[kStages];
  // The sum of which a step makes dQ has been loaded.
  std::conditional_t<Variant::kMayFinishDq, TransactionBarrier, Empty> sum_full[kStages];
  Barrier plan_full[Variant::kPlanSlots], plan_empty[Variant::kPlanSlots];
  Barrier work_full[Variant::kWorkSlots], work_empty[Variant::kWorkSlots];
  TransactionBarrier number_full[kNumberSlots];
  Barrier number_empty[kNumberSlots];  // in the cluster's first CTA: all loaders of the cluster have read the number
};

// The number of arrivals that complete each barrier.
template <typename Variant>
struct Arrivals {
  static constexpr bool kWide = Variant::kWide;
  static constexpr int kTransaction = 1;   // the thread that announces the bytes
  static constexpr int kLoaderLanes = 32;  // each has written some of LSE; one announces bytes too
  static constexpr int kConsumerWarps = Variant::kConsumerWarps;  // one lane a warp
  static constexpr int kWarpsOfOneConsumer = kWarpgroupWarps;
  // Every thread, because threads have read LSE and D, which are overwritten next. One arrival a warp after __syncwarp
  // would suffice and is no faster, but racecheck follows only this.
  static constexpr int kConsumerThreads = Variant::kConsumers * kWarpgroupThreads;
  static constexpr int kThreadsOfOneConsumer = kWarpgroupThreads;
  // In a wide kernel, one thread of the consumer that owns dV (for V) or dK (for K).
  static constexpr int kDoneWithV = kWide ? 1 : kConsumerWarps, kDoneWithK = kDoneWithV;
  static constexpr int kDoneWithP =
      kWarpsOfOneConsumer + kThreadsOfOneConsumer;  // the owner's warps, the reader's threads
  static constexpr int kStagers = kWide ? kWarpsOfOneConsumer : kConsumerWarps;
  static constexpr int kAdder = 1;
  static constexpr int kPlanner = 1;
  static constexpr int kPlanReaders = kLoaderLanes + Variant::kDqParts;  // an adder for each part of dQ
  static constexpr int kLoader = 1;
  static constexpr int kWorkReaders = kConsumerWarps + kPlanner;
  static constexpr int kLoadersOfCluster = Variant::kClusterSize;
};

template <typename Variant>
__device__ __forceinline__ void initialise_barriers(SharedStorage<Variant>& shared) {
  using Count = Arrivals<Variant>;
  shared.k_full.init(Count::kTransaction);
  shared.v_full.init(Count::kTransaction);
  shared.v_empty.init(Count::kDoneWithV);
  shared.k_empty.init(Count::kDoneWithK);
  for (int i = 0; i < Variant::kStages; ++i) {
    shared.q_full[i].init(Count::kLoaderLanes);
    if (i < Variant::kDoutStages) { shared.dout_full[i].init(Count::kTransaction); }
    shared.q_empty[i].init(Count::kConsumerThreads);
    if (i < Variant::kDoutStages) { shared.dout_empty[i].init(Count::kConsumerThreads); }
    if constexpr (!Variant::kWide) { shared.ds_full[i].init(Count::kConsumerWarps); }
  }
  for (int i = 0; i < Variant::kDqSlots; ++i) {
    shared.dq_full[i].init(Count::kStagers);
    shared.dq_empty[i].init(Count::kAdder);
  }
  if constexpr (Variant::kMayFinishDq) {
    for (auto& full : shared.sum_full) { full.init(Count::kTransaction); }
  }
  if constexpr (Variant::kWide) {
    shared.p_full.init(Count::kWarpsOfOneConsumer);
    shared.p_empty.init(Count::kDoneWithP);
    if constexpr (Variant::Score::kDrops) {
      shared.p_read.init(Count::kThreadsOfOneConsumer);
      shared.kept_full.init(Count::kWarpsOfOneConsumer);
    }
    for (auto& seen : shared.dq_seen) { seen.init(Count::kAdder); }
  }
  for (int i = 0; i < Variant::kPlanSlots; ++i) {
    shared.plan_full[i].init(Count::kPlanner);
    shared.plan_empty[i].init(Count::kPlanReaders);
  }
  for (int i = 0; i < Variant::kWorkSlots; ++i) {
    shared.work_full[i].init(Count::kLoader);
    shared.work_empty[i].init(Count::kWorkReaders);
    if constexpr (Variant::kClusterSize > 1) {
      shared.number_full[i].init(Count::kTransaction);
      shared.number_empty[i].init(Count::kLoadersOfCluster);
    }
  }
  fence_barrier_init();
}

}  // namespace dash_attn::backward
