// What a pass needs for the sequences of a pack: the work and the share of the workspace of each, which packing/plan.h
// adds up on the device, and upper bounds of these sums, because the host does not know the lengths. Plain C++ without
// CUDA or torch, so that tests compare the two without a GPU.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "../contract/fixed_point.h"
#include "../contract/mask.h"
#include "../contract/policy.h"
#include "../contract/splits.h"
#include "../contract/tile_grid.h"
#include "../contract/tile_shapes.h"
#include "../host_device.h"
#include "forward_tiles.h"
#include "head_swizzle.h"
#include "sequences.h"
#include "work_tile.h"

namespace dash_attn {

// The needs of one sequence.
struct PackNeed {
  int longest;  // about the number of steps of its longest work tile
  int last_heads;
  int head_swizzle, swizzle_with_turns;  // only for the backward
  int splits;
  PackTotals share;
};

// begin_after sets what depends on the sequences before it.
DASH_HOST_DEVICE constexpr PackedSequence packed_sequence(int number, Sequence const& lengths, int end_q, int end_k,
                                                          PackNeed const& need) {
  PackedSequence sequence{};
  sequence.lengths = lengths;
  sequence.number = number;
  sequence.end_q = end_q;
  sequence.end_k = end_k;
  sequence.head_swizzle = need.head_swizzle;
  sequence.swizzle_with_turns = need.swizzle_with_turns;
  sequence.last_heads = need.last_heads;
  sequence.splits = need.splits;
  return sequence;
}

DASH_HOST_DEVICE constexpr void begin_after(PackedSequence& sequence, PackTotals const& before) {
  sequence.first_unit = before.units;
  sequence.first_query_tile = before.query_tiles;
  sequence.first_split_tile = before.split_tiles;
  sequence.first_key_chunk = before.key_chunks;
}

// The rows of a pack, some of which may belong to no sequence.
struct PackRows {
  int batch;  // sequences
  int total_q, total_k;
};

// Upper bounds of the totals of a pack, whatever its lengths.
struct PackCapacity {
  int64_t units, query_tiles, split_tiles, key_chunks;
};

// The most parts of `size` rows into which `sequences` sequences can be cut, each on its own, with a last part that may
// be short.
constexpr int64_t most_parts(int64_t rows, int64_t size, int64_t sequences) {
  auto const smaller = [](int64_t a, int64_t b) { return a < b ? a : b; };
  return smaller(rows, rows / size + smaller(rows, sequences));
}

// The forward's units of work are query tiles of all head groups.
struct ForwardPackRule {
  MaskRule mask;
  TileShape tile;
  forward::QueryTileScheduler scheduler;

  DASH_HOST_DEVICE constexpr PackNeed need(Sequence const& sequence) const {
    PackNeed need{};
    need.share.units = ceil_div(sequence.seqlen_q, scheduler.tile_positions);
    if (need.share.units > 0) {
      // The last query sees at least as many keys as any other, except for those that a window hides at its end.
      TileGrid const grid{{scheduler.tile_positions, tile.key, 1}, mask_of(mask, sequence)};
      int const last = max_int(0, sequence.seqlen_q - scheduler.tile_positions);
      need.longest = 1 + grid.kv_tiles_of_queries(last, sequence.seqlen_q).count;
    }
    need.last_heads =
        forward::groups_within_l2(sequence.seqlen_k, tile.head_dims, scheduler.groups_per_kv, scheduler.head_groups);
    return need;
  }

  constexpr PackCapacity most(PackRows const& rows) const {
    PackCapacity most{};
    most.units = most_parts(rows.total_q, scheduler.tile_positions, rows.batch);
    return most;
  }
};

// A pack is scheduled like a batch of sequences of its mean length, which the host knows: the layout of rows in tiles
// may depend on it, because no bit depends on the layout. The device finds the number of tiles.
constexpr ForwardPackRule forward_pack_rule(MaskRule const& mask, PackRows const& rows, int heads, int kv_heads,
                                            HeadDims dims, int ctas, bool drops) {
  // A step of decoding gives every sequence as many queries, and then the mean is whole.
  bool const is_whole = rows.total_q % rows.batch == 0;
  Sequence const mean{ceil_div(rows.total_q, rows.batch), ceil_div(rows.total_k, rows.batch)};
  forward::QueryTileScheduler scheduler =
      forward::make_scheduler({mask_of(mask, mean), rows.batch, heads, kv_heads, dims, ctas, drops, is_whole});
  scheduler.takes_tiles = true;
  return {mask, forward_tile_shape(padded_head_dims(dims.qk, dims.v)), scheduler};
}

// The backward's units of work are groups of KV tiles of all KV heads, one for each split.
struct BackwardPackRule {
  MaskRule mask;
  Tiling tiling;
  Policy policy;
  int group_size;
  HeadDims padded;

  DASH_HOST_DEVICE constexpr PackNeed need(Sequence const& sequence) const {
    TileGrid const grid{tiling, mask_of(mask, sequence)};
    PackNeed need{};
    need.splits = 1;
    need.head_swizzle = need.swizzle_with_turns = 1;
    need.share.query_tiles = grid.query_tiles();
    need.share.key_chunks = fixed_point::num_chunks(sequence.seqlen_k);
    if (grid.kv_tiles() == 0) return need;
    need.splits = num_splits(group_size, grid);
    need.share.split_tiles = TileScheduler::has_sums_in_memory(policy, grid, need.splits) ? grid.kv_tiles() : 0;
    int const heads = group_size / need.splits;
    int const last = grid.kv_tiles() - 1;
    int longest = 0;  // under a window in the middle, else at an end
    for (int const kv : {0, last / 2, last}) longest = max_int(longest, grid.query_tiles_of(kv).count);
    need.longest = 1 + longest * heads;
    AllPolicies::with(policy,
                      [&](auto p) { need.share.units = TileScheduler::units<decltype(p)::value>(grid, need.splits); });
    if (grid.query_tiles() > 0) {
      need.head_swizzle = head_swizzle(policy, grid, heads, padded);
      need.swizzle_with_turns = swizzle_with_turns(policy, grid, heads, padded);
      need.last_heads = last_heads(policy, grid, padded);
    }
    return need;
  }

  constexpr PackCapacity most(PackRows const& rows) const {
    int64_t const could_be_split = rows.total_q / fewest_queries_of_splits(group_size, tiling);
    // Sequences with a second KV tile, if KV tiles are divided.
    int64_t const could_be_in_parts = divides(policy) ? rows.total_k / (tiling.key + 1) : 0;
    int64_t const could_have_sums = could_be_split + could_be_in_parts;
    int64_t const split = could_have_sums < rows.batch ? could_have_sums : rows.batch;
    PackCapacity most{};
    most.units = most_parts(rows.total_k, tiling.key, rows.batch) * group_size * (divides(policy) ? 2 : 1);
    most.query_tiles = most_parts(rows.total_q, tiling.query, rows.batch);
    most.split_tiles = split == 0 ? 0 : most_parts(rows.total_k, tiling.key, split);
    most.key_chunks = most_parts(rows.total_k, fixed_point::kMinChunkRows, rows.batch);
    return most;
  }
};

constexpr BackwardPackRule backward_pack_rule(MaskRule const& mask, Policy policy, int group_size, HeadDims dims) {
  TileShape const tile = backward_tile_shape(padded_head_dims(dims.qk, dims.v));
  int cta_group = 1;
  AllPolicies::with(policy, [&](auto p) { cta_group = Order<decltype(p)::value>::kCtaGroup; });
  return {mask, {tile.query, tile.key, cta_group}, policy, group_size, tile.head_dims};
}

}  // namespace dash_attn
