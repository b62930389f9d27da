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

// KV tiles that the query at `position` sees: the first so many. With what the variant fixes as a constant, so that the
// compiler can divide by it.
template <typename Config>
__device__ __forceinline__ int live_kv_tiles(const TileOrder& order, int position) {
  const Problem& problem = order.problem;
  if (!Config::kCausal) { return problem.kv_tiles; }
  const int last_key = position + problem.diagonal;
  return last_key < 0 ? 0 : last_key / Config::kKey + 1;
}

}  // namespace dash_attn::forward
