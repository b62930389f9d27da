// The 64 rows of a query tile that one warpgroup owns: their position, and which keys they see.
#pragma once

#include <type_traits>

#include "../device/fragment.h"
#include "config.h"
#include "params.h"

namespace dash_attn::forward {

// The number of warpgroups that have rows of the tile that ends at `end`.
__device__ __forceinline__ int warpgroups_with_rows(const KernelParams& params, int end) {
  return ceil_div(end - params.scheduler.first_position(end), params.scheduler.positions_in(kWarpgroupRows));
}

// The KV tiles that some row of a query tile sees. Those are loaded for it.
template <typename Variant>
__device__ __forceinline__ Range kv_tiles_of_query_tile(const KernelParams& params, const Sequence& sequence, int end) {
  // The last warpgroup that has rows computes all 64 rows, and reaches into the next tile if this one is short.
  const int first = params.scheduler.first_position(end);
  const int computed = first + warpgroups_with_rows(params, end) * params.scheduler.positions_in(kWarpgroupRows);
  return Variant::grid(sequence, params.window).kv_tiles_of_queries(first, computed);
}

// Waits for the tile announced with that buffer of Q, and for the Q itself. Returns the tile's end, or kNoMoreTiles.
template <typename Variant>
__device__ __forceinline__ int wait_for_tile(SharedStorage<Variant>& shared, RingIndex<Variant::kQueryStages> slot) {
  shared.q_full[slot.slot()].wait(slot.parity());
  return shared.tile(slot).end;
}

// The slopes of a thread's rows, if scores may depend on the head.
struct RowSlopes {
  float of[2];
};

// Where the thread's bits of dropout begin.
struct RowBits {
  const uint8_t* first;  // for the sequence's first key
};

// If a short tile reaches into the next one, both write the same bits to the same place: the bits of a row depend on
// the KV tiles that it sees, and not on those that are walked for other rows (softmax.h).
template <typename Variant>
struct WarpgroupRows {
  Sequence sequence;
  int first_position;  // past the sequence's end if the tile has no rows for this warpgroup
  // The KV tiles that are walked, from the last to the first: those that some row sees. Under a mask by key columns
  // these are ranks among the tiles that are loaded: from the first one that some row sees to the last one.
  Range kv;
  int passed_before;   // KV tiles loaded before those for other rows of the query tile
  int passed_after;    // KV tiles loaded after them
  std::conditional_t<Variant::Score::kMayHaveSlopes, RowSlopes, Empty> slopes;
  std::conditional_t<Variant::kKeepsRowOfBits, RowBits, Empty> bits;

  WarpgroupRows() = default;

  // `of_tile`: the KV tiles that are loaded for the query tile. `live`: under a mask by key columns, the rows' own.
  __device__ __forceinline__ WarpgroupRows(const KernelParams& params, const Sequence& of_sequence, int end,
                                           int consumer, Range of_tile, Range live)
      : sequence(of_sequence) {
    first_position = first_row(params, end, consumer);
    const bool exist = first_position < min_int(end, sequence.seqlen_q);
    kv = Variant::kHasColumns ? live : grid(params).kv_tiles_of_queries(first_position, end_position(params));
    if (!exist) { first_position = sequence.seqlen_q; }
    if (!exist || kv.count == 0) { kv = {of_tile.first, 0}; }
    passed_before = of_tile.end() - kv.end();
    passed_after = kv.first - of_tile.first;
  }

  // The position of a warpgroup's first row of the tile. It may be the tile's end.
  static __device__ __forceinline__ int first_row(const KernelParams& params, int end, int consumer) {
    return params.scheduler.first_position(end) + params.scheduler.positions_in(consumer * kWarpgroupRows);
  }

  // The KV tiles of which every row sees every key.
  __device__ __forceinline__ Range kv_seen_whole(const KernelParams& params) const {
    return grid(params).kv_tiles_seen_whole(first_position, end_position(params));
  }

  __device__ __forceinline__ Mask mask(const KernelParams& params) const { return grid(params).mask; }

  __device__ __forceinline__ int last_position(const KernelParams& params) const {
    return min_int(end_position(params), sequence.seqlen_q) - 1;
  }

  // The position in the sequence and the head of the thread's row `row`.
  __device__ __forceinline__ int position(const KernelParams& params, int thread, int row) const {
    return first_position + (fragment_row(thread, 2 * row) >> params.scheduler.group_shift);
  }
  static __device__ __forceinline__ int head(const KernelParams& params, int head_group, int thread, int row) {
    const int group = 1 << params.scheduler.group_shift;
    return head_group * group + (fragment_row(thread, 2 * row) & (group - 1));
  }

 private:
  __device__ __forceinline__ TileGrid grid(const KernelParams& params) const {
    return Variant::grid(sequence, params.window);
  }
  __device__ __forceinline__ int end_position(const KernelParams& params) const {
    return first_position + params.scheduler.positions_in(kWarpgroupRows);
  }
};

}  // namespace dash_attn::forward
