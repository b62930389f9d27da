// What the launch code hands to the forward kernel.
#pragma once

#include <cuda.h>

#include "tiles.h"

namespace dash_attn::forward {

struct KernelParams {
  CUtensorMap q, out;  // boxes of 64 columns x 64 rows of a query tile
  CUtensorMap k, v;    // boxes of 64 columns x one KV tile
  float* softmax_lse;  // (batch, heads, seqlen_q)
  TileOrder order;
  float softmax_scale_log2;  // log2(e) * softmax_scale
};

// KV tiles that rows see, for the `index`-th lot of `positions` query positions, which begins inside the sequence. With
// what the variant fixes as a constant, so that the compiler can divide by it.
template <typename Config>
__device__ __forceinline__ int live_kv_tiles(const TileOrder& order, int index, int positions) {
  Problem problem = order.problem;
  problem.tile_q = positions;
  problem.tile_k = Config::kKey;
  problem.causal = Config::kCausal;
  return problem.live_kv_tiles(index);
}

}  // namespace dash_attn::forward
