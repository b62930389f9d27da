// Loads and stores of tiles by TMA, in the blocks of a swizzle (gemm.h).
#pragma once

#include "../placement/sequences.h"
#include "barrier.h"
#include "gemm.h"
#include "ptx.h"

namespace dash_attn {

// Loads kRows x kColumns of one head of a sequence, from its row `first_row` on. `full` counts the bytes.
template <typename Swizzle, int kRows, int kColumns, typename Element>
__device__ __forceinline__ void load_tile(const CUtensorMap& map, TransactionBarrier& full, Element* tile,
                                          const RowOrigin& origin, int first_row, int head, uint64_t cache_hint) {
#pragma unroll
  for (int column = 0; column < kColumns; column += Swizzle::kColumns) {
    ptx::load_box(tile + column * kRows, map, {column, head, origin.first + first_row, origin.outer, origin.wrap},
                  &full, cache_hint);
  }
}

// The same to global memory, as a bulk operation of the calling thread. Rows past the sequence's end are not written.
template <typename Swizzle, int kRows, int kColumns, typename Element>
__device__ __forceinline__ void store_tile(const CUtensorMap& map, const Element* tile, const RowOrigin& origin,
                                           int first_row, int head) {
#pragma unroll
  for (int column = 0; column < kColumns; column += Swizzle::kColumns) {
    ptx::store_box(map, tile + column * kRows, {column, head, origin.first + first_row, origin.outer, origin.wrap});
  }
}

}  // namespace dash_attn
