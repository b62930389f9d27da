// How many (sequence, KV head, split)s have their work tiles interleaved. For speed alone: it changes who runs when,
// never an order of sums. Measured on an H200 (docs/engineering_log.md). What limits it is L2, which should hold the Q,
// dO and fp32 dQ of the heads that are live together: what it does not hold costs power, and with it clock.
#pragma once

#include <cstdint>

#include "../config/tile_shapes.h"
#include "../host_device.h"
#include "policy.h"
#include "tile_grid.h"

namespace dash_attn {

DASH_HOST_DEVICE constexpr int head_swizzle(Policy policy, TileGrid const& grid, int heads_of_work_tile,
                                            HeadDims padded) {
  if (divides(policy)) return 1;  // as TileScheduler::place has it
  constexpr int kElementBytes = 2, kSumBytes = 4;
  int64_t const row_bytes = padded.sum() * kElementBytes + padded.qk * kSumBytes;
  int64_t const head_bytes = grid.mask.sequence.seqlen_q * row_bytes;
  auto const heads_within = [&](int64_t bytes) {
    return bytes < head_bytes ? 1 : static_cast<int>(bytes / head_bytes);
  };
  // A CTA waits for the one before it in its head by about a step; above head_dim 128, where steps are long, more heads
  // make up for that than fit well.
  if (grid.mask.kind == MaskKind::kFull) return heads_within((padded.qk > 128 ? 32 : 16) << 20);
  if (policy == Policy::kAscending || policy == Policy::kSpt) return 1;

  // The longest KV tiles come first. A lot then ends evenly when the short tiles of many heads come last.
  constexpr int kEnoughForAnEvenEnd = 512;  // work tiles in a lot
  int const even = min_int(kEnoughForAnEvenEnd / grid.kv_tiles(), heads_within(32 << 20));
  // All KV tiles of a head start at the same query tile, so a CTA begins by waiting for the others of its head, fewer
  // of them in a larger lot. The longer its work tile, the less that matters.
  bool const waits = accumulation(policy) == Accumulation::kOrdered;
  int const enough_steps = heads_of_work_tile > 1 ? 512 : 1024;
  int const apart = waits ? min_int(16, enough_steps / grid.query_tiles()) : 1;
  return max_int(4, max_int(even, apart));
}

}  // namespace dash_attn
