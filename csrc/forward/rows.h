// The 64 rows of a query tile that one warpgroup owns: where they lie, and which keys they see.
#pragma once

#include <type_traits>

#include "../device/fragment.h"
#include "config.h"
#include "params.h"

namespace dash_attn::forward {

// Warpgroups that have rows of the tile with this end.
__device__ __forceinline__ int warpgroups_with_rows(const KernelParams& params, int end) {
  return ceil_div(end - params.scheduler.first_position(end), params.scheduler.positions_in(kWarpgroupRows));
}

// KV tiles that some row of a query tile sees: those that are loaded for it.
template <typename Variant>
__device__ __forceinline__ Range kv_tiles_of_query_tile(const KernelParams& params, const Sequence& sequence, int end) {
  // The last warpgroup that has rows computes all its 64, which reach into the next tile where this one is short.
  const int first = params.scheduler.first_position(end);
  const int computed = first + warpgroups_with_rows(params, end) * params.scheduler.positions_in(kWarpgroupRows);
  return Variant::grid(sequence, params.window).kv_tiles_of_queries(first, computed);
}

// The end of the tile that is announced with a slot of Q, when its Q is there; kNoMoreTiles at the end of the work.
template <typename Variant>
__device__ __forceinline__ int wait_for_tile(SharedStorage<Variant>& shared, RingIndex<Variant::kQueryStages> slot) {
  shared.q_full[slot.slot()].wait(slot.parity());
  return shared.tile(slot).end;
}

// Of a thread's rows, where scores depend on the head.
struct RowSlopes {
  float of[2];
};

// With dropout.
struct RowBits {
  const uint8_t* first;  // of the thread, at the sequence's first key
};

// Where a short tile reaches into the next, both write the same bits to the same place: a row's bits depend on the KV
// tiles that it sees, not on those that are walked for other rows (softmax.h).
template <typename Variant>
struct WarpgroupRows {
  Sequence sequence;
  int first_position;  // behind the sequence where the tile has fewer rows
  Range kv;            // KV tiles that some of them see, walked from the last to the first
  int passed_before;   // KV tiles that are loaded before those, for other rows of the tile
  int passed_after;    // and after those
  std::conditional_t<Variant::Score::kHasSlope, RowSlopes, Nothing> slopes;
  std::conditional_t<Variant::kKeepsRowOfBits, RowBits, Nothing> bits;

  WarpgroupRows() = default;

  __device__ __forceinline__ WarpgroupRows(const KernelParams& params, const Sequence& of_sequence, int end,
                                           int consumer)
      : sequence(of_sequence) {
    const Range of_tile = kv_tiles_of_query_tile<Variant>(params, sequence, end);
    first_position = first_row(params, end, consumer);
    const bool exist = first_position < min_int(end, sequence.seqlen_q);
    kv = grid(params).kv_tiles_of_queries(first_position, end_position(params));
    if (!exist) { first_position = sequence.seqlen_q; }
    if (!exist || kv.count == 0) { kv = {of_tile.first, 0}; }
    passed_before = of_tile.end() - kv.end();
    passed_after = kv.first - of_tile.first;
  }

  // Position of the first row of a warpgroup of the tile, of which it may be the end.
  static __device__ __forceinline__ int first_row(const KernelParams& params, int end, int consumer) {
    return params.scheduler.first_position(end) + params.scheduler.positions_in(consumer * kWarpgroupRows);
  }

  // KV tiles of which each row sees every key.
  __device__ __forceinline__ Range kv_seen_whole(const KernelParams& params) const {
    return grid(params).kv_tiles_seen_whole(first_position, end_position(params));
  }

  __device__ __forceinline__ Mask mask(const KernelParams& params) const { return grid(params).mask; }

  __device__ __forceinline__ int last_position(const KernelParams& params) const {
    return min_int(end_position(params), sequence.seqlen_q) - 1;
  }

  // Of the thread's rows, number `row`: its position in the sequence, and its head.
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
