// Which bits of dropout a thread of a warpgroup needs for its elements of a 64 x N wgmma accumulator
// (device/fragment.h), and how they lie in its registers. Plain C++: no CUDA or torch, so that tests walk every
// thread without a GPU.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../host_device.h"
#include "mask.h"

namespace dash_attn::dropout {

enum class FragmentRows { kQueries, kKeys };

// A slice of 16 columns has 8 registers of a thread, in four pairs of neighbours that are rounded to one word. The bits
// of up to four slices are in a word of 32, of which each half has one of every pair, as the rounded word has.
template <FragmentRows kRows, int kColumns>
struct FragmentLayout {
  static constexpr bool kQueriesAreRows = kRows == FragmentRows::kQueries;
  // Whether the 32 columns of a load are a block's: fragments begin where one does. Else they may begin in its middle.
  static constexpr bool kWholeBlocks = kColumns % kBlockRows == 0;
  static constexpr int kSlices = kColumns / 16, kSlicesOfLoad = kWholeBlocks ? 2 : 1;
  // Where queries are rows and a fragment may begin in the middle of a block, a word has three: they are put in order
  // by fewer instructions.
  static constexpr int kSlicesOfWord = kQueriesAreRows && !kWholeBlocks ? 3 : 4;
  static constexpr int kWords = (kSlices + kSlicesOfWord - 1) / kSlicesOfWord;
  static constexpr int kPitch = 16;  // between the bits of a pair
  using Loaded = std::conditional_t<kQueriesAreRows, uint16_t, std::conditional_t<kWholeBlocks, uint64_t, uint32_t>>;

  // Of the first bit of a pair, in the word of its slice.
  DASH_HOST_DEVICE static constexpr int word_of(int slice) { return slice / kSlicesOfWord; }
  DASH_HOST_DEVICE static constexpr int place_of(int slice, int pair) {
    int const slot = kSlicesOfWord == 4 ? slice % 4 : slice % 3 + slice / 3;
    return 4 * slot + (kQueriesAreRows ? pair : 2 * (pair % 2) + pair / 2);
  }

  // Where queries are rows: the block of a thread's rows, and the byte of each line of that block that it reads.
  struct RowPlace {
    int block, byte;
  };
  DASH_HOST_DEVICE static RowPlace row_place(int first_row, int thread) {
    int const row = first_row + (thread >> 5) * 16, lane = thread & 31;
    // In the units of mask.h the pairs of queries come before those of keys.
    int const unit = 4 * (lane >> 3) + (lane & 3), row_parity = (lane >> 2) & 1;
    return {row / kBlockRows, 8 * unit + 4 * (row / 16 % 2) + 2 * row_parity};
  }

  // The blocks that the fragment reaches into, of each of which a thread reads a Loaded there.
  static constexpr int kBlocks = kWholeBlocks ? kSlices / 2 : kSlices / 2 + 1;
  DASH_HOST_DEVICE static int first_block(int first_column) {
    return static_cast<int>(static_cast<uint32_t>(first_column) / kBlockRows);  // a shift, as it is not negative
  }

  // The words of a thread, of what it has read.
  DASH_HOST_DEVICE static void arrange_row(uint32_t (&words)[kWords], uint32_t const (&blocks)[kBlocks],
                                           int first_column) {
    // The first byte of a block has the first bits of pairs, its low half those of the first slice; the second byte has
    // the second ones.
    if constexpr (kWholeBlocks) {
#ifdef __CUDACC__
#pragma unroll
#endif
      for (int i = 0; i < kWords; ++i) {
        words[i] = bytes_of(blocks[2 * i], 2 * i + 1 < kBlocks ? blocks[2 * i + 1] : 0, 0x5140);
      }
    } else {
      // A fragment that begins in the middle of a block ends with one. The second word begins a slice before its own.
      static_assert(kBlocks == 3 && kSlices == 5);
      int const shift = first_column / 16 % 2 == 0 ? 0 : 4;
      words[0] = bytes_of(blocks[0], blocks[1], 0x5140) >> shift;
      words[1] = bytes_of(blocks[1], blocks[2], 0x5140) >> shift;
    }
  }

  // Where keys are rows: the block of a thread's keys, the byte from which it reads of each line of that block, and
  // where its bits are in what it reads.
  struct KeyPlace {
    int block, byte, shift;
  };
  DASH_HOST_DEVICE static KeyPlace key_place(int first_row, int thread) {
    int const row = first_row + (thread >> 5) * 16, lane = thread & 31;
    int const unit = 4 * (lane & 3) + (lane >> 3), row_parity = (lane >> 2) & 1;
    return {row / kBlockRows, 8 * unit, 8 * row_parity + 4 * (row / 16 % 2)};
  }

  // The words of a thread there. load(block of the columns, bytes from the place's) is a Loaded.
  template <class Load>
  DASH_HOST_DEVICE static void gather_of_keys(uint32_t (&words)[kWords], int shift, int first_column,
                                              Load const& load) {
    for (uint32_t& word : words) word = 0;
#ifdef __CUDACC__
#pragma unroll
#endif
    for (int slice = 0; slice < kSlices; slice += kSlicesOfLoad) {
      int const half = half_of(first_column, slice);
      Loaded const loaded = load(first_column / kBlockRows + half / 2, kWholeBlocks ? 0 : 4 * (half % 2));
      for (int i = 0; i < kSlicesOfLoad; ++i) {
        uint32_t const of_all_keys = static_cast<uint32_t>(uint64_t{loaded} >> 32 * i);
        words[word_of(slice + i)] |= (of_all_keys >> shift & 0x000F000F) << place_of(slice + i, 0);
      }
    }
  }

  // The words of a thread. First row and column are counted in the sequence, in whole 16. load(block of the rows, block
  // of the columns, byte in the block's line) is a Loaded.
  template <class Load>
  DASH_HOST_DEVICE static void gather(uint32_t (&words)[kWords], int first_row, int first_column, int thread,
                                      Load const& load) {
    if constexpr (kQueriesAreRows) {
      RowPlace const place = row_place(first_row, thread);
      uint32_t blocks[kBlocks];
#ifdef __CUDACC__
#pragma unroll
#endif
      for (int i = 0; i < kBlocks; ++i) blocks[i] = load(place.block, first_block(first_column) + i, place.byte);
      arrange_row(words, blocks, first_column);
    } else {
      KeyPlace const place = key_place(first_row, thread);
      gather_of_keys(words, place.shift, first_column,
                     [&](int block, int byte) { return load(place.block, block, place.byte + byte); });
    }
  }

 private:
  // Those of low (0 to 3) and high (4 to 7) that the digits of `selector` name, the lowest first.
  DASH_HOST_DEVICE static uint32_t bytes_of(uint32_t low, uint32_t high, uint32_t selector) {
#ifdef __CUDA_ARCH__
    return __byte_perm(low, high, selector);
#else
    uint64_t const both = low | uint64_t{high} << 32;
    uint32_t bytes = 0;
    for (int i = 0; i < 4; ++i) bytes |= uint32_t(both >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
    return bytes;
#endif
  }

  // Of a slice, counted from the first column's block. So that with whole blocks it is known to the compiler.
  DASH_HOST_DEVICE static constexpr int half_of(int first_column, int slice) {
    return (kWholeBlocks ? 0 : first_column / 16 % 2) + slice;
  }
};

}  // namespace dash_attn::dropout
