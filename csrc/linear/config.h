// What is sized in the kernel of a linear layer, its parameters, its shared memory and barriers.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "../device/barrier.h"
#include "../device/gemm.h"
#include "../device/ring.h"
#include "../device/sm90.h"
#include "../dropout/mask.h"
#include "../generator/lines.h"
#include "tiles.h"

namespace dash_attn::linear {

template <typename Element_, dropout::Mapping kMapping_, int kRounds_>
struct Variant {
  using Element = Element_;
  using Swizzle = SwizzleOf<kTileDepth>;  // of all tiles
  static constexpr dropout::Mapping kMapping = kMapping_;
  static constexpr int kRounds = kRounds_;

  // Warpgroup 0 loads and makes bits; each of the others owns 64 rows of the tile.
  static constexpr int kConsumers = kTileRows / kWarpgroupRows;
  static constexpr int kConsumerWarps = kConsumers * kWarpgroupWarps;
  static constexpr int kThreads = (kConsumers + 1) * kWarpgroupThreads;
  static constexpr int kProducerRegisters = 56;
  static constexpr int kConsumerRegisters = 224;
  static_assert(kWarpgroupThreads * (kProducerRegisters + kConsumers * kConsumerRegisters) <=
                launch_registers(kThreads));

  static constexpr int kLinesAtATime = 2;  // that a warp makes: three of the producer's warps are alone with it
  static constexpr int kUnitsAtATime = 4;  // that it takes: under a causal mask half of them are done at once

  static constexpr int kStages = 4;
  static constexpr int kStageBytes = (kTileRows + kTileColumns) * kTileDepth * int(sizeof(Element));

  // W's tile comes in as many pieces, each of which one CTA of a cluster brings to all of it.
  static constexpr int kWeightPieces = 2;
  static constexpr int kPieceRows = kTileColumns / kWeightPieces;

  // A warp writes its 16 rows in blocks of a swizzle's columns: one is on its way out while the next is staged.
  static constexpr int kWarpRows = kWarpgroupRows / kWarpgroupWarps;
  static constexpr int kBlockColumns = Swizzle::kColumns;
  static constexpr int kOutputSlots = 2;
};

constexpr int kMostCluster = 2;  // CTAs, which share the tiles of W

template <typename Element>
struct Params {
  CUtensorMap x, weight, out;
  const Element* bias;  // or null
  TileList tiles;
  int rows, columns, steps;  // of y; of the sum, in kTileDepth
  dropout::GeneratorParams bits;
  int* units_taken;  // of the bits; zero at first
};

template <typename Variant>
struct alignas(1024) SharedStorage {
  using Element = typename Variant::Element;

  Element x[Variant::kStages][kTileRows * kTileDepth];
  Element weight[Variant::kStages][kTileColumns * kTileDepth];
  Element out[Variant::kConsumerWarps][Variant::kOutputSlots][Variant::kWarpRows * Variant::kBlockColumns];

  TransactionBarrier full[Variant::kStages];
  Barrier empty[Variant::kStages];  // of the stage in every CTA of the cluster
};

template <typename Variant>
__device__ __forceinline__ void initialise_barriers(SharedStorage<Variant>& shared, int cluster) {
  for (int i = 0; i < Variant::kStages; ++i) {
    shared.full[i].init(1);  // the thread that announces the bytes
    shared.empty[i].init(Variant::kConsumerWarps * cluster);
  }
  fence_barrier_init();
}

}  // namespace dash_attn::linear
