// Which bits of dropout a thread of a warpgroup needs for its elements of a 64 x N wgmma accumulator
// (device/fragment.h), and how they lie in its registers. Plain C++: no CUDA, CuTe or torch, so that tests walk every
// thread without a GPU.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../host_device.h"
#include "mask.h"

namespace dash_attn::dropout {

enum class FragmentRows { kQueries, kKeys };

// A slice of 16 columns has 8 registers of a thread, in four pairs of neighbours that are rounded to one word. The bits
// of four slices are in a word of 32; those of a pair lie kPitch apart.
template <FragmentRows kRows, int kColumns>
struct FragmentLayout {
  static constexpr bool kQueriesAreRows = kRows == FragmentRows::kQueries;
  // Whether the 32 columns of a load are a block's: fragments begin where one does.
  static constexpr bool kWholeBlocks = kColumns % kBlockRows == 0;
  static constexpr int kSlices = kColumns / 16, kSlicesOfLoad = kWholeBlocks ? 2 : 1;
  static constexpr int kWords = (kSlices + 3) / 4;
  static constexpr int kPitch = kQueriesAreRows ? 8 : 16;
  using Loaded = std::conditional_t<kQueriesAreRows, uint16_t, std::conditional_t<kWholeBlocks, uint64_t, uint32_t>>;

  // Of the first bit of a pair, in word slice / 4.
  DASH_HOST_DEVICE static constexpr int place_of(int slice, int pair) {
    return kQueriesAreRows ? 16 * (slice % 4 / 2) + 4 * (slice % 2) + pair
                           : 4 * (slice % 4) + 2 * (pair % 2) + pair / 2;
  }

  // The words of a thread. First row and column are counted in the sequence, in whole 16. load(block of the rows, block
  // of the columns, byte in the block's line) is a Loaded.
  template <class Load>
  DASH_HOST_DEVICE static void gather(uint32_t (&words)[kWords], int first_row, int first_column, int thread,
                                      Load const& load) {
    int const row = first_row + (thread >> 5) * 16, lane = thread & 31;
    int const row_half = row / 16 % 2, row_pair = lane >> 3, row_parity = (lane >> 2) & 1, column_pair = lane & 3;
    // In the units of mask.h the pairs of queries come before those of keys.
    int const unit = 8 * (kQueriesAreRows ? 4 * row_pair + column_pair : 4 * column_pair + row_pair);
    for (uint32_t& word : words) word = 0;
#ifdef __CUDACC__
#pragma unroll
#endif
    for (int slice = 0; slice < kSlices; slice += kSlicesOfLoad) {
      // So that what is added to the first block is known to the compiler.
      int const half = (kWholeBlocks ? 0 : first_column / 16 % 2) + slice, column_half = half % 2;
      int const block = first_column / kBlockRows + half / 2;
      if constexpr (kQueriesAreRows) {
        uint32_t bits = load(row / kBlockRows, block, unit + 4 * row_half + 2 * row_parity);
        if constexpr (!kWholeBlocks) bits = bits >> 4 * column_half & 0x0F0F;
        words[slice / 4] |= bits << place_of(slice, 0);
      } else {
        Loaded const loaded = load(row / kBlockRows, block, unit + (kWholeBlocks ? 0 : 4 * column_half));
        for (int i = 0; i < kSlicesOfLoad; ++i) {
          uint32_t const of_all_keys = static_cast<uint32_t>(uint64_t{loaded} >> 32 * i);
          uint32_t const bits = of_all_keys >> (8 * row_parity + 4 * row_half) & 0x000F000F;
          words[(slice + i) / 4] |= bits << place_of(slice + i, 0);
        }
      }
    }
  }
};

}  // namespace dash_attn::dropout
