// The last partial of a query tile makes dQ of the sum: the consumers, which have the partial in registers, add to it
// what the adder (dq_add.h) has brought to where they would stage it, scale and round, and stage dQ there, for the
// adder to store. So a sum is read where it has just been written, in L2, and by nobody behind the kernel. The
// additions are those that bulk operations do of the other partials, and so are the bits.
#pragma once

#include "../device/warp_roles.h"
#include "dq_layout.h"
#include "order_free/rounding.h"
#include "storage.h"

namespace dash_attn::backward {

// total_of_row(row) gives, of either row of a thread, a function of (x, before): what the partial x and the sum of
// lower ranks, zero if it has none, add up to. Called by a whole warpgroup.
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
    compiler_fence();  // one row at a time, which takes fewer registers
  }
  sync_warpgroup(1 + consumer);  // dQ takes the place of other threads' sums
  Element* const rows = rows_in_dq_buffer<Variant>(buffer, consumer);
  store_rows<typename Variant::Swizzle, kWarpgroupRows>(rows, 0, packed, thread / 32, thread % 32);
}

// The same in fp32.
template <typename Variant, int kRegisters>
__device__ __forceinline__ void finish_dq_in_fp32(float* buffer, const float (&dq)[kRegisters], bool has_sum,
                                                  float scale, int consumer, int thread) {
  finish_dq<Variant>(buffer, dq, has_sum, scale, consumer, thread, [has_sum](int) {
    return [has_sum](float x, float before) { return has_sum ? before + x : x; };  // or -0 would become 0
  });
}

// And in units; `scales` and `marks` are of the fragment's rows, the second null where there are none.
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
