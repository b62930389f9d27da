// Generates lines of the bits of dropout on the GPU: a warp generates lines of one block of queries, and each lane one
// word of each line. The bits do not depend on which warp generates a line.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../contract/mask.h"
#include "../contract/tile_shapes.h"
#include "../dropout/mask.h"

namespace dash_attn::dropout {

// The backward reads the bits of all pairs of a tile in which it sees one pair: if a value of V is not finite, the
// other bits count too. A pair that nobody sees is at most this many queries, and keys, away from one that is seen.
inline constexpr int kReach = 127;
constexpr bool reaches_no_further(int qk, int v) {
  const TileShape tile = backward_tile_shape({qk, v});
  return tile.query <= kReach + 1 && tile.key <= kReach + 1;
}
// The forward needs only the lines of pairs that are seen, whatever its tiles are: P of any other pair is zero, which
// FragmentBits::drop leaves as it is. test_bits_that_nobody_may_look_at_change_nothing inverts those bits.
static_assert(reaches_no_further(64, 64) && reaches_no_further(96, 96) && reaches_no_further(128, 128) &&
              reaches_no_further(192, 128) && reaches_no_further(192, 192) && reaches_no_further(256, 256));

struct GeneratorParams {
  uint32_t* words;        // [sequence][head][block of queries][block of keys][kBlockWords]
  const uint64_t* state;  // seed and offset, or those of each sequence
  bool state_of_sequence;
  int batch, heads, query_blocks, key_blocks;
  // The position of the call's bits among all bits of the model.
  int total_heads, first_head, first_query_block, first_key_block;
  int threshold;
  Mask mask;  // of the call's own rows; lines out of reach of every visible pair are not generated

  // A unit is what a warp generates at a time: 1 / 2^unit_shift of the lines of a block of queries that are generated.
  // See partition.h.
  int unit_shift;
  Divisor of_query_blocks, of_heads;

  constexpr int64_t rows() const { return int64_t{batch} * heads * query_blocks; }
  constexpr int64_t units() const { return rows() << unit_shift; }
};

// Stores one word of each of lines first ... end - 1 of a row of blocks.
template <typename WordOf>
__device__ __forceinline__ void store_lines(uint32_t* words, int first, int end, WordOf&& word_of) {
#pragma unroll 1
  for (int block = first; block < end; ++block) { words[int64_t(block) * kBlockWords] = word_of(uint32_t(block)); }
}

// Generates word `word` of each line of a unit. The host has prepared the divisors: other divisions would take as long
// as lines.
template <Mapping kMapping, int kRounds>
__device__ __forceinline__ void make_lines(const GeneratorParams& params, uint32_t unit, int word) {
  const int row = int(unit >> params.unit_shift), of_sequence = row / params.of_query_blocks;
  const int sequence = of_sequence / params.of_heads, head = of_sequence - sequence * params.heads;
  const int from_last = row - of_sequence * params.query_blocks;
  const int query_block = params.query_blocks - 1 - from_last;  // the longest rows come first under a causal mask
  const int first_query = query_block * kBlockRows;
  const int first_near = max_int(0, first_query - kReach);
  const int last_near = min_int(first_query + kBlockRows + kReach, params.mask.sequence.seqlen_q) - 1;
  const int first_key = max_int(0, params.mask.keys_of(first_near).first - kReach);
  const int end_key = params.mask.keys_of(last_near).end() + kReach;
  // Partitioned evenly, also under a mask: warps that start together then end together.
  const int first_of_row = first_key / kBlockRows;
  const int lines = min_int(params.key_blocks, ceil_div(end_key, kBlockRows)) - first_of_row;
  const int part = int(unit) & ((1 << params.unit_shift) - 1);
  const int first = first_of_row + int(int64_t{lines} * part >> params.unit_shift);
  const int end = first_of_row + int(int64_t{lines} * (part + 1) >> params.unit_shift);
  if (first >= end) { return; }
  const uint64_t* const state = params.state + (params.state_of_sequence ? 2 * int64_t{sequence} : 0);
  const uint32_t number = params.state_of_sequence ? 0 : sequence;
  const Source source{{state[0], state[1]}, number, uint32_t(params.total_heads), params.threshold};
  const int64_t first_line = (int64_t{of_sequence} * params.query_blocks + query_block) * params.key_blocks;
  uint32_t* const words = params.words + first_line * kBlockWords + word;
  const uint32_t of_head = uint32_t(params.first_head + head), I = uint32_t(params.first_query_block + query_block);
  const uint32_t first_J = uint32_t(params.first_key_block);
  if constexpr (kMapping == Mapping::kFlashAttention2) {
    store_lines(words, first, end,
                [&](uint32_t J) { return flash_attention_2_word<kRounds>(source, of_head, I, first_J + J, word); });
  } else {
    const auto with_calls = [&](auto calls) {
      store_lines(words, first, end, [&](uint32_t J) {
        return bit_sliced_word_of_calls<kRounds, calls()>(source, of_head, I, first_J + J, word);
      });
    };
    switch (calls_of_word(params.threshold)) {
      case 0:
        return with_calls(std::integral_constant<int, 0>{});
      case 1:
        return with_calls(std::integral_constant<int, 1>{});
      default:
        return with_calls(std::integral_constant<int, 2>{});
    }
  }
}

}  // namespace dash_attn::dropout
