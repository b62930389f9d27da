// Order-free accumulation, a consumer thread's part: its partial of dQ in units of each row's scale
// (docs/order_free.md).
#pragma once

#include "../../config/fixed_point.h"
#include "../dq_layout.h"
#include "../params.h"

namespace dash_attn::backward {

// Hands each quad of a thread's registers on to store(quad, x, y, z, w), as the bits of numbers of units plus
// kOffsetBits. Register i is multiplied by scale(i); mark(i) says that it is not finite.
template <int kRegisters, typename Scale, typename Mark, typename Store>
__device__ __forceinline__ void round_to_units(const float (&dq)[kRegisters], const Scale& scale, const Mark& mark,
                                               const Store& store) {
  constexpr uint32_t kSignificand = 0x007fffff, kExponentOf2 = 0x40000000;
  constexpr int kAtOnce = 8;
#pragma unroll
  for (int first = 0; first < kRegisters; first += kAtOnce) {
    // In one addition where no element has more than kFractionBits bits. That is so if and only if the sum is in
    // [2, 4), with the exponent of 2, whose only bit no smaller exponent has.
    const float* const x = dq + first;
    uint32_t bits[kAtOnce], any = 0, all = ~0u;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      bits[i] = __float_as_uint(fmaf(x[i], scale(first + i), fixed_point::kOffset));
      any |= bits[i];
      all &= bits[i];
    }
    if ((any & ~kSignificand) != kExponentOf2 || (all & kExponentOf2) == 0) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float units = x[i] * scale(first + i) * (1 << fixed_point::kFractionBits);
        bits[i] = uint32_t(__float2int_rn(units)) + fixed_point::kOffsetBits;
        // What is not finite in dS is so in every column of its row.
        if (!(fabsf(x[i]) < INFINITY)) { mark(first + i); }
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; i += 4) {
      store((first + i) / 4, __uint_as_float(bits[i]), __uint_as_float(bits[i + 1]), __uint_as_float(bits[i + 2]),
            __uint_as_float(bits[i + 3]));
    }
  }
}

// What a stored scale stands for: a float of which it is the exponent.
__device__ __forceinline__ float scale_of(uint8_t stored) { return __uint_as_float(uint32_t(stored) << 23); }

// A thread's partial where the columns of its fragment are queries.
template <typename Geometry>
class Rounding {
 public:
  using Layout = DqLayout<Geometry>;

  // `scales` are those of the tile's rows, in shared memory.
  __device__ __forceinline__ Rounding(const uint8_t* scales, int consumer, int thread)
      : first_((Geometry::kSplitDqByHeadDim ? 0 : consumer * Geometry::kDqQueries) + thread % 4 * Layout::kScales),
        packed_(*reinterpret_cast<const Packed*>(scales + first_)) {}

  // Arguments as of round_to_units. `tile_scales` are the tile's in global memory, where rows that are not finite are
  // marked.
  template <typename Store>
  __device__ __forceinline__ void round(const float (&dq)[Layout::kRegisters], uint8_t* tile_scales,
                                        const Store& store) const {
    round_to_units(
        dq, [&](int i) { return scale(i / 4, i % 2); },
        [&](int i) { tile_scales[first_ + i / 4 * 2 + i % 2] = fixed_point::kNotFinite; }, store);
  }

 private:
  // Two bytes for each quad of registers.
  struct alignas(Layout::kScales % 16 == 0 ? 16 : 4) Packed {
    uint32_t words[Layout::kScales / 4];
  };
  static_assert(sizeof(Packed) == Layout::kScales);

  __device__ __forceinline__ float scale(int quad, int i) const {
    const int byte = 2 * quad + i;
    const uint32_t word = packed_.words[byte / 4];
    const int shift = 23 - 8 * (byte % 4);
    return __uint_as_float((shift >= 0 ? word << max(shift, 0) : word >> max(-shift, 0)) & 0x7f800000u);
  }

  int first_;
  Packed packed_;
};

}  // namespace dash_attn::backward
