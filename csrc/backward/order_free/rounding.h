// Order-free accumulation, a consumer thread's part: its partial of dQ in units of each row's scale
// (docs/order_free.md).
#pragma once

#include "../../config/fixed_point.h"
#include "../dq_layout.h"
#include "../params.h"

namespace dash_attn::backward {

template <typename Geometry>
class Rounding {
 public:
  using Layout = DqLayout<Geometry>;

  // `scales` are those of the tile's rows, in shared memory.
  __device__ __forceinline__ Rounding(const uint8_t* scales, int consumer, int thread)
      : first_((Geometry::kSplitDqByHeadDim ? 0 : consumer * Geometry::kDqQueries) + thread % 4 * Layout::kScales),
        packed_(*reinterpret_cast<const Packed*>(scales + first_)) {}

  // Hands each quad on to store(quad, x, y, z, w), as the bits of numbers of units plus kOffsetBits. `tile_scales` are
  // the tile's in global memory, where rows that are not finite are marked.
  template <typename Store>
  __device__ __forceinline__ void round(const float (&dq)[Layout::kRegisters], uint8_t* tile_scales,
                                        const Store& store) const {
#pragma unroll
    for (int quad = 0; quad < Layout::kQuads; quad += kQuadsAtOnce) { round_some(dq, quad, tile_scales, store); }
  }

 private:
  // Two bytes for each quad of registers.
  struct alignas(Layout::kScales % 16 == 0 ? 16 : 4) Packed {
    uint32_t words[Layout::kScales / 4];
  };
  static_assert(sizeof(Packed) == Layout::kScales);
  static constexpr int kQuadsAtOnce = 2;

  // In one addition where no element has more than kFractionBits bits. That is so if and only if the sum is in [2, 4),
  // with the exponent of 2, whose only bit no smaller exponent has.
  template <typename Store>
  __device__ __forceinline__ void round_some(const float (&dq)[Layout::kRegisters], int first_quad,
                                             uint8_t* tile_scales, const Store& store) const {
    const float* const x = dq + 4 * first_quad;
    uint32_t bits[4 * kQuadsAtOnce], any = 0, all = ~0u;
#pragma unroll
    for (int i = 0; i < 4 * kQuadsAtOnce; ++i) {
      bits[i] = __float_as_uint(fmaf(x[i], scale(first_quad + i / 4, i % 2), fixed_point::kOffset));
      any |= bits[i];
      all &= bits[i];
    }
    if ((any & ~kSignificand) != kExponentOf2 || (all & kExponentOf2) == 0) {
#pragma unroll
      for (int i = 0; i < 4 * kQuadsAtOnce; ++i) {
        const float units = x[i] * scale(first_quad + i / 4, i % 2) * (1 << fixed_point::kFractionBits);
        bits[i] = uint32_t(__float2int_rn(units)) + fixed_point::kOffsetBits;
        // What is not finite in dS is so in every column of its row.
        if (!(fabsf(x[i]) < INFINITY)) {
          tile_scales[first_ + (first_quad + i / 4) * 2 + i % 2] = fixed_point::kNotFinite;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kQuadsAtOnce; ++i) {
      const uint32_t* const quad = bits + 4 * i;
      store(first_quad + i, __uint_as_float(quad[0]), __uint_as_float(quad[1]), __uint_as_float(quad[2]),
            __uint_as_float(quad[3]));
    }
  }

  __device__ __forceinline__ float scale(int quad, int i) const {
    const int byte = 2 * quad + i;
    const uint32_t word = packed_.words[byte / 4];
    const int shift = 23 - 8 * (byte % 4);
    return __uint_as_float((shift >= 0 ? word << max(shift, 0) : word >> max(-shift, 0)) & 0x7f800000u);
  }

  static constexpr uint32_t kSignificand = 0x007fffff, kExponentOf2 = 0x40000000;

  int first_;
  Packed packed_;
};

}  // namespace dash_attn::backward
