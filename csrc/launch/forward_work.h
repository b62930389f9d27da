// The work of one call of the forward, and the workspace that it takes.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "../device/gemm.h"
#include "../schedule/forward_tiles.h"
#include "arguments.h"

namespace dash_attn {

inline forward::QueryTileScheduler make_forward_scheduler(const ForwardArguments& a) {
  static_assert(forward::kMostPackedHeads == kWarpgroupRows);
  const forward::QueryTileScheduler s =
      forward::make_scheduler({{a.mask, a.sequence()}, a.batch, a.heads, a.kv_heads, a.head_dim, a.num_sms});
  if (const int64_t tiles = num_tiles(s); tiles > INT32_MAX / 2) {
    throw std::runtime_error("dash_attn: batch * heads * seqlen is too large: " + std::to_string(a.batch) + " * " +
                             std::to_string(a.heads) + " * " + std::to_string(a.seqlen_q) + " makes " +
                             std::to_string(tiles) + " tiles");
  }
  return s;
}

}  // namespace dash_attn
