// Tiles by TMA, in the blocks of a swizzle (gemm.h).
#pragma once

#include <cuda.h>
#include <cutlass/arch/barrier.h>

#include <cute/arch/copy_sm90_tma.hpp>

#include "../schedule/sequences.h"
#include "gemm.h"

namespace dash_attn {

// kRows x kColumns of one head of a sequence, from its row `first_row` on; `full` counts the bytes.
template <typename Swizzle, int kRows, int kColumns, typename Element>
__device__ __forceinline__ void load_tile(const CUtensorMap& map, cutlass::arch::ClusterTransactionBarrier& full,
                                          Element* tile, const RowOrigin& origin, int first_row, int head,
                                          uint64_t cache_hint) {
#pragma unroll
  for (int column = 0; column < kColumns; column += Swizzle::kColumns) {
    cute::SM90_TMA_LOAD_5D::copy(&map, reinterpret_cast<uint64_t*>(&full), cache_hint, tile + column * kRows, column,
                                 head, origin.first + first_row, origin.outer, origin.wrap);
  }
}

// The same to global memory, as a bulk operation of the calling thread: what lies past the sequence's end is left out.
template <typename Swizzle, int kRows, int kColumns, typename Element>
__device__ __forceinline__ void store_tile(const CUtensorMap& map, const Element* tile, const RowOrigin& origin,
                                           int first_row, int head) {
#pragma unroll
  for (int column = 0; column < kColumns; column += Swizzle::kColumns) {
    cute::SM90_TMA_STORE_5D::copy(&map, tile + column * kRows, column, head, origin.first + first_row, origin.outer,
                                  origin.wrap);
  }
}

}  // namespace dash_attn
