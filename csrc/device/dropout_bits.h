// The bits of dropout in the registers of a consumer, and how they are applied to its fragments.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../contract/mask.h"
#include "../dropout/fragment.h"
#include "elements.h"
#include "gemm.h"
#include "ptx.h"

namespace dash_attn::dropout {

// All bits of a call.
struct BitsView {
  const uint8_t* lines;  // [sequence][head][block of queries][block of keys][kBlockBytes]
  int heads, query_blocks, key_blocks;
  int head_lines;  // of a head; both this and the number of heads stay far below 2^31
  float scale;     // 1 / (1 - p), the factor of kept elements

  __device__ __forceinline__ const uint8_t* of_head(int sequence, int head) const {
    return lines + int64_t(sequence * heads + head) * head_lines * kBlockBytes;
  }
};

// Prefetches the bits of a tile into L2, by one thread, long before the consumers load them.
template <int kKeys>
__device__ __forceinline__ void prefetch(const BitsView& view, const uint8_t* of_head, int first_query, int end_query,
                                         int first_key) {
  const int first_block = first_key / kBlockRows;
  const int key_blocks = min_int(num_blocks(first_key + kKeys), view.key_blocks) - first_block;
  const int end = min_int(num_blocks(end_query), view.query_blocks);
  if (key_blocks <= 0) { return; }
  for (int block = first_query / kBlockRows; block < end; ++block) {
    const int line = block * view.key_blocks + first_block;
    ptx::bulk_prefetch(of_head + int64_t(line) * kBlockBytes, key_blocks * kBlockBytes);
  }
}

// The bits of a 64 x kColumns fragment whose rows are queries or keys.
template <FragmentRows kRows, int kColumns>
class FragmentBits {
  using Layout = FragmentLayout<kRows, kColumns>;
  using Loaded = typename Layout::Loaded;

 public:
  FragmentBits() = default;

  // `of_head` is the head's first line. The fragment's first row and column are counted from the start of the sequence.
  // Past the last block the last one is read again: elements outside the sequence have no weight, kept or dropped.
  __device__ __forceinline__ FragmentBits(const BitsView& view, const uint8_t* of_head, int first_row, int first_column,
                                          int thread) {
    Layout::gather(word_, first_row, first_column, thread, [&](int row_block, int column_block, int byte) {
      int query_block = Layout::kQueriesAreRows ? row_block : column_block;
      int key_block = Layout::kQueriesAreRows ? column_block : row_block;
      const bool is_past = query_block >= view.query_blocks || key_block >= view.key_blocks;
      // Clamping takes fewer instructions than a branch, but ptxas spills registers if the fragment cuts blocks.
      if constexpr (Layout::kWholeBlocks) {
        query_block = min_int(query_block, view.query_blocks - 1);
        key_block = min_int(key_block, view.key_blocks - 1);
      } else if (is_past) {
        return Loaded(0);
      }
      const int line = query_block * view.key_blocks + key_block;  // a head has far fewer lines than 2^31
      return load(of_head + byte + int64_t(line) * kBlockBytes);
    });
  }

  // For fragments whose rows are queries: where the bits of the thread's rows begin.
  static __device__ __forceinline__ const uint8_t* row_of(const BitsView& view, const uint8_t* of_head, int first_row,
                                                          int thread) {
    const typename Layout::RowPlace place = Layout::row_place(first_row, thread);
    const int block = min_int(place.block, view.query_blocks - 1);
    return of_head + place.byte + int64_t(block) * view.key_blocks * kBlockBytes;
  }
  // The words that are read from there on. They become bits only where the bits are used: an instruction that uses a
  // load waits for the load, and so would every product that is issued after that instruction.
  struct Read {
    uint32_t blocks[Layout::kBlocks];
  };
  static __device__ __forceinline__ Read read(const BitsView& view, const uint8_t* row, int first_column) {
    Read bits;
#pragma unroll
    for (int i = 0; i < Layout::kBlocks; ++i) {
      const int block = min_int(Layout::first_block(first_column) + i, view.key_blocks - 1);
      bits.blocks[i] = load(row + int64_t(block) * kBlockBytes);
    }
    return bits;
  }
  // The same without bounds checks, for a fragment whose keys all exist: the bits cover whole sequences.
  static __device__ __forceinline__ Read read_whole(const uint8_t* row, int first_column) {
    Read bits;
    row += int64_t(Layout::first_block(first_column)) * kBlockBytes;
#pragma unroll
    for (int i = 0; i < Layout::kBlocks; ++i) { bits.blocks[i] = load(row + i * kBlockBytes); }
    return bits;
  }
  __device__ __forceinline__ FragmentBits(Read bits, int first_column) {
    for (uint32_t& block : bits.blocks) { dash_attn::opaque(block); }  // keeps the work below from moving up
    Layout::arrange_row(word_, bits.blocks, first_column);
  }

  // For fragments whose rows are keys and whose columns are whole blocks: where the bits of the thread's keys are.
  struct Keys {
    uint32_t offset;  // from the start of a row of lines
    int shift;
  };
  static __device__ __forceinline__ Keys keys_of(const BitsView& view, int first_row, int thread) {
    const typename Layout::KeyPlace place = Layout::key_place(first_row, thread);
    const int block = min_int(place.block, view.key_blocks - 1);
    return {uint32_t(block) * kBlockBytes + place.byte, place.shift};
  }
  __device__ __forceinline__ FragmentBits(const BitsView& view, const uint8_t* of_head, const Keys& keys,
                                          int first_column) {
    static_assert(Layout::kWholeBlocks);
    Layout::gather_of_keys(word_, keys.shift, first_column, [&](int block, int) {
      const int line = min_int(block, view.query_blocks - 1) * view.key_blocks;
      return load(of_head + keys.offset + int64_t(line) * kBlockBytes);
    });
  }

  // Has everything that was derived from the bits computed again, so that it does not occupy registers.
  __device__ __forceinline__ void opaque() {
    for (uint32_t& word : word_) { dash_attn::opaque(word); }
  }

  // Register i of the fragment, or zero where it is dropped.
  __device__ __forceinline__ float keep(int i, float x) const {
    const int slice = i / 8, place = Layout::place_of(slice, i % 8 / 2) + i % 2 * Layout::kPitch;
    return __uint_as_float(__float_as_uint(x) & spread(slice, place, 0x1111 * sign_of_byte(place)));
  }

  // A pair of a rounded fragment: `kept` where the element is kept and `dropped` where it is dropped.
  __device__ __forceinline__ uint32_t choose(int slice, int pair, uint32_t kept, uint32_t dropped) const {
    const uint32_t mask = spread_of_pair(slice, pair);
    return (kept & mask) | (dropped & ~mask);
  }

  // Zeroes the dropped elements of rounded probabilities. If rows are queries, bf16 uses the FMA pipe, which leaves the
  // ALU pipe free: 2^16 or more is subtracted from a dropped element, and the result is clamped to zero. Probabilities
  // are far below 2^16. If rows are keys, this was measured to cost 1%.
  template <typename Element>
  __device__ __forceinline__ void drop(RegisterSlice (&p)[Layout::kSlices]) const {
#pragma unroll
    for (int slice = 0; slice < Layout::kSlices; ++slice) {
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        uint32_t& probabilities = p[slice][pair];
        if constexpr (Layout::kQueriesAreRows && std::is_same_v<Element, bf16>) {
          probabilities = ptx::multiply_add_relu_bf16(dropped_of_pair(slice, pair), kMinus2To127, probabilities);
        } else {
          probabilities &= spread_of_pair(slice, pair);
        }
      }
    }
  }

 private:
  static __device__ __forceinline__ Loaded load(const uint8_t* bits) {
    return ptx::load_here(reinterpret_cast<const Loaded*>(bits));
  }

  // A selector for permute_bytes: the sign of the byte that holds the bit.
  static __device__ constexpr int sign_of_byte(int place) { return 8 + place / 8; }

  // The selected signs, after the bit has been shifted to the top of its byte.
  __device__ __forceinline__ uint32_t spread(int slice, int place, int signs) const {
    return ptx::permute_bytes(word_[Layout::word_of(slice)] << (7 - place % 8), signs);
  }

  __device__ __forceinline__ uint32_t spread_of_pair(int slice, int pair) const {
    const int place = Layout::place_of(slice, pair);
    return spread(slice, place, 0x0011 * sign_of_byte(place) + 0x1100 * sign_of_byte(place + Layout::kPitch));
  }

  static constexpr uint32_t kMinus2To127 = 0xFF00FF00;  // a pair in bf16

  // A pair in bf16: zero if kept, else one of the four upper bits of an exponent, which is 2^-111 or more. One shift
  // thus serves four pairs.
  __device__ __forceinline__ uint32_t dropped_of_pair(int slice, int pair) const {
    constexpr int kLowestBit = 11;
    const int place = Layout::place_of(slice, pair), bit = kLowestBit + place % 4, shift = bit - place;
    const uint32_t word = word_[Layout::word_of(slice)];
    return ~(shift > 0 ? word << shift : word >> -shift) & 0x00010001 << bit;
  }

  uint32_t word_[Layout::kWords];
};

template <bool kDrops, FragmentRows kRows, int kColumns>
using BitsOf = std::conditional_t<kDrops, FragmentBits<kRows, kColumns>, Empty>;

}  // namespace dash_attn::dropout
