// The last partial of a query tile makes dQ of the sum: the consumers, which have the partial in registers, add what the
// adder (dq_add.h) has brought to where they would stage it, scale and round it, and stage dQ there, for the adder to
// store. So the sum is read where it has just been written, in L2, and by nobody behind the kernel. The additions are
// those of the bulk operations of the other partials, and the bits too.
#pragma once

#include "../device/warp_roles.h"
#include "dq_layout.h"
#include "storage.h"

namespace dash_attn::backward {

// A consumer's rows and columns of dQ take the first half of its part of the buffer.
template <typename Variant>
__device__ __forceinline__ typename Variant::Element* place_of_dq(float* buffer, int consumer) {
  constexpr int kPart = Variant::kDqTileFloats / Variant::kConsumers;
  static_assert(kPart * sizeof(float) % 1024 == 0, "TMA's swizzle has a period of 1,024 bytes");
  return reinterpret_cast<typename Variant::Element*>(buffer + consumer * kPart);
}

// `sum_full` completes when the sum is in `buffer`. Called by a whole warpgroup.
template <typename Variant, typename Barrier, int kRegisters>
__device__ __forceinline__ void finish_dq(float* buffer, const float (&dq)[kRegisters], DqSum sum,
                                          const Barrier& sum_full, uint32_t parity, float scale, int consumer,
                                          int thread) {
  using Layout = DqLayout<Variant>;
  using Element = typename Variant::Element;
  const float4* const sums = reinterpret_cast<const float4*>(buffer);
  const bool has_sum = sum == DqSum::kStaged;
  if (has_sum) { sum_full.wait(parity); }
  RegisterSlice packed[kRegisters / 8];
#pragma unroll
  for (int quad = 0; quad < Layout::kQuads; ++quad) {
    float4 before = make_float4(0.f, 0.f, 0.f, 0.f);
    if (has_sum) { before = sums[Layout::quad_index(consumer, quad, thread)]; }
    const float* const x = dq + 4 * quad;
    packed[quad / 2][quad % 2 * 2] = pack<Element>((before.x + x[0]) * scale, (before.y + x[1]) * scale);
    packed[quad / 2][quad % 2 * 2 + 1] = pack<Element>((before.z + x[2]) * scale, (before.w + x[3]) * scale);
  }
  sync_warpgroup(1 + consumer);  // dQ takes the place of other threads' sums
  store_rows<typename Variant::Swizzle, kWarpgroupRows>(place_of_dq<Variant>(buffer, consumer), 0, packed, thread / 32,
                                                        thread % 32);
}

}  // namespace dash_attn::backward
