// Which query tile is worked on when and by whom. All of it is for speed alone: a row's output comes from one CTA, which
// walks the row's keys in an order that tiles and CTAs have no part in.
// Plain C++: no CUDA, CuTe or torch.
#pragma once

#include "../host_device.h"
#include "../schedule/problem.h"

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
// Under the causal mask the list has the tiles with most keys first, so that what is left for the end is short; and it
// is cut in sections of head groups, so that the K and V in use stay in L2. Under the full mask it goes head by head.
struct TileOrder {
  Problem problem;     // of head groups: tile_q counts positions
  int group_shift;     // log2 of the heads in a group
  int groups_per_kv;   // head groups that share a KV head
  int head_groups;     // in a sequence
  int section_groups;  // causal: (batch, head group) pairs of a section
  int num_tiles;

  // Position in the list of the `round`-th tile of a CTA, which may be beyond its end. Going to and fro gives every CTA
  // long and short tiles alike.
  DASH_HOST_DEVICE constexpr int position(int round, int cta, int ctas) const {
    return round * ctas + (problem.causal && round % 2 == 1 ? ctas - 1 - cta : cta);
  }

  DASH_HOST_DEVICE constexpr QueryTile tile(int position) const {
    int const tiles = problem.query_tiles;
    if (!problem.causal) return make_tile(position % tiles, position / tiles);
    int const section = position / (section_groups * tiles);
    int const first_group = section * section_groups;
    int const groups = min_int(section_groups, problem.batch * head_groups - first_group);
    int const within = position - first_group * tiles;
    return make_tile(tiles - 1 - within / groups, first_group + within % groups);
  }

  DASH_HOST_DEVICE constexpr int positions_of(int rows) const { return rows >> group_shift; }
  DASH_HOST_DEVICE constexpr int first_position(int index) const {
    return max_int(0, end_position(index) - problem.tile_q);
  }
  // Where the next tile begins.
  DASH_HOST_DEVICE constexpr int end_position(int index) const {
    return problem.seqlen_q - (problem.query_tiles - 1 - index) * problem.tile_q;
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
  DASH_HOST_DEVICE constexpr TileWalk(const TileOrder& order, int cta, int ctas)
      : order_(order), cta_(cta), ctas_(ctas), position_(order.position(0, cta, ctas)) {}

  // Only the last round is incomplete.
  DASH_HOST_DEVICE constexpr bool more() const { return position_ < order_.num_tiles; }
  DASH_HOST_DEVICE constexpr QueryTile tile() const { return order_.tile(position_); }
  DASH_HOST_DEVICE constexpr void next() { position_ = order_.position(++round_, cta_, ctas_); }

 private:
  const TileOrder& order_;
  int cta_, ctas_;
  int round_ = 0;
  int position_;
};

}  // namespace dash_attn::forward
