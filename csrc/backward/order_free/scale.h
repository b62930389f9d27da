// The fixed-point scale of each row of dQ in order-free accumulation, and which heads need the order. preprocess.h
// calls this (docs/order_free.md).
#pragma once

#include "../../contract/fixed_point.h"
#include "../../contract/tile_grid.h"
#include "../../contract/tile_shapes.h"
#include "../params.h"

namespace dash_attn::backward {

// The flag of the KV head that the owner's query head uses.
__device__ __forceinline__ int& needs_order(const Workspace& workspace, const SequencesOfCall& call,
                                            const TileOwner& owner) {
  return workspace.needs_order[owner.number * call.kv_heads + owner.head / call.group_size()];
}

// The inputs of a row's scale, beside the statistics of its KV head.
struct RowOfDq {
  float lse;  // infinite past the sequence's end
  float dout_norm, delta;
};

// The scale of a row, given the statistics of its KV head, and whether its head needs the order.
struct RowScale {
  uint8_t stored;
  bool needs_order;
};
__device__ __forceinline__ RowScale row_scale(HeadDims head_dims, bool is_fp16, const TileGrid& grid, int number,
                                              const RowOfDq& row, const KeyStatistics& keys) {
  const Mask& mask = grid.mask;
  const int seqlen_k = mask.sequence.seqlen_k;
  const double bound = fixed_point::row_bound(row.dout_norm, row.delta, keys.max_product, keys.max_element, seqlen_k,
                                              is_fp16);
  const int exponent = fixed_point::row_exponent(bound);
  const bool is_coarse =
      fixed_point::row_needs_order(exponent, row.dout_norm, keys.min_step_product, head_dims,
                                   mask.keys_of(number).count, grid.kv_tiles_of_queries(number, number + 1).count);
  return {fixed_point::stored_scale(max_int(exponent, fixed_point::kMinExponent)),
          is_coarse || fixed_point::keys_need_order(keys, seqlen_k) || fixed_point::lse_needs_order(row.lse)};
}

}  // namespace dash_attn::backward
