// All sizes of the backward: those that follow from head dims alone (Geometry), and those of the main kernel for a
// dtype, a mask, a score and a set of policies (Variant).
#pragma once

#include <cstdint>

#include "../contract/order.h"
#include "../contract/policy.h"
#include "../contract/tile_grid.h"
#include "../contract/tile_shapes.h"
#include "../device/gemm.h"
#include "../device/score.h"
#include "../device/sm90.h"

namespace dash_attn::backward {

// Two of everything that changes from step to step, all used in turn, so that one count finds them: Q and dO (one tile
// is loaded while the other is used), dS (one is read while the next is written), dQ (one is added while the next is
// computed). Where heads are wide that holds of Q alone: see Geometry below and wide/storage.h.
inline constexpr int kPipelineStages = 2;

// Warps that add dQ, one for each buffer of it, in turn; where heads are wide, one for each part of its columns.
inline constexpr int kAdderWarps = 2;
static_assert(kAdderWarps == kPipelineStages);

// Warpgroup 0 feeds the others. kLoaderWarp takes work and loads it. One thread of kPlannerWarp announces the order of
// steps; it is a warp of its own because the loader has only kProducerRegisters registers. One thread of each remaining
// warp adds dQ of every other step or, if heads are wide, half of the columns of every step.
enum WarpRole : int { kLoaderWarp = 0, kPlannerWarp = 1, kFirstAdderWarp = 2 };
static_assert(kFirstAdderWarp + kAdderWarps == kWarpgroupWarps);

// Who owns the sums dK and dV. Each consumer owns those of 64 keys or, if those do not fit its registers, one consumer
// owns all of dV and the other all of dK (wide/).
DASH_HOST_DEVICE constexpr bool is_wide(int qk_dim) { return qk_dim > 128; }

// A partial of dQ is added in this many parts, by columns. Each part has a semaphore and, if there are two, an adder. A
// wide kernel computes dQ as one product for each 64 columns, spread over the step, so that the next partial need not
// wait for the last of them.
DASH_HOST_DEVICE constexpr int dq_parts(int qk_dim) { return is_wide(qk_dim) ? 2 : 1; }

template <int kQkDim_, int kValueDim_>
struct Geometry {
  static constexpr bool kWide = is_wide(kQkDim_);
  static constexpr TileShape kTile = backward_tile_shape({kQkDim_, kValueDim_});
  static constexpr int kQuery = kTile.query;
  static constexpr int kKey = kTile.key;
  static constexpr int kQkDim = kTile.head_dims.qk;
  static constexpr int kValueDim = kTile.head_dims.v;
  static constexpr int kHeadDim = kQkDim;  // of V too, unless the kernel is wide
  static_assert(kWide || kQkDim == kValueDim, "a consumer's dK and dV are fragments of one type");
  using Swizzle = SwizzleOf<kWide ? kWarpgroupRows : kHeadDim>;  // of all tiles
  static_assert(kQkDim % Swizzle::kColumns == 0 && kValueDim % Swizzle::kColumns == 0);
  static_assert(kQuery % kProductDepth == 0 && kKey % kProductDepth == 0);

  // Each consumer owns 64 keys: its rows of S^T, dP^T, dV and dK. Of a wide kernel one owns dV and the other dK.
  static constexpr int kConsumers = 2;
  static_assert(kWide ? kQuery == kWarpgroupRows : kKey == kConsumers * kWarpgroupRows);
  static constexpr int kConsumerWarps = kConsumers * kWarpgroupWarps;
  static constexpr int kThreads = (kConsumers + 1) * kWarpgroupThreads;
  // The planner divides by the rows of tiles. Divisions by other numbers than powers of two take more registers.
  static constexpr int kProducerRegisters = is_power_of_two(kQuery) && is_power_of_two(kKey) ? 24 : 40;
  static constexpr int kConsumerRegisters = consumer_registers(kConsumers, kProducerRegisters);

  // dQ = dS K is cut in two for the consumers: along queries if the head dim is 64, else along columns. The second
  // consumer's 64 columns are then the last ones, and both consumers compute the columns in the middle. A product's 64
  // rows are queries, or columns if a consumer has fewer queries: dQ^T = K^T dS^T. A wide kernel computes one product
  // for each 64 columns.
  static constexpr bool kSplitDqByHeadDim = kHeadDim > kWarpgroupRows;
  static constexpr int kDqColumnStep = kWide ? kWarpgroupRows : kSplitDqByHeadDim ? kHeadDim - kWarpgroupRows : 0;
  static_assert(kWide || (kHeadDim <= kConsumers * kWarpgroupRows && kDqColumnStep % Swizzle::kColumns == 0));
  static constexpr int kDqQueries = kSplitDqByHeadDim ? kQuery : kQuery / kConsumers;
  static constexpr bool kTransposesDq = kDqQueries != kWarpgroupRows;
  static_assert(kTransposesDq || kDqColumnStep % kWarpgroupRows == 0);
  static constexpr bool kCanFinishDq = !kWide && !kTransposesDq;  // finish_dq.h

  static constexpr int kStages = kPipelineStages;
  static constexpr int kDoutStages = kQkDim > 192 ? 1 : kStages;

  // dQ of a step is staged and added in one piece. In a wide kernel two pieces of 64 columns do not fit, so that pieces
  // have 32 columns.
  static constexpr int kDqTileFloats = kQuery * kQkDim;
  static constexpr int kDqPieceColumns = kWide ? 32 : kQkDim;
  static constexpr int kDqPieces = kQkDim / kDqPieceColumns;
  static constexpr int kDqParts = dq_parts(kQkDim);
  static constexpr int kDqPiecesOfPart = kDqPieces / kDqParts;
  static_assert(kDqPieces % kDqParts == 0 && (!kWide || kDqParts == kAdderWarps));
  static constexpr int kDqPiecesOfBlock = kWarpgroupRows / kDqPieceColumns;
  static constexpr int kDqSlots = !kWide ? kStages : kQkDim > 192 ? 3 : 4;

  static constexpr int kStoredRows = kWide ? kKey : kWarpgroupRows;  // of dK and dV, by one operation

  // Whether a consumer's half of a slot of dS holds its rows of both dV and dK: see epilogue.h.
  static constexpr bool kStageInDs = kQuery >= 2 * kHeadDim;
  static_assert(kWide || kStages * kQuery >= kHeadDim, "dK is staged in the buffers of dS");
};

template <typename Element_, typename Geometry, MaskKind kMask_, typename Score_, typename Policies_>
struct Variant : Geometry {
  using Element = Element_;
  using Score = Score_;
  using Policies = Policies_;
  static constexpr MaskKind kMask = kMask_;
  static constexpr bool kHasColumns = kMask == MaskKind::kColumns;
  static constexpr int kClusterSize = Order<Policies::kAny>::kCtaGroup;
  static constexpr bool kOrderFree = accumulation(Policies::kAny) == Accumulation::kOrderFree;
  static_assert(!kOrderFree || (Score::serves(ScoreKind::kPlain) && !Geometry::kWide));
  // Whether a call may be a chunk of keys by a chunk of queries, whose sums other calls have begun or continue.
  static constexpr bool kMayCarry =
      kMask == MaskKind::kWindow && Score::serves(ScoreKind::kPlain) && Policies::contains(Policy::kDescending);
  static constexpr bool kDivided = Order<Policies::kAny>::kDivided;

  // Whether the kernel can finish dQ (finish_dq.h) where that pays (placement/finishing.h), which calls that carry sums
  // never ask for. It takes registers, which are missing with other scores and in clusters.
  static constexpr bool kMayFinishDq =
      Geometry::kCanFinishDq && Score::serves(ScoreKind::kPlain) && kClusterSize == 1;

  // The columns of their rows of V that consumers hold in registers as an A operand. The kernel is bound by the
  // bandwidth of shared memory, and a product of 64 x 64 with both operands there takes all of it. There are no
  // registers for K as well, nor for V if S alone takes 64 registers and the score some more. Dropout keeps a second P,
  // which leaves room for some columns.
  static constexpr int held_columns_of_v() {
    constexpr int kAll = Geometry::kQkDim;
    if (!Score::kDrops) { return Score::serves(ScoreKind::kPlain) || Geometry::kQuery <= 80 ? kAll : 0; }
    return kAll == 64 ? 16 : 96;
  }
  static constexpr int kHeldColumnsOfV = held_columns_of_v();
  static constexpr bool kHoldsV = kHeldColumnsOfV == Geometry::kQkDim;  // and its buffer is free then

  static constexpr int kWorkSlots = 2;  // work tiles known at a time: this one, and the next one while its K is loaded
  static constexpr int kPlanSlots = 8;  // steps planned ahead: the loader is up to four steps ahead of the adder

  static constexpr int kQueryTileBytes = Geometry::kQuery * Geometry::kQkDim * sizeof(Element);
  static constexpr int kDoutTileBytes = Geometry::kQuery * Geometry::kValueDim * sizeof(Element);
  static constexpr int kKeyTileBytes = Geometry::kKey * Geometry::kQkDim * sizeof(Element);
  static constexpr int kValueTileBytes = Geometry::kKey * Geometry::kValueDim * sizeof(Element);
  static constexpr int kRowStatBytes = Geometry::kQuery * sizeof(float);

  // The data with which a partial is staged outlives the stage of dO: dO of step j + 2 may be loaded while a consumer
  // stages step j. Step j + 3 waits until dO of step j + 1 is released, which happens after step j has been staged.
  static constexpr int kScaleSlots = 3;
  static constexpr int kScaleBytes = kOrderFree ? Geometry::kQuery * sizeof(uint8_t) : 0;

  DASH_HOST_DEVICE static constexpr TileGrid grid(Sequence const& sequence, Window const& window) {
    return {{Geometry::kQuery, Geometry::kKey, kClusterSize},
            {kMask, kMayCarry ? window : window.of_whole_sequence(), sequence}};
  }
};

}  // namespace dash_attn::backward
