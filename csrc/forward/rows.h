// The 64 rows of a query tile that one warpgroup owns: where they lie, and which keys they see.
#pragma once

#include "../device/fragment.h"
#include "../device/mask.h"
#include "config.h"
#include "params.h"

namespace dash_attn::forward {

template <typename Config>
__device__ __forceinline__ Mask<Config::kCausal> make_mask(const TileOrder& order) {
  return {order.problem.seqlen_k, order.problem.diagonal};
}

// KV tiles that some row of a query tile sees.
template <typename Config>
__device__ __forceinline__ int live_kv_tiles_of_tile(const TileOrder& order, int index) {
  // The last warpgroup that has rows computes all its 64, which reach into the next tile where this one is short.
  const int positions = order.positions_of(kWarpgroupRows);
  const int first = order.first_position(index);
  const int end = first + ceil_div(order.end_position(index) - first, positions) * positions;
  return live_kv_tiles<Config>(order, min_int(end, order.problem.seqlen_q) - 1);
}

// Where a short tile reaches into the next, both write the same bits to the same place.
template <typename Config>
struct WarpgroupRows {
  QueryTile tile;
  RingIndex<Config::kQueryStages> q;  // where their Q is
  int first_position;
  bool exist;  // or has the tile fewer rows?
  int live;    // KV tiles that they see
  int passed;  // KV tiles that are loaded before those, for other rows of the tile

  WarpgroupRows() = default;

  __device__ __forceinline__ WarpgroupRows(const TileOrder& order, const QueryTile& tile, int consumer,
                                           RingIndex<Config::kQueryStages> q)
      : tile(tile), q(q) {
    first_position = order.first_position(tile.index) + order.positions_of(consumer * kWarpgroupRows);
    exist = first_position < order.end_position(tile.index);
    const int end = min_int(first_position + order.positions_of(kWarpgroupRows), order.problem.seqlen_q);
    live = exist ? live_kv_tiles<Config>(order, end - 1) : 0;
    passed = live_kv_tiles_of_tile<Config>(order, tile.index) - live;
  }

  // Of the thread's rows, number `row`: its position in the sequence, and its head among those of all sequences.
  __device__ __forceinline__ int position(const TileOrder& order, int thread, int row) const {
    return first_position + (fragment_row(thread, 2 * row) >> order.group_shift);
  }
  __device__ __forceinline__ int64_t head(const TileOrder& order, int thread, int row) const {
    const int group = 1 << order.group_shift;
    return (int64_t(tile.batch) * order.head_groups + tile.head_group) * group +
           (fragment_row(thread, 2 * row) & (group - 1));
  }
};

}  // namespace dash_attn::forward
