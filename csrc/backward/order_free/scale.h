// The fixed-point scale of each row of dQ in order-free accumulation, and which heads need the order: what preprocess.h
// decides and convert.h undoes (docs/order_free.md).
#pragma once

#include <type_traits>

#include "../../config/fixed_point.h"
#include "../../config/tile_shapes.h"
#include "../../schedule/tile_grid.h"
#include "../params.h"
#include "statistics.h"

namespace dash_attn::backward {

struct ScaleSettings {
  HeadDims head_dims;
  float softmax_scale, softcap;
  const float* slopes;  // ALiBi's, (sequence, head); null where there are none
  int64_t slopes_stride;
};

// Of the KV head that an owner's query head uses.
__device__ __forceinline__ NeedsOrder& needs_order(const Workspace& workspace, const SequencesOfCall& call,
                                                   const TileOwner& owner) {
  return workspace.needs_order[owner.number * call.kv_heads + owner.head / call.group_size()];
}

// Whether an owner's KV head needs the order whatever the rows of its group are, from its statistics. Called by a whole
// warp.
__device__ __forceinline__ void decide_order(const Workspace& workspace, const SequencesOfCall& call,
                                             const ScaleSettings& settings, const TileOwner& owner,
                                             int64_t first_query_chunk, const KeyStatistics& keys) {
  const int lane = threadIdx.x % 32;
  const int64_t chunks = int64_t(call.group_size()) * fixed_point::num_chunks(owner.lengths.seqlen_q);
  float max_query_norm = 0.f;
  for (int64_t i = lane; i < chunks; i += 32) {
    max_query_norm = larger(max_query_norm, workspace.query_norms[first_query_chunk + i]);
  }
  max_query_norm = largest_of_warp(max_query_norm);
  double largest_bias = 0;
  for (int i = 0; settings.slopes && i < call.group_size(); ++i) {
    const float slope = settings.slopes[owner.number * settings.slopes_stride + owner.head + i];
    const double bias = fabs(double(slope)) * max_int(owner.lengths.seqlen_q, owner.lengths.seqlen_k);
    if (!(bias <= largest_bias || largest_bias != largest_bias)) { largest_bias = bias; }  // NaN stays
  }
  const fixed_point::HeadStatistics head{max_query_norm, keys.max_norm, keys.max_product, keys.min_step_product};
  if (lane > 0) { return; }
  const bool by_head = fixed_point::needs_order(head, settings.softmax_scale, {settings.softcap, largest_bias},
                                                owner.lengths.seqlen_k);
  needs_order(workspace, call, owner).by_head = by_head;
  if (by_head) { *workspace.any_needs_order = 1; }
}

// The scale of a row of the group that `keys` are of, and whether its head needs the order for the row's sake.
struct RowScale {
  uint8_t stored;
  bool needs_order;
};
template <typename Geometry>
__device__ __forceinline__ RowScale row_scale(const ScaleSettings& settings, const Mask& mask, int row,
                                              float dout_norm, float delta, const KeyStatistics& keys) {
  const TileGrid grid{{Geometry::kQuery, Geometry::kKey, 1}, mask};
  const double bound =
      fixed_point::row_bound(dout_norm, delta, keys.max_product, keys.max_element, mask.sequence.seqlen_k,
                             std::is_same_v<typename Geometry::Element, cutlass::half_t>);
  const int exponent = fixed_point::row_exponent(bound);
  return {fixed_point::stored_scale(max_int(exponent, fixed_point::kMinExponent)),
          fixed_point::row_needs_order(exponent, dout_norm, keys.min_step_product, settings.head_dims,
                                       mask.keys_of(row).count, grid.kv_tiles_of_queries(row, row + 1).count)};
}

// The unit of a row, 2^-e; NaN for a row that is not finite.
__device__ __forceinline__ float unit_of(uint8_t scale) {
  const int exponent = fixed_point::stored_exponent(scale);
  return scale == fixed_point::kNotFinite ? NAN : __int_as_float((127 - exponent) << 23);
}

}  // namespace dash_attn::backward
