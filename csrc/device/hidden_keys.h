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

// Which keys of a tile of kKeys are hidden from the 16 rows of a warp in a fragment whose rows are queries. The lanes
// share the keys and tell each other which of the rows see them: that takes fewer registers and instructions than
// comparing each element.
template <int kKeys>
struct HiddenOfWarp {
  static constexpr int kHalf = 32;
  uint32_t own[(kKeys + 2 * kHalf - 1) / (2 * kHalf)];  // of the lane's keys, 32 apart, each half of a word is one's
};

// The fragment's rows are the queries from `first_query` on, and its columns the keys from `keys` on.
template <int kKeys>
__device__ __forceinline__ HiddenOfWarp<kKeys> hidden_of_warp(int first_query, const HiddenQueries* keys, int thread) {
  constexpr int kHalf = HiddenOfWarp<kKeys>::kHalf;
  const int lane = thread % 32, first_of_warp = first_query + fragment_row(thread, 0) - lane / 4;
  HiddenOfWarp<kKeys> hidden{};
#pragma unroll
  for (int first_key = 0; first_key < kKeys; first_key += kHalf) {
    const int key = first_key + lane;
    if (key < kKeys) {
      hidden.own[first_key / (2 * kHalf)] |= hidden_bits(read_hidden(keys + key), first_of_warp)
                                             << first_key % (2 * kHalf) / 2;
    }
  }
  return hidden;
}

// Hides the keys in the fragment.
template <int kKeys, int kSize>
__device__ __forceinline__ void hide_keys(float (&s)[kSize], const HiddenOfWarp<kKeys>& of_warp, int thread) {
  constexpr int kColumnsOfSlice = 8, kSlicesOfHalf = 4, kHalf = HiddenOfWarp<kKeys>::kHalf;
  static_assert(kHalf == kColumnsOfSlice * kSlicesOfHalf && kSize == kKeys / 2);
  const int lane = thread % 32;
#pragma unroll
  for (int first_key = 0; first_key < kKeys; first_key += 2 * kHalf) {
    const uint32_t own = of_warp.own[first_key / (2 * kHalf)];
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
