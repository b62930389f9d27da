// Which elements of a 64 x N wgmma accumulator a thread of a warpgroup holds, and how such a fragment is rounded to 16
// bits and written to a swizzled tile (PTX ISA 9.7.15.5.1.1, "accumulator D").
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "gemm.h"
#include "ptx.h"

namespace dash_attn {

// Register r of thread t holds element (fragment_row(t, r), fragment_column(t, r)). Shifts and masks take fewer
// instructions than divisions, because the compiler does not know that t is not negative.
__host__ __device__ constexpr int fragment_row(int thread, int r) {
  return (thread >> 5) * 16 + ((thread & 31) >> 2) + ((r / 2) % 2) * 8;
}
__host__ __device__ constexpr int fragment_column(int thread, int r) { return (r / 4) * 8 + (thread & 3) * 2 + r % 2; }

// A thread holds elements of two rows; register i belongs to row row_of(i) of them.
constexpr int kRowsPerThread = 2;
__host__ __device__ constexpr int row_of(int i) { return (i / 2) % 2; }

// LSE and D are stored in the order in which threads with those rows as fragment columns read them: row r at
// statistic_position(r). The 16 bytes from slice_statistics on hold what registers 8 * slice ... 8 * slice + 7 need.
__host__ __device__ constexpr int statistic_position(int r) {
  const int column = r % 16;
  return r - column + column % 8 / 2 * 4 + column / 8 * 2 + column % 2;
}
__host__ __device__ constexpr int slice_statistics(int thread, int slice) { return 16 * slice + (thread & 3) * 4; }

template <typename Element>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  if constexpr (std::is_same_v<Element, bf16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  } else {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  }
}

template <typename Element>
__device__ __forceinline__ float2 unpack(uint32_t pair) {
  if constexpr (std::is_same_v<Element, bf16>) {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000)};
  } else {
    return __half22float2(reinterpret_cast<const __half2&>(pair));
  }
}

// The larger magnitude of each half, with an arbitrary sign. Of a NaN and a number it is the number.
template <typename Element>
__device__ __forceinline__ uint32_t larger_of_pairs(uint32_t a, uint32_t b) {
  return std::is_same_v<Element, bf16> ? ptx::larger_magnitude_bf16(a, b) : ptx::larger_magnitude_f16(a, b);
}

__device__ __forceinline__ uint32_t negated_pair(uint32_t pair) { return pair ^ 0x80008000; }

__device__ __forceinline__ uint32_t multiply_bf16_pairs(uint32_t a, uint32_t b) {
  const __nv_bfloat162 product =
      __hmul2(reinterpret_cast<const __nv_bfloat162&>(a), reinterpret_cast<const __nv_bfloat162&>(b));
  return reinterpret_cast<const uint32_t&>(product);
}

// A pair times (low, high), rounded. In bf16 the factors are rounded first, which saves two of five instructions. In
// fp16 an unrounded factor may be out of range although the product is not.
template <typename Element>
__device__ __forceinline__ uint32_t multiply_pair(uint32_t pair, float low, float high) {
  if constexpr (std::is_same_v<Element, bf16>) {
    return multiply_bf16_pairs(pair, pack<Element>(low, high));
  } else {
    const float2 wide = __half22float2(reinterpret_cast<const __half2&>(pair));
    return pack<Element>(wide.x * low, wide.y * high);
  }
}

// Rounds an accumulator to 16 bits. Slice k holds columns 16k to 16k+15 as wgmma takes an A operand from registers. It
// is also four 8x8 matrices as stmatrix takes them: (rows 0-7, 8-15 of the warp) x (columns 0-7, 8-15 of the slice).
template <typename Element, int kAcc>
__device__ __forceinline__ void pack_slices(uint32_t (&packed)[kAcc / 8][4], const float (&acc)[kAcc]) {
#pragma unroll
  for (int i = 0; i < kAcc / 2; ++i) { packed[i / 4][i % 4] = pack<Element>(acc[2 * i], acc[2 * i + 1]); }
}

// The 16-byte row whose address a thread passes to stmatrix or ldmatrix for slice 0 of the transpose of a 64-row
// fragment, in 64 columns of a tile of kRows rows, whose first block is `blocks`: fragment column c is tile row c.
// `warp` and `lane` count within the warpgroup. The next slice is 16 rows further on.
template <typename Swizzle, int kRows>
__device__ __forceinline__ uint32_t transposed_address(const void* blocks, int warp, int lane) {
  constexpr int kWarpsPerBlock = Swizzle::kChunks / 2;
  const bool one_block = kWarpsPerBlock * kProductDepth == kWarpgroupRows;
  const int block = one_block ? 0 : warp / kWarpsPerBlock, warp_of_block = one_block ? warp : warp % kWarpsPerBlock;
  const int row = (lane / 16) * 8 + lane % 8;
  const int place = Swizzle::place(lane % 8, 2 * warp_of_block + (lane / 8) % 2);
  return ptx::shared_address(blocks) + (block * kRows + row) * Swizzle::kRowBytes + place * 16;
}

template <typename Swizzle, int kRows, int kSlices>
__device__ __forceinline__ void store_transposed(void* blocks, const RegisterSlice (&packed)[kSlices], int warp,
                                                 int lane) {
  const uint32_t address = transposed_address<Swizzle, kRows>(blocks, warp, lane);
#pragma unroll
  for (int k = 0; k < kSlices; ++k) { ptx::store_matrix_transposed(address + k * 2 * Swizzle::kAtomBytes, packed[k]); }
}

// The tile row whose address a thread passes to stmatrix or ldmatrix for slice k of that fragment.
template <typename Swizzle, int kRows>
__device__ __forceinline__ uint32_t slice_address(const void* tile, int first_row, int k, int warp, int lane) {
  const int row = first_row + warp * 16 + lane % 16;
  const int column_chunk = 2 * k + lane / 16;
  const int block = column_chunk / Swizzle::kChunks;
  return ptx::shared_address(tile) + row * Swizzle::kRowBytes + block * kRows * Swizzle::kRowBytes +
         Swizzle::place(row, column_chunk % Swizzle::kChunks) * 16;
}

// Copies between a 64-row fragment and rows first_row ... first_row + 63 of a tile of kRows rows.
template <typename Swizzle, int kRows, int kSlices>
__device__ __forceinline__ void store_rows(void* tile, int first_row, const RegisterSlice (&packed)[kSlices], int warp,
                                           int lane) {
#pragma unroll
  for (int k = 0; k < kSlices; ++k) {
    ptx::store_matrix(slice_address<Swizzle, kRows>(tile, first_row, k, warp, lane), packed[k]);
  }
}

template <typename Swizzle, int kRows, int kSlices>
__device__ __forceinline__ void load_rows(const void* tile, int first_row, RegisterSlice (&packed)[kSlices], int warp,
                                          int lane) {
#pragma unroll
  for (int k = 0; k < kSlices; ++k) {
    ptx::load_matrix(slice_address<Swizzle, kRows>(tile, first_row, k, warp, lane), packed[k]);
  }
}

}  // namespace dash_attn
