// How many heads, here (sequence, KV head, split)s, have their work tiles interleaved, and how many of the last ones
// form one batch. This affects speed alone: it changes who runs when, and never an order of sums. The rules are
// measured (docs/design_decisions.md). The limit is L2, which should hold the Q, dO and fp32 dQ of the heads that are
// in use together: traffic beyond L2 costs power, and with it clock frequency.
#pragma once

#include <cstdint>

#include "../contract/policy.h"
#include "../contract/tile_grid.h"
#include "../contract/tile_shapes.h"
#include "../host_device.h"

namespace dash_attn {

// The number of heads, at least one, whose Q, dO and dQ fit in `bytes`.
DASH_HOST_DEVICE constexpr int heads_within(int64_t bytes, TileGrid const& grid, HeadDims padded) {
  constexpr int kElementBytes = 2, kSumBytes = 4;
  int64_t const row_bytes = padded.sum() * kElementBytes + padded.qk * kSumBytes;
  int64_t const head_bytes = grid.mask.sequence.seqlen_q * row_bytes;
  return bytes < head_bytes ? 1 : static_cast<int>(bytes / head_bytes);
}

// The number of last heads that form one batch, in which the longest work tiles of all heads come first, so that little
// work is left at the end; 0 if all batches are alike. This is for sums without an order, whose work tiles do not wait
// for a turn, so that few heads need be in use. Above head_dim 128, where memory has less to do, the batches of ordered
// sums are faster.
DASH_HOST_DEVICE constexpr int last_heads(Policy policy, TileGrid const& grid, HeadDims padded) {
  bool const waits = accumulation(policy) == Accumulation::kOrdered;
  return waits || padded.qk > 128 ? 0 : heads_within(16 << 20, grid, padded);
}

// For a dense batch with divided KV tiles: all (sequence, KV head)s, if each of their KV tiles has a CTA but not each
// part. With all CTAs running, heads are then worked on whole and the numbers of second parts mean nothing. Head by
// head, the CTAs for the last heads would take such numbers first. If each part has a CTA, each first part is some
// CTA's first number anyway. In all other cases one head.
DASH_HOST_DEVICE constexpr int divided_head_swizzle(TileGrid const& grid, int64_t heads, int ctas) {
  int64_t const tiles = heads * grid.kv_tiles();
  return tiles <= ctas && ctas < 2 * tiles ? static_cast<int>(heads) : 1;
}

DASH_HOST_DEVICE constexpr int head_swizzle(Policy policy, TileGrid const& grid, int heads_of_work_tile,
                                            HeadDims padded) {
  if (divides(policy)) return 1;  // for packs; for dense batches see divided_head_swizzle
  // Few, so that at any time some CTAs read and write much, at either end of a work tile, while others compute.
  if (int const last = last_heads(policy, grid, padded)) return min_int(4, last);
  // A CTA waits for the previous one of its head by about a step. Above head_dim 128, where steps are long, more heads
  // make up for that than fit well.
  if (grid.mask.kind == MaskKind::kFull) return heads_within((padded.qk > 128 ? 32 : 16) << 20, grid, padded);
  if (policy == Policy::kAscending || policy == Policy::kSpt) return 1;

  // The longest KV tiles come first. A batch then ends evenly if the short tiles of many heads come last.
  constexpr int kEnoughForAnEvenEnd = 512;  // work tiles in a batch
  int const even = min_int(kEnoughForAnEvenEnd / grid.kv_tiles(), heads_within(32 << 20, grid, padded));
  // All KV tiles of a head start at the same query tile, so a CTA begins by waiting for the others of its head, of
  // which a larger batch runs fewer at a time. The longer its work tile, the less that matters.
  int const enough_steps = heads_of_work_tile > 1 ? 512 : 1024;
  bool const waits = accumulation(policy) == Accumulation::kOrdered;
  int const apart = waits ? min_int(16, enough_steps / grid.query_tiles()) : 1;
  return max_int(4, max_int(even, apart));
}

// The swizzle for order-free sums of which some head needs the order and so takes turns: that of ordered sums whose
// work tiles come in the same order. 1 for other policies.
DASH_HOST_DEVICE constexpr int swizzle_with_turns(Policy policy, TileGrid const& grid, int heads_of_work_tile,
                                                  HeadDims padded) {
  if (policy != Policy::kOrderFree) return 1;
  return head_swizzle(Policy::kDescending, grid, heads_of_work_tile, padded);
}

}  // namespace dash_attn
