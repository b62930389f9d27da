// Order-free accumulation in a consumer thread: its partial of dQ in units of each row's scale, and the value of a sum
// of such partials (docs/order_free.md).
#pragma once

#include "../../contract/fixed_point.h"
#include "../../device/fragment.h"

namespace dash_attn::backward {

// The value of a stored scale, which is the exponent of a float.
__device__ __forceinline__ float scale_of(uint32_t stored) { return __uint_as_float(stored << 23); }

// The unit of a row, 2^-e, or NaN if the row is not finite.
__device__ __forceinline__ float unit_of(uint8_t stored) {
  const int exponent = fixed_point::stored_exponent(stored);
  return stored == fixed_point::kNotFinite ? NAN : __int_as_float((127 - exponent) << 23);
}

// The value, without the unit, of a sum of `partials` staged partials.
__device__ __forceinline__ float sum_of_units(uint32_t bits, int partials) {
  return float(int(bits - fixed_point::kOffsetBits * uint32_t(partials)));  // every partial contributes kOffsetBits
}

// Passes each quad of a thread's registers to store(quad, x, y, z, w), as the bits of in_units. scale(i) is the scale
// of register i.
template <int kRegisters, typename Scale, typename Store>
__device__ __forceinline__ void round_to_units(const float (&dq)[kRegisters], const Scale& scale, const Store& store) {
  const auto rounded = [&](int i) { return __uint_as_float(fixed_point::in_units(dq[i], scale(i))); };
#pragma unroll
  for (int i = 0; i < kRegisters; i += 4) {
    store(i / 4, rounded(i), rounded(i + 1), rounded(i + 2), rounded(i + 3));
  }
}

// Where rows of dQ that are not finite are marked in global memory: in place of their scales, and in a flag that says
// whether there are any.
struct Marks {
  uint8_t* of_rows;
  int* any;

  // A value of dS that is not finite affects every column of its row, so one column of a partial suffices.
  __device__ __forceinline__ void mark_unless_finite(float x, int row) const {
    if (fabsf(x) < INFINITY) { return; }
    of_rows[row] = fixed_point::kNotFinite;
    *any = 1;
  }
};

// Rounds a thread's partial of a fragment whose rows are queries. `scales` are those of its queries, in shared memory.
template <int kRegisters, typename Store>
__device__ __forceinline__ void round_rows(const float (&dq)[kRegisters], const uint8_t* scales, const Marks& marks,
                                           int thread, const Store& store) {
  const int upper = fragment_row(thread, 0), lower = fragment_row(thread, 2);
  const float of_upper = scale_of(scales[upper]), of_lower = scale_of(scales[lower]);
  marks.mark_unless_finite(dq[0], upper);
  marks.mark_unless_finite(dq[2], lower);
  round_to_units(dq, [&](int i) { return i / 2 % 2 == 0 ? of_upper : of_lower; }, store);
}

// Maps a row's last partial x and the sum of the others to the total of all `partials` of them.
struct TotalInUnits {
  float scale, unit;
  int partials;

  __device__ __forceinline__ float operator()(float x, float before) const {
    return sum_of_units(__float_as_uint(before) + fixed_point::in_units(x, scale), partials) * unit;
  }
};

// `x` is any element of the last partial. `mark` is null if the others have marked no row.
__device__ __forceinline__ TotalInUnits total_in_units(float x, const uint8_t& scale, const uint8_t* mark,
                                                       int partials) {
  const float unit = unit_of(mark ? __ldcg(mark) : scale);
  return {scale_of(scale), fabsf(x) < INFINITY ? unit : NAN, partials};
}

// Like round_rows, for a fragment whose columns are queries.
template <int kRegisters, typename Store>
__device__ __forceinline__ void round_columns(const float (&dq)[kRegisters], const uint8_t* scales,
                                              const Marks& marks, int thread, const Store& store) {
#pragma unroll
  for (int quad = 0; quad < kRegisters / 4; ++quad) {
    const int query = fragment_column(thread, 4 * quad);
    marks.mark_unless_finite(dq[4 * quad], query);
    marks.mark_unless_finite(dq[4 * quad + 1], query + 1);
  }
  round_to_units(dq, [&](int i) { return scale_of(scales[fragment_column(thread, i)]); }, store);
}

}  // namespace dash_attn::backward
