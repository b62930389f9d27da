// Which bits of dropout a thread of a warpgroup needs for its elements of a 64 x N wgmma accumulator
// (device/fragment.h), and how they are arranged in its registers. Plain C++ without CUDA or torch, so that tests can
// walk every thread without a GPU.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../host_device.h"
#include "mask.h"

namespace dash_attn::dropout {

enum class FragmentRows { kQueries, kKeys };

// In a slice of 16 columns a thread has 8 registers, as four pairs of neighbours, each of which is rounded to one word.
// A word of 32 bits holds the bits of up to four slices. Each half of the word holds one bit of every pair, like the
// rounded word.
template <FragmentRows kRows, int kColumns>
struct FragmentLayout {
  static constexpr bool kQueriesAreRows = kRows == FragmentRows::kQueries;
  // Whether the 32 columns of a load are one block, because fragments begin at blocks. Otherwise they may begin in the
  // middle of one.
  static constexpr bool kWholeBlocks = kColumns % kBlockRows == 0;
  static constexpr int kSlices = kColumns / 16, kSlicesOfLoad = kWholeBlocks ? 2 : 1;
  // If queries are rows and a fragment may begin in the middle of a block, a word holds three slices, which takes fewer
  // instructions to arrange.
  static constexpr int kSlicesOfWord = kQueriesAreRows && !kWholeBlocks ? 3 : 4;
  static constexpr int kWords = (kSlices + kSlicesOfWord - 1) / kSlicesOfWord;
  static constexpr int kPitch = 16;  // between the bits of a pair
  using Loaded = std::conditional_t<kQueriesAreRows, uint16_t, std::conditional_t<kWholeBlocks, uint64_t, uint32_t>>;

  // The word of a slice, and the place in it of the first bit of a pair.
  DASH_HOST_DEVICE static constexpr int word_of(int slice) { return slice / kSlicesOfWord; }
  DASH_HOST_DEVICE static constexpr int place_of(int slice, int pair) {
    int const slot = kSlicesOfWord == 4 ? slice % 4 : slice % 3 + slice / 3;
    return 4 * slot + (kQueriesAreRows ? pair : 2 * (pair % 2) + pair / 2);
  }

  // If queries are rows: the block of a thread's rows, and the byte that the thread reads of each line of that block.
  struct RowPlace {
    int block, byte;
  };
  DASH_HOST_DEVICE static RowPlace row_place(int first_row, int thread) {
    int const row = first_row + (thread >> 5) * 16, lane = thread & 31;
    // In mask.h's words the pairs of queries come before those of keys.
    int const unit = 4 * (lane >> 3) + (lane & 3), row_parity = (lane >> 2) & 1;
    return {row / kBlockRows, 8 * unit + 4 * (row / 16 % 2) + 2 * row_parity};
  }

  // The blocks that the fragment overlaps. A thread reads a Loaded of each.
  static constexpr int kBlocks = kWholeBlocks ? kSlices / 2 : kSlices / 2 + 1;
  DASH_HOST_DEVICE static int first_block(int first_column) {
    return static_cast<int>(static_cast<uint32_t>(first_column) / kBlockRows);  // a shift, because unsigned
  }

  // Arranges what a thread has read as its words.
  DASH_HOST_DEVICE static void arrange_row(uint32_t (&words)[kWords], uint32_t const (&blocks)[kBlocks],
                                           int first_column) {
    // The first byte of a block holds the first bits of pairs, with those of the first slice in its low half. The
    // second byte holds the second bits.
    if constexpr (kWholeBlocks) {
#ifdef __CUDACC__
#pragma unroll
#endif
      for (int i = 0; i < kWords; ++i) {
        words[i] = bytes_of(blocks[2 * i], 2 * i + 1 < kBlocks ? blocks[2 * i + 1] : 0, 0x5140);
      }
    } else {
      // A fragment that begins in the middle of a block ends at the end of one. The second word begins one slice before
      // its own.
      static_assert(kBlocks == 3 && kSlices == 5);
      int const shift = first_column / 16 % 2 == 0 ? 0 : 4;
      words[0] = bytes_of(blocks[0], blocks[1], 0x5140) >> shift;
      words[1] = bytes_of(blocks[1], blocks[2], 0x5140) >> shift;
    }
  }

  // If keys are rows: the block of a thread's keys, the byte from which the thread reads of each line of that block,
  // and the position of its bits in what it reads.
  struct KeyPlace {
    int block, byte, shift;
  };
  DASH_HOST_DEVICE static KeyPlace key_place(int first_row, int thread) {
    int const row = first_row + (thread >> 5) * 16, lane = thread & 31;
    int const unit = 4 * (lane & 3) + (lane >> 3), row_parity = (lane >> 2) & 1;
    return {row / kBlockRows, 8 * unit, 8 * row_parity + 4 * (row / 16 % 2)};
  }

  // Gathers the words of a thread whose keys are there. load(block of the columns, bytes from the place's byte) returns
  // a Loaded.
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

  // Gathers the words of a thread. The first row and column are counted from the start of the sequence and are
  // multiples of 16. load(block of the rows, block of the columns, byte in the block's line) returns a Loaded.
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
  // The bytes of low (0 to 3) and high (4 to 7) that the hex digits of `selector` name, the lowest digit first.
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

  // The half block of a slice, counted from the block of the first column. With whole blocks the compiler knows it.
  DASH_HOST_DEVICE static constexpr int half_of(int first_column, int slice) {
    return (kWholeBlocks ? 0 : first_column / 16 % 2) + slice;
  }
};

}  // namespace dash_attn::dropout
