// How many (sequence, KV head, split)s have their work tiles interleaved, and how many of the last ones. For speed
// alone: it changes who runs when, never an order of sums. Measured (docs/design_decisions.md). What limits it is L2,
// which should hold the Q, dO and fp32 dQ of the heads that are live together: what it does not hold costs power, and
// with it clock.
#pragma once

#include <cstdint>

#include "../config/tile_shapes.h"
#include "../host_device.h"
#include "policy.h"
#include "tile_grid.h"

namespace dash_attn {

// Heads whose Q, dO and dQ fit in `bytes`; at the least one.
DASH_HOST_DEVICE constexpr int heads_within(int64_t bytes, TileGrid const& grid, HeadDims padded) {
  constexpr int kElementBytes = 2, kSumBytes = 4;
  int64_t const row_bytes = padded.sum() * kElementBytes + padded.qk * kSumBytes;
  int64_t const head_bytes = grid.mask.sequence.seqlen_q * row_bytes;
  return bytes < head_bytes ? 1 : static_cast<int>(bytes / head_bytes);
}

// The heads that come together at the end, the longest work tiles of all of them first, so that what is left for the
// end is short; 0 where lots are all alike. For sums without an order, whose work tiles wait for no turn, so that few
// heads need be live. Above head_dim 128, where memory has less to do, lots as they are for ordered sums are quicker.
DASH_HOST_DEVICE constexpr int last_heads(Policy policy, TileGrid const& grid, HeadDims padded) {
  bool const waits = accumulation(policy) == Accumulation::kOrdered;
  return waits || padded.qk > 128 ? 0 : heads_within(16 << 20, grid, padded);
}

// Of a dense batch whose KV tiles are divided: all (sequence, KV head)s, if each KV tile of theirs has a CTA, but not
// each part. With all CTAs running, heads are worked on whole there, second parts' numbers stand for nothing, and head
// by head the last heads' CTAs would take such ones first. Where each part has a CTA, each first part is somebody's
// first number anyway. Else one head.
DASH_HOST_DEVICE constexpr int divided_head_swizzle(TileGrid const& grid, int64_t heads, int ctas) {
  int64_t const tiles = heads * grid.kv_tiles();
  return tiles <= ctas && ctas < 2 * tiles ? static_cast<int>(heads) : 1;
}

DASH_HOST_DEVICE constexpr int head_swizzle(Policy policy, TileGrid const& grid, int heads_of_work_tile,
                                            HeadDims padded) {
  if (divides(policy)) return 1;  // of a pack; of a dense batch: divided_head_swizzle
  // Few, so that at any time some CTAs read and write much, at either end of a work tile, and others compute.
  if (int const last = last_heads(policy, grid, padded)) return min_int(4, last);
  // A CTA waits for the one before it in its head by about a step; above head_dim 128, where steps are long, more heads
  // make up for that than fit well.
  if (grid.mask.kind == MaskKind::kFull) return heads_within((padded.qk > 128 ? 32 : 16) << 20, grid, padded);
  if (policy == Policy::kAscending || policy == Policy::kSpt) return 1;

  // The longest KV tiles come first. A lot then ends evenly when the short tiles of many heads come last.
  constexpr int kEnoughForAnEvenEnd = 512;  // work tiles in a lot
  int const even = min_int(kEnoughForAnEvenEnd / grid.kv_tiles(), heads_within(32 << 20, grid, padded));
  // All KV tiles of a head start at the same query tile, so a CTA begins by waiting for the others of its head, fewer
  // of them in a larger lot. The longer its work tile, the less that matters.
  int const enough_steps = heads_of_work_tile > 1 ? 512 : 1024;
  bool const waits = accumulation(policy) == Accumulation::kOrdered;
  int const apart = waits ? min_int(16, enough_steps / grid.query_tiles()) : 1;
  return max_int(4, max_int(even, apart));
}

// Of order-free sums, where some head needs the order after all, and so takes turns: as the ordered sums whose work
// tiles come in the same order. 1 of others.
DASH_HOST_DEVICE constexpr int swizzle_with_turns(Policy policy, TileGrid const& grid, int heads_of_work_tile,
                                                  HeadDims padded) {
  if (policy != Policy::kOrderFree) return 1;
  return head_swizzle(Policy::kDescending, grid, heads_of_work_tile, padded);
}

}  // namespace dash_attn
