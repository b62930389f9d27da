// The 64 rows of a query tile that one warpgroup owns: where they lie, and which keys they see.
#pragma once

#include "../device/fragment.h"
#include "../device/mask.h"
#include "config.h"
#include "params.h"
#include "softmax.h"

namespace dash_attn::forward {

template <typename Config>
__device__ __forceinline__ Mask<Config::kCausal> make_mask(const TileOrder& order) {
  return {order.problem.seqlen_k, order.problem.diagonal};
}

template <typename Config>
struct WarpgroupRows {
  QueryTile tile;
  RingIndex<Config::kQueryStages> q;  // where their Q is
  int first_position;
  int live;    // KV tiles that they see
  int passed;  // KV tiles that are loaded before those, for other rows of the tile

  WarpgroupRows() = default;

  __device__ __forceinline__ WarpgroupRows(const TileOrder& order, const QueryTile& tile, int consumer,
                                           RingIndex<Config::kQueryStages> q)
      : tile(tile), q(q) {
    first_position = order.position_of(tile.index, consumer * kWarpgroupRows);
    live = live_kv_tiles<Config>(order, order.position_of(tile.index, consumer * kWarpgroupRows + kWarpgroupRows - 1));
    passed = live_kv_tiles<Config>(order, order.position_of(tile.index, Config::kQuery - 1)) - live;
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
