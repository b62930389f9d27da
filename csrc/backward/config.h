// Everything that is sized in the backward kernel: tiles, stages, warp roles, registers, shared memory, barriers.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/numeric_types.h>

#include <cstdint>

#include "../config/tile_shapes.h"
#include "../device/gemm.h"
#include "../device/ring.h"
#include "../device/sm90.h"
#include "../schedule/assignment.h"
#include "../schedule/order.h"

namespace dash_attn::backward {

// Warpgroup 0 feeds the others: kLoaderWarp loads, one thread of kPlannerWarp tells the others in which order (apart,
// because the loader has only kProducerRegisters registers), one thread of each of the rest adds dQ, in turn.
enum WarpRole : int { kLoaderWarp = 0, kPlannerWarp = 1, kFirstAdderWarp = 2 };
constexpr int kAdderWarps = 2;

template <typename Element_, int kHeadDim_, bool kCausal_, Policy kPolicy_>
struct Config {
  using Element = Element_;
  using Order = dash_attn::Order<kPolicy_>;
  static constexpr Policy kPolicy = kPolicy_;
  static constexpr Accumulation kAccumulation = accumulation(kPolicy_);
  static constexpr bool kOrderFree = kAccumulation == Accumulation::kOrderFree;
  static constexpr bool kCausal = kCausal_;
  static_assert(fits(kPolicy, kCausal), "the policy is not defined for this mask");

  static constexpr TileShape kTile = backward_tile_shape(kHeadDim_, kCausal_);
  static constexpr int kQuery = kTile.query;
  static constexpr int kKey = kTile.key;
  static constexpr int kHeadDim = kTile.head_dim;
  static_assert(kHeadDim % kSwizzleColumns == 0 && kQuery % kProductDepth == 0);

  static constexpr int kClusterSize = Order::kCtaGroup;

  // Each consumer warpgroup owns 64 keys: its rows of S^T, dP^T, dV and dK.
  static constexpr int kConsumers = kKey / kWarpgroupRows;
  static constexpr int kConsumerWarps = kConsumers * kWarpgroupWarps;
  static constexpr int kThreads = (kConsumers + 1) * kWarpgroupThreads;
  static constexpr int kProducerRegisters = 24;
  static constexpr int kConsumerRegisters = 240;
  static_assert(kConsumers == 2);
  static_assert(kWarpgroupThreads * (kProducerRegisters + kConsumers * kConsumerRegisters) <=
                launch_registers(kThreads));

  // dQ^T = K^T dS^T is cut in two for the consumers: along head_dim where it has two 64-wide blocks, else along
  // queries.
  static constexpr bool kSplitDqByHeadDim = kHeadDim == kConsumers * kWarpgroupRows;
  static_assert(kSplitDqByHeadDim || kHeadDim == kWarpgroupRows);
  static constexpr int kDqQueries = kSplitDqByHeadDim ? kQuery : kQuery / kConsumers;

  // Consumers hold their rows of V in registers as an A operand: what bounds the kernel is shared memory's bandwidth, and
  // a product of 64 x 64 with both operands there takes all of it. There is no room for K as well.
  static constexpr int kHeadDimSlices = kHeadDim / kProductDepth;

  // Two of everything that changes from step to step, all used in turn, so that one count finds them: Q and dO (one
  // tile is loaded while the other is used), dS (one is read while the next is written), dQ (one is added while the
  // next is computed).
  static constexpr int kStages = 2;
  static_assert(kStages == kAdderWarps);
  static constexpr int kClaimSlots = 2;  // claims known ahead
  static constexpr int kPlanSlots = 8;   // steps known ahead: the loader is up to four ahead of the adder

  static constexpr int kQueryTileBytes = kQuery * kHeadDim * sizeof(Element);
  static constexpr int kKeyTileBytes = kKey * kHeadDim * sizeof(Element);
  static constexpr int kRowStatBytes = kQuery * sizeof(float);

  // What a partial is staged with outlives the stage of Q and dO: the loader may be two steps ahead, which are then being
  // written, while a consumer is at the step before.
  static constexpr int kGridSlots = 4;
  static constexpr int kScaleBytes = kOrderFree ? kQuery * sizeof(uint8_t) : 0;
  static constexpr int kDqTileFloats = kQuery * kHeadDim;

  // Whether a consumer's half of a slot of dS holds its rows of both dV and dK. They are staged there, and V of the next
  // claim comes to the place of K as soon as dQ is done with that. Otherwise dV is staged in the place of K first.
  static constexpr bool kStageInDs = kQuery >= 2 * kHeadDim;
  static_assert(kStages * kQuery >= kHeadDim, "dK is staged in the buffers of dS");
};

constexpr int kNoMoreTiles = -1;
constexpr int kAnyTurn = -1;  // as rank: the partial waits for no other
constexpr int kNoGrid = -1;   // as tile of a partial that stays in fp32

struct PlannedStep {
  int query_tile;
  int tile;  // its index among the query tiles of all heads, or kNoMoreTiles
  int rank;  // of the claim's KV tile in the sum of dQ there
  int twice_head_and_last;

  __device__ __forceinline__ void set_head(int head, bool last_of_claim) {
    twice_head_and_last = 2 * head + int(last_of_claim);
  }
  __device__ __forceinline__ int head() const { return twice_head_and_last >> 1; }
  __device__ __forceinline__ bool is_last_of_claim() const { return twice_head_and_last & 1; }
};

template <typename Config>
struct alignas(1024) SharedStorage {
  using Element = typename Config::Element;
  using Barrier = cutlass::arch::ClusterBarrier;
  using TransactionBarrier = cutlass::arch::ClusterTransactionBarrier;

  // K of a claim, and V until the consumers have it in registers: they change places from claim to claim, so that the
  // next K arrives while this one is used.
  Element kv[2][Config::kKey * Config::kHeadDim];
  Element q[Config::kStages][Config::kQuery * Config::kHeadDim];
  Element dout[Config::kStages][Config::kQuery * Config::kHeadDim];
  Element ds[Config::kStages][Config::kQuery * Config::kKey];  // (key block of 64, query, key): dS, keys contiguous;
                                                               // after a claim its gradients are staged here
  float dq[Config::kStages][Config::kDqTileFloats];            // in the order of dq_layout.h
  float lse[Config::kStages][Config::kQuery];                  // base 2
  float delta[Config::kStages][Config::kQuery];                // D = rowsum(dO * O)
  int query_tile[Config::kStages], kv_tile[Config::kStages];
  // Order-free only: the tile whose rows' grid the partial is rounded to, or kNoGrid; scales in the order of
  // scale_position.
  alignas(16) uint8_t scales[Config::kGridSlots][Config::kScaleBytes ? Config::kQuery : 16];
  int grid_tile[Config::kGridSlots];
  int claim[Config::kClaimSlots];
  PlannedStep plan[Config::kPlanSlots];
  int first_tile, first_head;  // of the planned claim: for want of registers
  Work work[2];                // of the claims whose K are here, so that the consumers need not keep it in registers

  TransactionBarrier k_full, v_full;
  Barrier v_empty;  // the consumers have V in registers
  Barrier k_empty;  // the consumers have done with K, and dV has left from there
  TransactionBarrier q_full[Config::kStages], dout_full[Config::kStages];
  Barrier q_empty[Config::kStages], dout_empty[Config::kStages];
  Barrier ds_full[Config::kStages];  // both consumers have written dS, and have done with the buffer before
  Barrier dq_full[Config::kStages], dq_empty[Config::kStages];
  Barrier plan_full[Config::kPlanSlots], plan_empty[Config::kPlanSlots];
  TransactionBarrier claim_full[Config::kClaimSlots];
  Barrier claim_empty[Config::kClaimSlots];  // of the cluster's first CTA: all readers of the cluster have read
};

// Number of arrivals that complete each barrier.
template <typename Config>
struct Arrivals {
  static constexpr int kTransaction = 1;   // the thread that announces the bytes
  static constexpr int kLoaderLanes = 32;  // each has written some of LSE; one announces bytes too
  static constexpr int kConsumerWarpgroups = Config::kConsumers;  // one elected thread a warpgroup
  static constexpr int kConsumerWarps = Config::kConsumerWarps;   // one lane a warp
  // Every thread, where threads have read for themselves what is overwritten next: LSE and D. One arrival a warp after
  // __syncwarp would do and is no faster, but racecheck follows only this.
  static constexpr int kConsumerThreads = Config::kConsumers * kWarpgroupThreads;
  static constexpr int kDoneWithK = Config::kStageInDs ? kConsumerWarps : kConsumerWarpgroups;
  static constexpr int kAdder = 1;
  static constexpr int kPlanner = 1;
  static constexpr int kPlanReaders = kLoaderLanes + kAdder;  // one of the adders
  // Of every CTA: consumers, loader, planner.
  static constexpr int kClaimReaders = Config::kClusterSize * (Config::kConsumerWarps + 2);
};

}  // namespace dash_attn::backward
