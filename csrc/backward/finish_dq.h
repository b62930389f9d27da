// Finishing dQ: the last partial of a query tile makes dQ of the sum. The adder (dq_add.h) loads the sum to where the
// consumers would stage the partial, which they hold in registers. They add the two, scale and round, and stage dQ
// there, for the adder to store. A sum is thus read from L2, where it has just been written, and no later kernel reads
// it. These additions are the same as the bulk operations', and so are the bits.
#pragma once

#include "../device/warp_roles.h"
#include "dq_layout.h"
#include "order_free/rounding.h"
#include "storage.h"

namespace dash_attn::backward {

// total_of_row(row) returns, for each row of a thread, a function of (x, before): the total of the partial x and the
// sum of lower ranks, which is zero if there are none. Called by a whole warpgroup.
template <typename Variant, typename TotalOfRow, int kRegisters>
__device__ __forceinline__ void finish_dq(float* buffer, const float (&dq)[kRegisters], bool has_sum, float scale,
                                          int consumer, int thread, const TotalOfRow& total_of_row) {
  using Layout = DqLayout<Variant>;
  using Element = typename Variant::Element;
  const float2* const sums = reinterpret_cast<const float2*>(buffer);
  RegisterSlice packed[kRegisters / 8];
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const auto total = total_of_row(row);
#pragma unroll
    for (int quad = 0; quad < Layout::kQuads; ++quad) {
      float2 before = make_float2(0.f, 0.f);
      if (has_sum) { before = sums[2 * Layout::quad_index(consumer, quad, thread) + row]; }
      const float* const x = dq + 4 * quad + 2 * row;
      packed[quad / 2][quad % 2 * 2 + row] =
          pack<Element>(total(x[0], before.x) * scale, total(x[1], before.y) * scale);
    }
    compiler_fence();  // one row at a time takes fewer registers
  }
  sync_warpgroup(1 + consumer);  // dQ overwrites the sums of other threads
  Element* const rows = rows_in_dq_buffer<Variant>(buffer, consumer);
  store_rows<typename Variant::Swizzle, kWarpgroupRows>(rows, 0, packed, thread / 32, thread % 32);
}

// The same in fp32.
template <typename Variant, int kRegisters>
__device__ __forceinline__ void finish_dq_in_fp32(float* buffer, const float (&dq)[kRegisters], bool has_sum,
                                                  float scale, int consumer, int thread) {
  finish_dq<Variant>(buffer, dq, has_sum, scale, consumer, thread, [has_sum](int) {
    return [has_sum](float x, float before) { return has_sum ? before + x : x; };  // else -0 would become 0
  });
}

// The same in units. `scales` and `marks` belong to the fragment's rows; `marks` is null if there are none.
template <typename Variant, int kRegisters>
__device__ __forceinline__ void finish_dq_in_units(float* buffer, const float (&dq)[kRegisters], bool has_sum,
                                                   float scale, int consumer, int thread, const uint8_t* scales,
                                                   const uint8_t* marks, int partials) {
  finish_dq<Variant>(buffer, dq, has_sum, scale, consumer, thread, [&](int row) {
    const int query = fragment_row(thread, 2 * row);
    return total_in_units(dq[2 * row], scales[query], marks ? marks + query : nullptr, partials);
  });
}

}  // namespace dash_attn::backward
