// The bits of dropout in the registers of a kernel's consumers, and what they do to its fragments.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../dropout/fragment.h"
#include "gemm.h"
#include "ptx.h"

namespace dash_attn::dropout {

// The bits of a call.
struct BitsView {
  const uint8_t* lines;  // [sequence][head][block of queries][block of keys][kBlockBytes]
  int heads, query_blocks, key_blocks;
  float scale;  // 1 / (1 - p): of what is kept

  __device__ __forceinline__ const uint8_t* of_head(int sequence, int head) const {
    return lines + (int64_t(sequence) * heads + head) * query_blocks * key_blocks * kBlockBytes;
  }
};

// Of a 64 x kColumns fragment whose rows are queries or keys.
template <FragmentRows kRows, int kColumns>
class FragmentBits {
  using Layout = FragmentLayout<kRows, kColumns>;
  using Loaded = typename Layout::Loaded;

 public:
  FragmentBits() = default;

  // `of_head` is the head's first line, the fragment's first row and column are counted in the sequence. Past the last
  // block nothing is kept.
  __device__ __forceinline__ FragmentBits(const BitsView& view, const uint8_t* of_head, int first_row, int first_column,
                                          int thread) {
    Layout::gather(word_, first_row, first_column, thread, [&](int row_block, int column_block, int byte) {
      const int query_block = Layout::kQueriesAreRows ? row_block : column_block;
      const int key_block = Layout::kQueriesAreRows ? column_block : row_block;
      if (query_block >= view.query_blocks || key_block >= view.key_blocks) { return Loaded(0); }
      const int64_t line = int64_t(query_block) * view.key_blocks + key_block;
      return __ldg(reinterpret_cast<const Loaded*>(of_head + line * kBlockBytes + byte));
    });
  }

  // So that no register is spent on what has been made of the bits.
  __device__ __forceinline__ void forget() {
    for (uint32_t& word : word_) { dash_attn::forget(word); }
  }

  // Register i of the fragment, or zero where it is dropped.
  __device__ __forceinline__ float keep(int i, float x) const {
    const int slice = i / 8, place = Layout::place_of(slice, i % 8 / 2) + i % 2 * Layout::kPitch;
    return __uint_as_float(__float_as_uint(x) & spread(slice, place, 0x1111 * sign_of_byte(place)));
  }

  // Sets what is dropped of a rounded fragment to zero.
  __device__ __forceinline__ void drop(RegisterSlice (&rounded)[Layout::kSlices]) const {
#pragma unroll
    for (int slice = 0; slice < Layout::kSlices; ++slice) {
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        const int place = Layout::place_of(slice, pair);
        const int signs = 0x0011 * sign_of_byte(place) + 0x1100 * sign_of_byte(place + Layout::kPitch);
        rounded[slice][pair] &= spread(slice, place, signs);
      }
    }
  }

 private:
  // For permute_bytes: the sign of the byte that has the bit.
  static __device__ constexpr int sign_of_byte(int place) { return 8 + place / 8; }

  // The signs of bytes, when the bit has come to the top of its own.
  __device__ __forceinline__ uint32_t spread(int slice, int place, int signs) const {
    return ptx::permute_bytes(word_[slice / 4] << (7 - place % 8), signs);
  }

  uint32_t word_[Layout::kWords];
};

// Without dropout every element is kept.
struct NoBits {
  __device__ __forceinline__ float keep(int, float x) const { return x; }
};

template <bool kDrops, FragmentRows kRows, int kColumns>
using BitsOf = std::conditional_t<kDrops, FragmentBits<kRows, kColumns>, NoBits>;

}  // namespace dash_attn::dropout
