// Distributing the backward's work: maps the number that a cluster takes from a counter to the KV tile that each of its
// CTAs owns.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../contract/order.h"
#include "../contract/policy.h"
#include "../contract/tile_grid.h"
#include "../host_device.h"
#include "sequences.h"

namespace dash_attn {

// The identity of a work tile.
struct WorkPlace {
  int batch;  // the sequence
  int kv_head;
  int split : 24;  // of the KV head's query heads
  Visits visits : 8;
  int kv_tile;  // -1: the group is smaller than the cluster and this CTA sits it out

  DASH_HOST_DEVICE static constexpr WorkPlace of(int batch, int kv_head, int split, Visits visits, int kv_tile) {
    WorkPlace place{};
    place.batch = batch;
    place.kv_head = kv_head;
    place.split = split;
    place.visits = visits;
    place.kv_tile = kv_tile;
    return place;
  }
};

// What a CTA works on between two accesses to the counter: one KV tile with all query tiles that see it, for some query
// heads; or, for a divided KV tile, a part of them.
struct WorkTile : WorkPlace {
  Sequence sequence;
  int splits;
  int first_query_head, query_heads;
  int first_dq_tile;     // index, among the query tiles of all heads of all sequences, of the first query head's first
  int split_tile;        // index among the KV tiles of all KV heads of all sequences
  Range query_tiles;     // that it visits for each query head, perhaps none. `first` only where orders follow ranges
  int q_outer, k_outer;  // the position of its rows: RowOrigin
  int packed;            // in a pack, the sequence's place in PackView::sequences

  DASH_HOST_DEVICE constexpr bool valid() const { return kv_tile >= 0; }
  DASH_HOST_DEVICE constexpr int steps() const { return query_tiles.count * query_heads; }
};

// All work of one call, as a kernel parameter. For a pack, what its sequences have in common; the sequences hold the
// rest.
struct TileScheduler {
  // In a dense batch, that of every sequence.
  Sequence sequence;
  Policy policy;
  int splits;  // splits.h

  int batch, kv_heads;
  int group_size;  // query heads that share one KV head

  // Heads, here (sequence, KV head, split)s, are interleaved in batches of head_swizzle; the final last_heads form one
  // batch, for sums that do not wait for a turn. The two move work in time, and no order of sums depends on them, so
  // they may follow the device (head_swizzle.h). If KV tiles are divided, head_swizzle is either one head or all heads:
  // place_of_part.
  int head_swizzle, last_heads;
  int swizzle_with_turns;  // for order-free sums of which some wait for others after all: with_turns

  // Kernels require it to be below 2^31.
  template <Policy P>
  DASH_HOST_DEVICE constexpr int64_t num_groups(TileGrid const& grid) const {
    return static_cast<int64_t>(batch) * kv_heads * splits * Order<P>::groups(grid);
  }

  // The work of CTA `cta_rank` of the cluster that took `number`. Numbers must be taken in increasing order. The groups
  // of every (sequence, KV head, split) then come in the policy's order, and the splits of a group in ascending order.
  // In both orders every wait points back.
  //
  // All heads' first splits come before any second one: if there are enough heads, a work tile that ends then finds the
  // sums of the previous split ready. Heads are interleaved in batches of head_swizzle; the final last_heads form one
  // batch. Within a batch the first group of each head comes before the second of any: fewer groups of one head run at
  // a time, so fewer wait for each other's adds, and the longest (or shortest) tiles of all heads come together. For
  // divided KV tiles see place_of_part.
  template <Policy P>
  DASH_HOST_DEVICE constexpr WorkPlace place(TileGrid const& grid, int number, int cta_rank) const {
    if constexpr (Order<P>::kDivided) {
      return place_of_part<P>(grid, number, cta_rank);
    } else {
      int const groups = Order<P>::groups(grid);
      int const heads = batch * kv_heads;
      // A constant for ordered sums, because symmetric shift has no registers for this arithmetic.
      constexpr bool kHasLast = accumulation(P) != Accumulation::kOrdered;
      int const last_start = kHasLast ? max_int(0, heads * splits - last_heads) : heads * splits;
      int const before = number / groups;  // whole (sequence, KV head, split)s
      bool const is_last = kHasLast && before >= last_start;
      int const lot_start = is_last ? last_start : before / head_swizzle * head_swizzle;
      int const lot_end = is_last ? heads * splits : min_int(lot_start + head_swizzle, last_start);
      int const lot = lot_end - lot_start;
      int const number_in_lot = number - lot_start * groups;
      int const group = number_in_lot / lot;
      int const head_of_split = lot_start + number_in_lot - group * lot;
      int const split = head_of_split / heads;
      int const head = head_of_split - split * heads;
      int const sequence_number = head / kv_heads;
      return WorkPlace::of(sequence_number, head - sequence_number * kv_heads, split, Order<P>::visits(grid, group),
                           Order<P>::kv_tile(grid, group, cta_rank));
    }
  }

  // The same for masks by key columns, except that the first `long_tiles` KV tiles of all heads come before all other
  // KV tiles. No KV tile waits for a later one of its head, so every wait still points back.
  DASH_HOST_DEVICE constexpr WorkPlace place_long_tiles_first(TileGrid const& grid, int number, int long_tiles) const {
    int const heads = batch * kv_heads, all = heads * splits;
    bool const is_long = number < long_tiles * all;
    int const tiles = is_long ? long_tiles : grid.kv_tiles() - long_tiles;
    int const swizzle = is_long ? all : head_swizzle;
    if (!is_long) number -= long_tiles * all;
    int const lot_start = number / tiles / swizzle * swizzle, lot = min_int(swizzle, all - lot_start);
    number -= lot_start * tiles;
    int const place_in_head = number / lot, head_of_split = lot_start + number - place_in_head * lot;
    int const kv_tile = is_long ? place_in_head : long_tiles + place_in_head;
    int const split = head_of_split / heads, head = head_of_split - split * heads, sequence_number = head / kv_heads;
    return WorkPlace::of(sequence_number, head - sequence_number * kv_heads, split, Visits::kAll, kv_tile);
  }

  // For divided KV tiles: the first parts of a head follow each other, and so do its second parts. The second parts
  // follow the head's first parts or, if a batch is all heads of a split, the first parts of all those heads.
  template <Policy P>
  DASH_HOST_DEVICE constexpr WorkPlace place_of_part(TileGrid const& grid, int number, int cta_rank) const {
    int const tiles = grid.kv_tiles();
    int const heads = batch * kv_heads;
    int const before = number / tiles;  // a head's first parts count as one, as do its second ones
    int const heads_before = has_lots_of_all_heads() ? before : before / 2;
    int const rounds = heads_before / heads;  // through all heads: one a split, or one a part of it
    int const head = heads_before - rounds * heads;
    int const split = has_lots_of_all_heads() ? rounds / 2 : rounds;
    int const part = has_lots_of_all_heads() ? rounds % 2 : before % 2;
    int const group = part * tiles + number - before * tiles;
    int const sequence_number = head / kv_heads;
    return WorkPlace::of(sequence_number, head - sequence_number * kv_heads, split, Order<P>::visits(grid, group),
                         Order<P>::kv_tile(grid, group, cta_rank));
  }

  // For divided KV tiles. With one head both orders are the same.
  DASH_HOST_DEVICE constexpr bool has_lots_of_all_heads() const { return head_swizzle >= batch * kv_heads; }

  // The smallest number of all splits of a KV head: that of its first part. All its other numbers follow.
  template <Policy P>
  DASH_HOST_DEVICE constexpr int first_number_of_head(TileGrid const& grid, WorkPlace const& place) const {
    static_assert(Order<P>::kDivided);
    return (place.batch * kv_heads + place.kv_head) * grid.kv_tiles() * (has_lots_of_all_heads() ? 1 : 2);
  }

  // Whether a KV tile's dK and dV may pass through memory, from split to split or from part to part. A single KV tile
  // is worked on whole.
  DASH_HOST_DEVICE static constexpr bool has_sums_in_memory(Policy policy, TileGrid const& grid, int splits) {
    return splits > 1 || (divides(policy) && grid.kv_tiles() > 1);
  }

  // The scheduler for order-free sums of which some wait for others after all: those of a head that needs the order,
  // which the device finds out, or all sums, if dQ is finished in the main kernel.
  DASH_HOST_DEVICE constexpr TileScheduler with_turns() const {
    TileScheduler scheduler = *this;
    scheduler.head_swizzle = swizzle_with_turns;
    scheduler.last_heads = 0;
    return scheduler;
  }

  // The units of work of a sequence of a pack. A unit is kv_heads numbers. A number of the pack belongs to the sequence
  // that has unit number / kv_heads, and is number - first_unit * kv_heads within that sequence's work.
  template <Policy P>
  DASH_HOST_DEVICE static constexpr int units(TileGrid const& grid, int splits_of_sequence) {
    return Order<P>::groups(grid) * splits_of_sequence;
  }

  // The scheduler of one sequence of a pack.
  DASH_HOST_DEVICE constexpr TileScheduler of(PackedSequence const& s) const {
    return {s.lengths,  policy,     s.splits,       1,
            kv_heads,   group_size, s.head_swizzle, s.last_heads, s.swizzle_with_turns};
  }

  // Fills in what follows from the identity of a work tile, except for its query tiles, in a dense batch. For a pack
  // `move_into_pack` does the rest.
  DASH_HOST_DEVICE constexpr void fill_in(WorkTile& work, TileGrid const& grid) const {
    work.sequence = sequence;
    work.splits = splits;
    work.query_heads = group_size / splits;
    work.first_query_head = work.kv_head * group_size + work.split * work.query_heads;
    work.first_dq_tile = (work.batch * kv_heads * group_size + work.first_query_head) * grid.query_tiles();
    work.split_tile = (work.batch * kv_heads + work.kv_head) * grid.kv_tiles() + work.kv_tile;
    work.q_outer = work.k_outer = work.batch;
  }

  // Fills in the query tiles, after the rest.
  template <Policy P>
  DASH_HOST_DEVICE static constexpr void fill_in_query_tiles(WorkTile& work, TileGrid const& grid) {
    if (work.kv_tile < 0) {
      work.query_tiles.count = 0;
    } else if constexpr (Order<P>::kFollowsRanges) {
      work.query_tiles = grid.query_tiles_of(work.kv_tile);
    } else {
      work.query_tiles.count = Order<P>::steps(grid, work.kv_tile, work.visits).count;
    }
  }

  DASH_HOST_DEVICE constexpr void move_into_pack(WorkTile& work, PackedSequence const& s) const {
    work.batch = s.number;
    work.first_dq_tile += s.first_query_tile * kv_heads * group_size;
    work.split_tile += s.first_split_tile * kv_heads;
    work.q_outer = s.end_q;
    work.k_outer = s.end_k;
  }

  template <Policy P>
  DASH_HOST_DEVICE constexpr WorkTile work_tile(TileGrid const& grid, int number, int cta_rank) const {
    return at<P>(grid, place<P>(grid, number, cta_rank));
  }

  template <Policy P>
  DASH_HOST_DEVICE constexpr WorkTile at(TileGrid const& grid, WorkPlace const& place) const {
    WorkTile work{};
    static_cast<WorkPlace&>(work) = place;
    fill_in(work, grid);
    fill_in_query_tiles<P>(work, grid);
    return work;
  }
};

static_assert(std::is_trivially_copyable_v<TileScheduler> && std::is_standard_layout_v<TileScheduler>);

}  // namespace dash_attn
