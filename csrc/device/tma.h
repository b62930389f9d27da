// Tiles by TMA, in blocks of 64 columns with the 128-byte swizzle.
#pragma once

#include <cuda.h>
#include <cutlass/arch/barrier.h>

#include <cute/arch/copy_sm90_tma.hpp>

#include "gemm.h"

namespace dash_attn {

// kRows x kColumns of a (batch, seqlen, heads, head_dim) tensor, from row `first_row` of a head; `full` counts the
// bytes.
template <int kRows, int kColumns, typename Element>
__device__ __forceinline__ void load_tile(const CUtensorMap& map, cutlass::arch::ClusterTransactionBarrier& full,
                                          Element* tile, int first_row, int head, int batch, uint64_t cache_hint) {
#pragma unroll
  for (int column = 0; column < kColumns; column += kSwizzleColumns) {
    cute::SM90_TMA_LOAD_4D::copy(&map, reinterpret_cast<uint64_t*>(&full), cache_hint, tile + column * kRows, column,
                                 first_row, head, batch);
  }
}

// The same to global memory, as a bulk operation of the calling thread: what lies outside the tensor is left out.
template <int kRows, int kColumns, typename Element>
__device__ __forceinline__ void store_tile(const CUtensorMap& map, const Element* tile, int first_row, int head,
                                           int batch) {
#pragma unroll
  for (int column = 0; column < kColumns; column += kSwizzleColumns) {
    cute::SM90_TMA_STORE_4D::copy(&map, tile + column * kRows, column, first_row, head, batch);
  }
}

}  // namespace dash_attn
