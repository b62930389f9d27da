// Handing out the backward's work: from the number that a cluster takes from a counter to the KV tile that a CTA owns.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../host_device.h"
#include "order.h"
#include "policy.h"
#include "tile_grid.h"

namespace dash_attn {

// What a CTA does between two looks at the counter: one KV tile with all query tiles that see it, of some query heads.
struct WorkTile {
  Sequence sequence;
  Policy policy;
  int batch;  // which sequence
  int kv_head;
  int split;    // of the KV head's query heads
  int kv_tile;  // -1: the group is smaller than the cluster and this CTA sits it out
  int first_query_head, query_heads;
  int first_dq_tile;  // index, among the query tiles of all heads of all sequences, of the first query head's first
  int steps;          // over the query tiles and the query heads; none is legal

  DASH_HOST_DEVICE constexpr bool valid() const { return kv_tile >= 0; }
};

// All work of one call, as a kernel parameter.
struct TileScheduler {
  // Every sequence's: a dense batch.
  Sequence sequence;
  Policy policy;
  int splits;  // splits.h

  int batch, kv_heads;
  int group_size;  // query heads that share one KV head

  // (sequence, KV head, split)s whose work tiles are interleaved. It moves work in time and no order of sums depends on
  // it, so it may follow the device (head_swizzle.h).
  int head_swizzle;

  // A kernel needs it below 2^31.
  template <Policy P>
  DASH_HOST_DEVICE constexpr int64_t num_groups(TileGrid const& grid) const {
    return static_cast<int64_t>(batch) * kv_heads * splits * Order<P>::groups(grid);
  }

  // Work of CTA `cta_rank` of the cluster that took `number`. Numbers must be taken in increasing order: the groups of
  // every (sequence, KV head, split) then come in the policy's order, and the splits of a group in ascending order,
  // which are the orders in which waits point back.
  //
  // All heads' first splits come before any second one: where there are enough heads, a work tile that ends then finds
  // the sums of the split before ready. These come in lots of head_swizzle. Within a lot the first group of each comes
  // before the second of any: fewer groups of one run at a time, so fewer wait for each other's adds, and the longest
  // (or shortest) tiles of all heads come together.
  template <Policy P>
  DASH_HOST_DEVICE constexpr WorkTile work_tile(TileGrid const& grid, int number, int cta_rank) const {
    int const groups = Order<P>::groups(grid);
    int const heads = batch * kv_heads;
    int const lot_start = number / groups / head_swizzle * head_swizzle;
    int const lot = min_int(head_swizzle, heads * splits - lot_start);
    int const number_in_lot = number - lot_start * groups;
    int const group = number_in_lot / lot;
    int const head_of_split = lot_start + number_in_lot - group * lot;
    int const split = head_of_split / heads;
    int const head = head_of_split - split * heads;
    int const sequence_number = head / kv_heads;
    return at(grid, P, sequence_number, head - sequence_number * kv_heads, split,
              Order<P>::kv_tile(grid, group, cta_rank));
  }

  DASH_HOST_DEVICE constexpr WorkTile at(TileGrid const& grid, Policy order, int sequence_number, int kv_head,
                                         int split, int kv_tile) const {
    int const query_heads = group_size / splits;
    int const first_query_head = kv_head * group_size + split * query_heads;
    int const first_dq_tile = (sequence_number * kv_heads * group_size + first_query_head) * grid.query_tiles();
    int const steps = kv_tile < 0 ? 0 : grid.query_tiles_of(kv_tile).count * query_heads;
    return {sequence,         order,       sequence_number, kv_head, split, kv_tile,
            first_query_head, query_heads, first_dq_tile,   steps};
  }
};

static_assert(std::is_trivially_copyable_v<TileScheduler> && std::is_standard_layout_v<TileScheduler>);

}  // namespace dash_attn
