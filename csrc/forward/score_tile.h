// Biases and masks of a tile of scores, whose rows are a warpgroup's.
#pragma once

#include "../device/fragment.h"
#include "rows.h"

namespace dash_attn::forward {

// ALiBi's bias of the rows' products with the keys of a KV tile.
struct RowsBias {
  float slopes[kRowsPerThread], first_distances[kRowsPerThread];

  __device__ __forceinline__ float slope(int i) const { return slopes[row_of(i)]; }
  __device__ __forceinline__ float distance(int i) const {
    return first_distances[row_of(i)] + float(fragment_column(0, i));
  }
};

// Only called, and only compiled, for scores that may have slopes.
template <typename Variant>
struct BiasOf {
  const KernelParams& params;
  const WarpgroupRows<Variant>& rows;
  int kv_tile, thread;

  __device__ __forceinline__ RowsBias operator()() const {
    RowsBias bias;
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row) {
      const int position = rows.position(params, thread, row);
      const int own_key = position + rows.sequence.seqlen_k - rows.sequence.seqlen_q;
      bias.slopes[row] = rows.slopes.of[row];
      bias.first_distances[row] = float(kv_tile * Variant::kKey + fragment_column(thread, 0) - own_key);
    }
    return bias;
  }
};

// Hides the keys of a KV tile that are after the last one that a row sees. With kRows = 1 leaves out the second row of
// each thread.
template <int kRows, typename Variant, int kSize>
__device__ __forceinline__ void hide_keys_after(float (&s)[kSize], const WarpgroupRows<Variant>& rows,
                                                const KernelParams& params, int kv_tile, int thread) {
  const Mask mask = rows.mask(params);
  const int column = kv_tile * Variant::kKey + fragment_column(thread, 0);
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    const int end = mask.keys_of(rows.position(params, thread, row)).end();
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if (row_of(i) == row && fragment_column(0, i) >= end - column) { s[i] = -INFINITY; }
    }
  }
}

// Hides the keys of a KV tile that the rows do not see, but for those that columns hide.
template <typename Variant, int kSize>
__device__ __forceinline__ void hide_tile(float (&s)[kSize], const WarpgroupRows<Variant>& rows,
                                          const KernelParams& params, int kv_tile, int thread) {
  const Mask mask = rows.mask(params);
  const int first_key = kv_tile * Variant::kKey, column = first_key + fragment_column(thread, 0);
  // Under a window few tiles are cut on both sides.
  const bool is_window = !starts_at_first_key(mask.kind);
  if (!is_window || first_key + Variant::kKey > mask.keys_of(rows.first_position).end()) {
    hide_keys_after<kRowsPerThread>(s, rows, params, kv_tile, thread);
  }
  if (is_window && first_key < mask.keys_of(rows.last_position(params)).first) {
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row) {
      const int first = mask.keys_of(rows.position(params, thread, row)).first;
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        if (row_of(i) == row && fragment_column(0, i) < first - column) { s[i] = -INFINITY; }
      }
    }
  }
}

}  // namespace dash_attn::forward
