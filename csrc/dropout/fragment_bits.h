// The bits of dropout as the threads of a wgmma fragment have its elements: whether P of a query and a key is kept.
#pragma once

#include <cstdint>

#include "../device/fragment.h"
#include "../device/ptx.h"
#include "../schedule/mask.h"
#include "mask.h"

namespace dash_attn::dropout {

// The bits of a call. Lines past the end of the tensor are read as its last ones: no row or key is there.
struct BitsView {
  const uint8_t* lines;  // [sequence][head][block of queries][block of keys][kBlockBytes]
  int heads, query_blocks, key_blocks;
  float scale;  // 1 / (1 - p): of what is kept

  __device__ __forceinline__ const uint8_t* of_head(int sequence, int head) const {
    return lines + (int64_t(sequence) * heads + head) * query_blocks * key_blocks * kBlockBytes;
  }
};

enum class FragmentRows { kQueries, kKeys };

// Of a 64 x kColumns fragment. A slice of 16 columns has 8 registers of a thread, in pairs of neighbours that are rounded
// to one word; four slices' bits are in a word. The bits of a pair lie kPitch apart.
template <FragmentRows kRows, int kColumns>
class FragmentBits {
 public:
  FragmentBits() = default;

  // `of_head` is the head's first line; the fragment's first row and column are counted in the sequence, in whole 16.
  __device__ __forceinline__ FragmentBits(const BitsView& view, const uint8_t* of_head, int first_row, int first_column,
                                          int thread) {
    const int row = first_row + (thread >> 5) * 16, lane = thread & 31;
    const int row_pair = lane >> 3, row_parity = (lane >> 2) & 1, column_pair = lane & 3;
    clear();
    if constexpr (kQueriesAreRows) {
      const int block_row = min_int(row / kBlockRows, view.query_blocks - 1);
      const uint8_t* const unit = of_head + int64_t(block_row) * view.key_blocks * kBlockBytes +
                                  8 * (4 * row_pair + column_pair) + 4 * (row / 16 % 2) + 2 * row_parity;
      const auto load = [&](int column) -> uint32_t {
        const int block = min_int(column / kBlockRows, view.key_blocks - 1);
        return __ldg(reinterpret_cast<const uint16_t*>(unit + int64_t(block) * kBlockBytes));
      };
#pragma unroll
      for (int slice = 0; slice < kSlices; slice += kSlicesOfLoad) {
        const int column = first_column + 16 * slice;
        const uint32_t bits = kWholeBlocks ? load(column) : load(column) >> 4 * (column / 16 % 2) & 0x0F0F;
        word_[slice / 4] |= bits << place_of(slice, 0);
      }
    } else {
      const int block_row = min_int(row / kBlockRows, view.key_blocks - 1);
      const uint8_t* const unit = of_head + int64_t(block_row) * kBlockBytes + 8 * (4 * column_pair + row_pair);
      const int shift = 8 * row_parity + 4 * (row / 16 % 2);
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        const int column = first_column + 16 * slice;
        const int block = min_int(column / kBlockRows, view.query_blocks - 1);
        const uint8_t* const half = unit + int64_t(block) * view.key_blocks * kBlockBytes + 4 * (column / 16 % 2);
        const uint32_t bits = __ldg(reinterpret_cast<const uint32_t*>(half)) >> shift & 0x000F000F;
        word_[slice / 4] |= bits << place_of(slice, 0);
      }
    }
  }

  // So that no register is spent on what has been made of the bits.
  __device__ __forceinline__ void forget() {
    for (uint32_t& word : word_) { dash_attn::forget(word); }
  }

  // Register i of the fragment, or zero where it is dropped.
  __device__ __forceinline__ float keep(int i, float x) const {
    const int slice = i / 8, place = place_of(slice, i % 8 / 2) + i % 2 * kPitch;
    return __uint_as_float(__float_as_uint(x) & spread(slice, place, 0x1111 * sign_of_byte(place)));
  }

  // Sets what is dropped of a rounded fragment to zero.
  __device__ __forceinline__ void drop(RegisterSlice (&rounded)[kColumns / 16]) const {
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        const int place = place_of(slice, pair);
        rounded[slice][pair] &=
            spread(slice, place, 0x0011 * sign_of_byte(place) + 0x1100 * sign_of_byte(place + kPitch));
      }
    }
  }

 private:
  static constexpr bool kQueriesAreRows = kRows == FragmentRows::kQueries;
  // Whether a load's 32 columns are a block: fragments begin where one does.
  static constexpr bool kWholeBlocks = kColumns % kBlockRows == 0;
  static constexpr int kSlices = kColumns / 16, kSlicesOfLoad = kWholeBlocks ? 2 : 1;
  static constexpr int kPitch = kQueriesAreRows ? 8 : 16;

  // Of the first bit of a pair, in its word.
  static __device__ constexpr int place_of(int slice, int pair) {
    return kQueriesAreRows ? 16 * (slice % 4 / 2) + 4 * (slice % 2) + pair
                           : 4 * (slice % 4) + 2 * (pair % 2) + pair / 2;
  }

  // For permute_bytes: the sign of the byte that has the bit.
  static __device__ constexpr int sign_of_byte(int place) { return 8 + place / 8; }

  // The signs of bytes, when the bit has come to the top of its own.
  __device__ __forceinline__ uint32_t spread(int slice, int place, int signs) const {
    return ptx::permute_bytes(word_[slice / 4] << (7 - place % 8), signs);
  }

  __device__ __forceinline__ void clear() {
    for (uint32_t& word : word_) { word = 0; }
  }

  uint32_t word_[(kSlices + 3) / 4];
};

}  // namespace dash_attn::dropout
