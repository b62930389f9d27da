// Order-free accumulation, a consumer thread's part: its partial of dQ in units of each row's scale
// (docs/order_free.md).
#pragma once

#include "../../config/fixed_point.h"
#include "../../device/fragment.h"

namespace dash_attn::backward {

// What a stored scale stands for: the float of which it is the exponent.
__device__ __forceinline__ float scale_of(uint32_t stored) { return __uint_as_float(stored << 23); }

// Hands each quad of a thread's registers on to store(quad, x, y, z, w), as the bits of in_units; the scale of register
// i is scale(i).
template <int kRegisters, typename Scale, typename Store>
__device__ __forceinline__ void round_to_units(const float (&dq)[kRegisters], const Scale& scale, const Store& store) {
  const auto rounded = [&](int i) { return __uint_as_float(fixed_point::in_units(dq[i], scale(i))); };
#pragma unroll
  for (int i = 0; i < kRegisters; i += 4) {
    store(i / 4, rounded(i), rounded(i + 1), rounded(i + 2), rounded(i + 3));
  }
}

// What is not finite in dS is so in every column of its row: one column of a partial tells.
__device__ __forceinline__ void mark_unless_finite(float x, uint8_t& mark) {
  if (!(fabsf(x) < INFINITY)) { mark = fixed_point::kNotFinite; }
}

// A thread's partial of a fragment whose rows are queries. `scales` are those of its queries, in shared memory, `marks`
// the same in global memory, where rows that are not finite are marked.
template <int kRegisters, typename Store>
__device__ __forceinline__ void round_rows(const float (&dq)[kRegisters], const uint8_t* scales, uint8_t* marks,
                                           int thread, const Store& store) {
  const int upper = fragment_row(thread, 0), lower = fragment_row(thread, 2);
  const float of_upper = scale_of(scales[upper]), of_lower = scale_of(scales[lower]);
  mark_unless_finite(dq[0], marks[upper]);
  mark_unless_finite(dq[2], marks[lower]);
  round_to_units(dq, [&](int i) { return i / 2 % 2 == 0 ? of_upper : of_lower; }, store);
}

// The same where its columns are queries.
template <int kRegisters, typename Store>
__device__ __forceinline__ void round_columns(const float (&dq)[kRegisters], const uint8_t* scales, uint8_t* marks,
                                              int thread, const Store& store) {
#pragma unroll
  for (int quad = 0; quad < kRegisters / 4; ++quad) {
    const int query = fragment_column(thread, 4 * quad);
    mark_unless_finite(dq[4 * quad], marks[query]);
    mark_unless_finite(dq[4 * quad + 1], marks[query + 1]);
  }
  round_to_units(dq, [&](int i) { return scale_of(scales[fragment_column(thread, i)]); }, store);
}

}  // namespace dash_attn::backward
