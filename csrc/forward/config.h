// Everything that is sized in the forward kernel: tiles, stages, registers, shared memory, barriers.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/numeric_types.h>

#include <cstdint>

#include "../config/tile_shapes.h"
#include "../device/gemm.h"
#include "../device/ring.h"
#include "../device/sm90.h"

namespace dash_attn::forward {

template <typename Element_, int kHeadDim_, bool kCausal_>
struct Config {
  using Element = Element_;
  static constexpr bool kCausal = kCausal_;

  static constexpr TileShape kTile = forward_tile_shape(kHeadDim_, kCausal_);
  static constexpr int kQuery = kTile.query;
  static constexpr int kKey = kTile.key;
  static constexpr int kHeadDim = kTile.head_dim;
  static_assert(kHeadDim % kSwizzleColumns == 0 && kKey % kProductDepth == 0 && kQuery % kWarpgroupRows == 0);

  // Warpgroup 0 loads and stores; each of the others owns 64 rows of the query tile, from S to the output.
  static constexpr int kConsumers = kQuery / kWarpgroupRows;
  static constexpr int kConsumerWarps = kConsumers * kWarpgroupWarps;
  static constexpr int kThreads = (kConsumers + 1) * kWarpgroupThreads;
  static_assert(kConsumers == 2 || kConsumers == 3);
  static constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 232 : 160;
  static_assert(kWarpgroupThreads * (kProducerRegisters + kConsumers * kConsumerRegisters) <=
                launch_registers(kThreads));

  static constexpr int kQueryStages = 3;  // tiles of Q: in use, on their way in, on their way out as output
  static constexpr int kStages = kHeadDim == 64 ? 4 : 2;  // tiles of K, and as many of V

  static constexpr int kQueryTileBytes = kQuery * kHeadDim * sizeof(Element);
  static constexpr int kKeyTileBytes = kKey * kHeadDim * sizeof(Element);
};

template <typename Config>
struct alignas(1024) SharedStorage {
  using Element = typename Config::Element;
  using Barrier = cutlass::arch::ClusterBarrier;
  using TransactionBarrier = cutlass::arch::ClusterTransactionBarrier;

  // The output of a tile leaves from where its Q was: a warpgroup reads no other rows than its own.
  Element q[Config::kQueryStages][Config::kQuery * Config::kHeadDim];
  Element k[Config::kStages][Config::kKey * Config::kHeadDim];
  Element v[Config::kStages][Config::kKey * Config::kHeadDim];

  TransactionBarrier q_full[Config::kQueryStages];
  Barrier q_empty[Config::kQueryStages];
  Barrier out_full[Config::kQueryStages][Config::kConsumers];
  TransactionBarrier k_full[Config::kStages], v_full[Config::kStages];
  Barrier k_empty[Config::kStages], v_empty[Config::kStages];
};

// Number of arrivals that complete each barrier.
template <typename Config>
struct Arrivals {
  static constexpr int kTransaction = 1;                         // the thread that announces the bytes
  static constexpr int kConsumerWarps = Config::kConsumerWarps;  // a lane of each warp whose products have completed
  static constexpr int kStagingWarps = kWarpgroupWarps;          // a lane of each warp that has staged its output
  static constexpr int kStorers = Config::kConsumers;            // a thread for each warpgroup's output, which has left
};

}  // namespace dash_attn::forward
