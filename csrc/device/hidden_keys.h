// Masks of fragments by key columns (contract/columns.h).
#pragma once

#include "../contract/columns.h"
#include "fragment.h"

namespace dash_attn {

__device__ __forceinline__ HiddenQueries read_hidden(const HiddenQueries* key) {
  const int4 x = __ldg(reinterpret_cast<const int4*>(key));
  return {{{x.x, x.y}, {x.z, x.w}}};
}

// Which of the 16 queries from `first_query` on do not see a key, by bit.
__device__ __forceinline__ uint32_t hidden_bits(const HiddenQueries& hidden, int first_query) {
  constexpr int kQueries = 16;
  uint32_t bits = 0;
#pragma unroll
  for (const QueryInterval& interval : hidden.of) {
    const int first = max(0, min(kQueries, interval.first - first_query));
    const int end = max(first, min(kQueries, interval.end - first_query));
    bits |= (1u << end) - (1u << first);
  }
  return bits;
}

// Hides keys from queries in a fragment whose rows are the queries from `first_query` on, and whose columns are kKeys
// keys, `keys` being the first one. A warp has 16 rows. Its lanes share the keys and tell each other which of the rows
// see them: that takes fewer registers and instructions than comparing each element.
template <int kKeys, int kSize>
__device__ __forceinline__ void hide_keys(float (&s)[kSize], int first_query, const HiddenQueries* keys, int thread) {
  constexpr int kColumnsOfSlice = 8, kSlicesOfHalf = 4, kHalf = kColumnsOfSlice * kSlicesOfHalf;
  static_assert(kHalf == 32 && kSize == kKeys / 2);
  const int lane = thread % 32, first_of_warp = first_query + fragment_row(thread, 0) - lane / 4;
#pragma unroll
  for (int first_key = 0; first_key < kKeys; first_key += 2 * kHalf) {
    // The lane's keys, 32 apart, in the two halves of a word.
    uint32_t own = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = first_key + half * kHalf + lane;
      if (first_key + half * kHalf < kKeys && key < kKeys) {
        own |= hidden_bits(read_hidden(keys + key), first_of_warp) << 16 * half;
      }
    }
#pragma unroll
    for (int i = 0; i < 2 * kSlicesOfHalf; ++i) {
      const int column = i / 2 * kColumnsOfSlice + fragment_column(lane, i % 2);
      const uint32_t hidden = __shfl_sync(0xffffffff, own, column) >> lane / 4;
#pragma unroll
      for (int bit = 0; bit < 4; ++bit) {  // half and row
        const int slice = first_key / kColumnsOfSlice + bit / 2 * kSlicesOfHalf + i / 2;
        const int number = 4 * slice + 2 * (bit % 2) + i % 2;
        if (number < kSize && (hidden >> 8 * bit & 1)) { s[number] = -INFINITY; }
      }
    }
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
