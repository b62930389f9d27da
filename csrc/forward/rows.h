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

// The index of the tile that is announced with a slot of Q, when its Q is there; kNoMoreTiles at the end of the work.
template <typename Variant>
__device__ __forceinline__ int wait_for_tile(SharedStorage<Variant>& shared, RingIndex<Variant::kQueryStages> slot) {
  shared.q_full[slot.slot()].wait(slot.parity());
  return shared.tile[slot.slot()].index;
}

// Where a short tile reaches into the next, both write the same bits to the same place: a row's bits depend on the KV
// tiles that it sees, not on those that are walked for other rows (softmax.h).
template <typename Variant>
struct WarpgroupRows {
  int first_position;  // behind the sequence where the tile has fewer rows
  Range kv;            // KV tiles that some of them see, walked from the last to the first
  bool half_first;     // of the KV tile that comes first they see no key of the second half
  int passed_before;   // KV tiles that are loaded before those, for other rows of the tile
  int passed_after;    // and after those

  WarpgroupRows() = default;

  __device__ __forceinline__ WarpgroupRows(const QueryTileScheduler& scheduler, int tile, int consumer) {
    const Range of_tile = kv_tiles_of_query_tile<Variant>(scheduler, tile);
    first_position = scheduler.first_position(tile) + scheduler.positions_of(consumer * kWarpgroupRows);
    kv = Variant::grid(scheduler.sequence).kv_tiles_of_queries(first_position, end_position(scheduler));
    const bool exist = first_position < scheduler.end_position(tile);
    if (!exist) { first_position = scheduler.sequence.seqlen_q; }
    if (!exist || kv.count == 0) { kv = {of_tile.first, 0}; }
    const int last = min_int(end_position(scheduler), scheduler.sequence.seqlen_q) - 1;
    const int keys_end = Variant::grid(scheduler.sequence).mask.keys_of(last).end();
    half_first = keys_end - (kv.end() - 1) * Variant::kKey <= Variant::kKey / 2;
    passed_before = of_tile.end() - kv.end();
    passed_after = kv.first - of_tile.first;
  }

  // KV tiles of which each row sees every key.
  __device__ __forceinline__ Range kv_seen_whole(const QueryTileScheduler& scheduler) const {
    return Variant::grid(scheduler.sequence).kv_tiles_seen_whole(first_position, end_position(scheduler));
  }

  // Of the thread's rows, number `row`: its position in the sequence, and its head among those of all sequences.
  __device__ __forceinline__ int position(const QueryTileScheduler& scheduler, int thread, int row) const {
    return first_position + (fragment_row(thread, 2 * row) >> scheduler.group_shift);
  }
  __device__ __forceinline__ int64_t head(const QueryTileScheduler& scheduler, const QueryTile& tile, int thread,
                                          int row) const {
    const int group = 1 << scheduler.group_shift;
    return (int64_t(tile.batch) * scheduler.head_groups + tile.head_group) * group +
           (fragment_row(thread, 2 * row) & (group - 1));
  }

 private:
  __device__ __forceinline__ int end_position(const QueryTileScheduler& scheduler) const {
    return first_position + scheduler.positions_of(kWarpgroupRows);
  }
};

}  // namespace dash_attn::forward
