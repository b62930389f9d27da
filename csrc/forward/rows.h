// The 64 rows of a query tile that one warpgroup owns: where they lie, and which keys they see.
#pragma once

#include "../device/fragment.h"
#include "config.h"
#include "params.h"

namespace dash_attn::forward {

// KV tiles that some row of a query tile sees: those that are loaded for it.
template <typename Variant>
__device__ __forceinline__ Range kv_tiles_of_query_tile(const QueryTileScheduler& scheduler, int index) {
  // The last warpgroup that has rows computes all its 64, which reach into the next tile where this one is short.
  const int positions = scheduler.positions_of(kWarpgroupRows);
  const int first = scheduler.first_position(index);
  const int end = first + ceil_div(scheduler.end_position(index) - first, positions) * positions;
  return Variant::grid(scheduler.sequence).kv_tiles_of_queries(first, end);
}

// Where a short tile reaches into the next, both write the same bits to the same place: a row's bits depend on the KV
// tiles that it sees, not on those that are walked for other rows (softmax.h).
template <typename Variant>
struct WarpgroupRows {
  QueryTile tile;
  RingIndex<Variant::kQueryStages> q;  // where their Q is
  int first_position;
  bool exist;                       // or has the tile fewer rows?
  Range kv;                         // KV tiles that some of them see, walked from the last to the first
  Range whole;                      // of those, the KV tiles of which each of them sees every key
  int passed_before, passed_after;  // KV tiles that are loaded before and after those, for other rows of the tile

  WarpgroupRows() = default;

  __device__ __forceinline__ WarpgroupRows(const QueryTileScheduler& scheduler, const QueryTile& tile, int consumer,
                                           RingIndex<Variant::kQueryStages> q)
      : tile(tile), q(q) {
    first_position = scheduler.first_position(tile.index) + scheduler.positions_of(consumer * kWarpgroupRows);
    exist = first_position < scheduler.end_position(tile.index);
    const TileGrid grid = Variant::grid(scheduler.sequence);
    const Range of_tile = kv_tiles_of_query_tile<Variant>(scheduler, tile.index);
    const int end = first_position + scheduler.positions_of(kWarpgroupRows);
    kv = exist ? grid.kv_tiles_of_queries(first_position, end) : Range{of_tile.first, 0};
    if (kv.count == 0) { kv.first = of_tile.first; }
    whole = grid.kv_tiles_seen_whole(first_position, end);
    passed_before = of_tile.end() - kv.end();
    passed_after = kv.first - of_tile.first;
  }

  // Of the thread's rows, number `row`: its position in the sequence, and its head among those of all sequences.
  __device__ __forceinline__ int position(const QueryTileScheduler& scheduler, int thread, int row) const {
    return first_position + (fragment_row(thread, 2 * row) >> scheduler.group_shift);
  }
  __device__ __forceinline__ int64_t head(const QueryTileScheduler& scheduler, int thread, int row) const {
    const int group = 1 << scheduler.group_shift;
    return (int64_t(tile.batch) * scheduler.head_groups + tile.head_group) * group +
           (fragment_row(thread, 2 * row) & (group - 1));
  }
};

}  // namespace dash_attn::forward
