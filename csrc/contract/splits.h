// The number of parts into which the query heads of a KV head are split. Each part has work tiles of its own, so that
// work tiles are that many times more and that many times shorter. dK and dV are then sums over work tiles, in the
// order of the splits.
#pragma once

#include <cstdint>

#include "../host_device.h"
#include "tile_grid.h"

namespace dash_attn {

// The places where the sums of dK and dV are split show in their bits. So the rule depends only on one sequence and on
// the group size: not on the other heads, the batch, or the SMs that a device has or a caller reserves. Its thresholds
// are those that served 1 to 8 KV heads best over three generated families of shapes (docs/design_decisions.md).

// The least number of queries that a mean work tile must visit, counted over all its query heads: adding its dK and dV
// must stay cheap in comparison.
inline constexpr int kQueriesWorthASplit = 2048;
// With this many work tiles of mean length each, two KV heads fill a Hopper GPU. If some are longer than the mean,
// fewer suffice, because short ones fill the gaps beside them.
inline constexpr int kEnoughEqualWorkTiles = 96;
inline constexpr int kEnoughUnequalWorkTiles = 64;
// Up to kFewSplits splits are made even beyond that if work tiles stay long enough: they cost little then, work tiles
// of unequal length end more evenly, and ranks that share a sequence have more sums to take turns at. This does not
// apply to splits of one query head: while one of several heads waits for its turn to add dQ, another one is worked on.
inline constexpr int kFewSplits = 4;
inline constexpr int kQueriesWorthAFewSplits = 4096;
inline constexpr int kManyEqualWorkTiles = 128;

// Tries the divisors of the group size in ascending order, as long as the next one pays.
DASH_HOST_DEVICE constexpr int num_splits(int group_size, TileGrid const& grid) {
  // The query tiles that a KV tile visits. From one end of the keys to the other they decrease steadily or stay equal,
  // except under a window, which is cut short at both ends.
  int const tiles = grid.kv_tiles();
  int const first = grid.query_tiles_of(0).count, last = grid.query_tiles_of(tiles - 1).count;
  int const middle = grid.query_tiles_of(tiles / 2).count;
  bool const is_window = grid.mask.kind == MaskKind::kWindow;
  int64_t const twice_mean = is_window ? int64_t{2} * middle : int64_t{first} + last;
  int64_t const longest = is_window ? middle : max_int(first, last);
  bool const are_equal = twice_mean == 2 * longest;
  int const enough = are_equal ? kEnoughEqualWorkTiles : kEnoughUnequalWorkTiles;
  int splits = 1;
  for (int next = 2; next <= group_size; ++next) {
    int const heads = group_size / next;
    int64_t const twice_queries = twice_mean * heads * grid.tiling.query;
    if (twice_queries < 2 * kQueriesWorthASplit) break;
    if (group_size % next != 0) continue;
    bool const are_too_few = int64_t{tiles} * splits * twice_mean < 2 * enough * longest;
    bool const cost_little = next <= kFewSplits && heads > 1 && twice_queries >= 2 * kQueriesWorthAFewSplits &&
                             !(are_equal && int64_t{tiles} * splits >= kManyEqualWorkTiles);
    if (!are_too_few && !cost_little) break;
    splits = next;
  }
  return splits;
}

// The fewest queries of a sequence whose query heads may be split.
constexpr int fewest_queries_of_splits(int group_size, Tiling const& tiling) {
  int const half = group_size / 2;
  if (half == 0) return kUnbounded;
  int const query_tiles = ceil_div(kQueriesWorthASplit, half * tiling.query);  // for the longest work tile
  return max_int(1, (query_tiles - 1) * tiling.query + 1);
}

}  // namespace dash_attn
