// Which query tile of the forward is worked on when and by whom. All of it is for speed alone: a row's output comes
// from one CTA, which walks the row's keys in an order that tiles and CTAs have no part in. Plain C++: no CUDA, CuTe or
// torch.
#pragma once

#include <cstdint>

#include "../host_device.h"
#include "mask.h"

namespace dash_attn::forward {

struct QueryTile {
  int index;  // among the tiles of its head group
  int head_group;
  int batch;
};

// Rows of a query tile are (position, head of the group), heads fastest: where sequences are short, the query heads of
// a KV head are packed into a tile; elsewhere a group is one head. The last tile ends where the queries end and the
// first is the one that may be short, so that under the causal mask the rows left empty are those with the fewest keys.
// CTAs take tiles from a list, each the next when it has loaded one, so that an SM that is faster takes more of them.
//
// Where tiles differ in length the list has the longest first, so that what is left for the end is short; and it is cut
// in lots of head groups, so that the K and V in use stay in L2. Where they do not it goes head by head.
struct QueryTileScheduler {
  Sequence sequence;   // of a dense batch: every sequence's
  int tile_positions;  // of a query tile
  int query_tiles;     // of a head group
  int batch;
  int group_shift;    // log2 of the heads in a group
  int groups_per_kv;  // head groups that share a KV head
  int head_groups;    // in a sequence
  bool longest_first;
  int head_swizzle;  // with longest_first: (batch, head group) pairs of a lot
  int num_tiles;

  DASH_HOST_DEVICE constexpr QueryTile tile(int position) const {
    if (!longest_first) return make_tile(position % query_tiles, position / query_tiles);
    int const lot = position / (head_swizzle * query_tiles);
    int const first_group = lot * head_swizzle;
    int const groups = min_int(head_swizzle, batch * head_groups - first_group);
    int const within = position - first_group * query_tiles;
    return make_tile(query_tiles - 1 - within / groups, first_group + within % groups);
  }

  DASH_HOST_DEVICE constexpr int positions_of(int rows) const { return rows >> group_shift; }
  DASH_HOST_DEVICE constexpr int first_position(int index) const {
    return max_int(0, end_position(index) - tile_positions);
  }
  // Where the next tile begins.
  DASH_HOST_DEVICE constexpr int end_position(int index) const {
    return sequence.seqlen_q - (query_tiles - 1 - index) * tile_positions;
  }

  DASH_HOST_DEVICE constexpr int kv_head(int head_group) const { return head_group / groups_per_kv; }

 private:
  DASH_HOST_DEVICE constexpr QueryTile make_tile(int index, int batch_group) const {
    return {index, batch_group % head_groups, batch_group / head_groups};
  }
};

// log2 of the query heads that are packed into a tile of `tile_rows`: all heads of a KV head where that leaves fewer
// rows empty. TMA gathers them, at most `most`, which takes a power of two.
constexpr int packed_heads_shift(int group_size, int seqlen_q, int tile_rows, int most) {
  if (group_size > most || (group_size & (group_size - 1)) != 0) return 0;
  int64_t const packed = (int64_t{seqlen_q} * group_size + tile_rows - 1) / tile_rows;
  if (packed >= int64_t{group_size} * ceil_div(seqlen_q, tile_rows)) return 0;
  int shift = 0;
  while (1 << shift < group_size) ++shift;
  return shift;
}

// Head groups of a lot: as many as have their K and V in L2 together, and leave room there for those of the next lot,
// on which the first CTAs begin while the last ones end this one.
constexpr int head_swizzle(QueryTileScheduler const& s, int64_t kv_bytes_of_head) {
  constexpr int64_t kBytes = 32 << 20;
  int64_t const fit = (kBytes < kv_bytes_of_head ? 1 : kBytes / kv_bytes_of_head) * s.groups_per_kv;
  int64_t const all = int64_t{s.batch} * s.head_groups;
  return static_cast<int>(fit < all ? fit : all);
}

}  // namespace dash_attn::forward
