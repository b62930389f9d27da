// Into how many parts the query heads of a KV head are cut. Each part has work tiles of its own, so that there are as
// many times more of them, as many times shorter; dK and dV then are sums over work tiles, in the order of the splits.
#pragma once

#include <cstdint>

#include "../host_device.h"
#include "tile_grid.h"

namespace dash_attn {

// Where the sums of dK and dV are cut shows in their bits. So the rule looks at one sequence and at the group size, and
// at nothing else: not at the other heads, the batch, or the SMs that a device has or a caller leaves. Its thresholds
// are those that served 1 to 8 KV heads best over three generated families of shapes (docs/design_decisions.md).

// Queries that a mean work tile visits, those of all its query heads counted: adding its dK and dV up must stay small
// beside that.
inline constexpr int kQueriesWorthASplit = 2048;
// With so many work tiles of mean length each, two KV heads fill a Hopper GPU. Where some are longer than the mean,
// fewer are enough, because short ones fill the gaps beside them.
inline constexpr int kEnoughEqualWorkTiles = 96;
inline constexpr int kEnoughUnequalWorkTiles = 64;
// A few splits go further where work tiles stay this long: they cost little there, work tiles of unequal length end
// more evenly, and ranks that share a sequence have more sums to take turns at. Not with one query head each: while one
// of several heads waits for its turn to add dQ, another one is worked on.
inline constexpr int kFewSplits = 4;
inline constexpr int kQueriesWorthAFewSplits = 4096;
inline constexpr int kManyEqualWorkTiles = 128;

// Goes through the divisors of the group size as long as the next one pays.
DASH_HOST_DEVICE constexpr int num_splits(int group_size, TileGrid const& grid) {
  // Of the query tiles that a KV tile visits. From one end of the keys to the other they become steadily fewer, or stay
  // as many, but for a window, which is cut short at both ends.
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

// Query heads of a KV head are split in no sequence of fewer queries.
constexpr int fewest_queries_of_splits(int group_size, Tiling const& tiling) {
  int const half = group_size / 2;
  if (half == 0) return kUnbounded;
  int const query_tiles = ceil_div(kQueriesWorthASplit, half * tiling.query);  // of the longest work tile
  return max_int(1, (query_tiles - 1) * tiling.query + 1);
}

}  // namespace dash_attn
