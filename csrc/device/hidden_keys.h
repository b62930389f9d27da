// Masks of fragments by key columns (contract/columns.h).
#pragma once

#include "../contract/columns.h"
#include "fragment.h"

namespace dash_attn {

__device__ __forceinline__ HiddenQueries read_hidden(const HiddenQueries* key) {
  const int4 x = __ldg(reinterpret_cast<const int4*>(key));
  return {{{x.x, x.y}, {x.z, x.w}}};
}

// Hides keys from queries in a fragment whose rows are queries: the thread has rows `queries`, and `keys` begins with the
// key of its register 0.
template <int kSize>
__device__ __forceinline__ void hide_keys(float (&s)[kSize], const int (&queries)[kRowsPerThread],
                                          const HiddenQueries* keys) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    if (row_of(i) != 0) { continue; }
    const HiddenQueries hidden = read_hidden(keys + fragment_column(0, i));
    constexpr int kToSecondRow = 2;  // registers
    if (hidden.contains(queries[0])) { s[i] = -INFINITY; }
    if (hidden.contains(queries[1])) { s[i + kToSecondRow] = -INFINITY; }
  }
}

// The same for a fragment whose rows are keys: `keys` begins with the key of its register 0, whose query is `query`.
template <int kSize>
__device__ __forceinline__ void hide_queries(float (&s)[kSize], int query, const HiddenQueries* keys) {
#pragma unroll
  for (int row = 0; row < kRowsPerThread; ++row) {
    const HiddenQueries hidden = read_hidden(keys + fragment_row(0, 2 * row)).counted_from(query);
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if (row_of(i) == row && hidden.contains(fragment_column(0, i))) { s[i] = -INFINITY; }
    }
  }
}

}  // namespace dash_attn
