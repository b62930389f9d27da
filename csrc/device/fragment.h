// Where a thread of a warpgroup holds the elements of a 64 x N wgmma accumulator, and how such a fragment is packed to
// 16 bits and written to a swizzled tile (PTX ISA 9.7.15.5.1.1, "accumulator D").
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cutlass/numeric_types.h>

#include "gemm.h"
#include "ptx.h"

namespace dash_attn {

// Register r of thread t holds element (fragment_row(t, r), fragment_column(t, r)).
__host__ __device__ constexpr int fragment_row(int thread, int r) {
  return (thread / 32) * 16 + (thread % 32) / 4 + ((r / 2) % 2) * 8;
}
__host__ __device__ constexpr int fragment_column(int thread, int r) { return (r / 4) * 8 + (thread % 4) * 2 + r % 2; }

template <typename Element>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  if constexpr (std::is_same_v<Element, cutlass::bfloat16_t>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  } else {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  }
}

// Rounds an accumulator to 16 bits. Slice k then is columns 16k to 16k+15 as wgmma wants an A operand in registers, and
// also four 8x8 matrices as stmatrix wants them: (rows 0-7, 8-15 of the warp) x (columns 0-7, 8-15 of the slice).
template <typename Element, int kAcc>
__device__ __forceinline__ void pack_slices(uint32_t (&packed)[kAcc / 8][4], const float (&acc)[kAcc]) {
#pragma unroll
  for (int i = 0; i < kAcc / 2; ++i) { packed[i / 4][i % 4] = pack<Element>(acc[2 * i], acc[2 * i + 1]); }
}

// Writes the transpose of a 64-row fragment to a tile block of 64 columns: fragment column c becomes tile row c.
// `warp` and `lane` are those of the thread in its warpgroup.
template <int kSlices>
__device__ __forceinline__ void store_transposed(void* block, const uint32_t (&packed)[kSlices][4], int warp,
                                                 int lane) {
  const int row = (lane / 16) * 8 + lane % 8;
  const int chunk = (2 * warp + (lane / 8) % 2) ^ (lane % 8);
  const uint32_t address = cute::cast_smem_ptr_to_uint(block) + row * kSwizzleRowBytes + chunk * 16;
#pragma unroll
  for (int k = 0; k < kSlices; ++k) { ptx::store_matrix_transposed(address + k * 2 * kSwizzleAtomBytes, packed[k]); }
}

// Writes a 64-row fragment to rows first_row ... first_row + 63 of a tile of kRows rows.
template <int kRows, int kSlices>
__device__ __forceinline__ void store_rows(void* tile, int first_row, const uint32_t (&packed)[kSlices][4], int warp,
                                           int lane) {
  const int row = first_row + warp * 16 + lane % 16;
  const uint32_t address = cute::cast_smem_ptr_to_uint(tile) + row * kSwizzleRowBytes;
#pragma unroll
  for (int k = 0; k < kSlices; ++k) {
    const int column_chunk = 2 * k + lane / 16;
    const int block = column_chunk / 8;
    ptx::store_matrix(address + block * kRows * kSwizzleRowBytes + ((column_chunk % 8) ^ (row % 8)) * 16, packed[k]);
  }
}

}  // namespace dash_attn
