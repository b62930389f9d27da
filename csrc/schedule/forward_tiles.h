// Which query tile of the forward is worked on when and by whom. All of it is for speed alone: a row's output comes
// from one CTA, which walks the row's keys in an order that tiles and CTAs have no part in. Plain C++: no CUDA, CuTe or
// torch.
#pragma once

#include <cstdint>
#include <numeric>

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
// Every CTA takes a fixed share of a list of tiles.
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

  // Position in the list of the `round`-th tile of a CTA, which may be beyond its end. Going to and fro gives every CTA
  // long and short tiles alike.
  DASH_HOST_DEVICE constexpr int position(int round, int cta, int ctas) const {
    return round * ctas + (longest_first && round % 2 == 1 ? ctas - 1 - cta : cta);
  }

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

// The tiles of one CTA, in their order. Every warp of the CTA walks them for itself.
class TileWalk {
 public:
  DASH_HOST_DEVICE constexpr TileWalk(const QueryTileScheduler& scheduler, int cta, int ctas)
      : scheduler_(scheduler), cta_(cta), ctas_(ctas), position_(scheduler.position(0, cta, ctas)) {}

  // Only the last round is incomplete.
  DASH_HOST_DEVICE constexpr bool more() const { return position_ < scheduler_.num_tiles; }
  DASH_HOST_DEVICE constexpr QueryTile tile() const { return scheduler_.tile(position_); }
  DASH_HOST_DEVICE constexpr void next() { position_ = scheduler_.position(++round_, cta_, ctas_); }

 private:
  const QueryTileScheduler& scheduler_;
  int cta_, ctas_;
  int round_ = 0;
  int position_;
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

// Head groups of a lot: about as many as have their K and V in L2 together, and such that the tiles of a lot give every
// CTA as much to do: they are dealt to and fro, so in lots of twice the CTAs.
constexpr int head_swizzle(QueryTileScheduler const& s, int64_t kv_bytes_of_head, int ctas) {
  constexpr int64_t kBytes = 16 << 20;
  int64_t const fit = (kBytes < kv_bytes_of_head ? 1 : kBytes / kv_bytes_of_head) * s.groups_per_kv;
  int64_t const even = 2 * ctas / std::gcd(2 * ctas, s.query_tiles);
  int64_t const lot = (fit + even - 1) / even * even, all = int64_t{s.batch} * s.head_groups;
  return static_cast<int>(lot < all ? lot : all);
}

}  // namespace dash_attn::forward
