// Lines of the bits of dropout on the GPU: a warp makes those of one block of queries, a lane one word of each. Who
// makes a line does not change its bits.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../config/tile_shapes.h"
#include "../dropout/mask.h"
#include "../schedule/mask.h"

namespace dash_attn::dropout {

inline constexpr int kLinesOfUnit = 16;  // that a warp makes at a time

// The backward looks at all pairs of a tile of which it sees one: for a value of V that is not finite the bits of the
// others count too. A pair that nobody sees is no further from one that is seen than so many queries, and keys.
inline constexpr int kReach = 127;
constexpr bool reaches_no_further(int qk, int v) {
  const TileShape tile = backward_tile_shape({qk, v});
  return tile.query <= kReach + 1 && tile.key <= kReach + 1;
}
static_assert(reaches_no_further(64, 64) && reaches_no_further(96, 96) && reaches_no_further(128, 128) &&
              reaches_no_further(192, 128) && reaches_no_further(192, 192) && reaches_no_further(256, 256));

struct GeneratorParams {
  uint32_t* words;        // [sequence][head][block of queries][block of keys][kBlockWords]
  const uint64_t* state;  // seed and offset, or those of each sequence
  bool state_of_sequence;
  int batch, heads, query_blocks, key_blocks;
  // Where the call's bits lie among all that there are.
  int total_heads, first_head, first_query_block, first_key_block;
  int threshold;
  Mask mask;  // lines beyond the reach of a pair that is seen are not made; of the call's own rows

  // What a warp makes at a time: up to kLinesOfUnit lines of one block of queries.
  DASH_HOST_DEVICE constexpr int units_of_row() const { return ceil_div(key_blocks, kLinesOfUnit); }
  DASH_HOST_DEVICE constexpr int64_t units() const { return int64_t{batch} * heads * query_blocks * units_of_row(); }
};

// Lines first ... end - 1 of a row of blocks, a word of each. So many at a time as chains of instructions that do not
// wait for each other: for warps that have few others beside them.
template <int kAtATime, typename WordOf>
__device__ __forceinline__ void store_lines(uint32_t* words, int first, int end, WordOf&& word_of) {
#pragma unroll 1
  for (int block = first; block < end; block += kAtATime) {
    uint32_t made[kAtATime];
#pragma unroll
    for (int i = 0; i < kAtATime; ++i) { made[i] = word_of(uint32_t(block + i)); }
#pragma unroll
    for (int i = 0; i < kAtATime; ++i) {
      if (block + i < end) { words[int64_t(block + i) * kBlockWords] = made[i]; }
    }
  }
}

// The lines of a unit, `word` of each. Divisions are of 32 bits: of 64, they would take as long as the lines.
template <Mapping kMapping, int kRounds, int kAtATime>
__device__ __forceinline__ void make_lines(const GeneratorParams& params, uint32_t unit, int word) {
  const uint32_t units_of_row = params.units_of_row();
  const uint32_t row = unit / units_of_row;
  // Under a causal mask the first units of a row have lines and the last ones none. In turns, so that a warp that takes
  // every nth unit, and n is a multiple of those of a row, does not always have the same ones.
  const int first_of_unit = int((unit + row) % units_of_row) * kLinesOfUnit;
  const uint32_t of_sequence = row / uint32_t(params.query_blocks), sequence = of_sequence / uint32_t(params.heads);
  const int query_block = int(row - of_sequence * params.query_blocks);
  const int head = int(of_sequence - sequence * params.heads);
  const int first_query = query_block * kBlockRows;
  const int first_near = max_int(0, first_query - kReach);
  const int last_near = min_int(first_query + kBlockRows + kReach, params.mask.sequence.seqlen_q) - 1;
  const int first_key = max_int(0, params.mask.keys_of(first_near).first - kReach);
  const int end_key = params.mask.keys_of(last_near).end() + kReach;
  const int first = max_int(first_of_unit, first_key / kBlockRows);
  const int end = min_int(min_int(first_of_unit + kLinesOfUnit, params.key_blocks), ceil_div(end_key, kBlockRows));
  if (first >= end) { return; }
  const uint64_t* const state = params.state + (params.state_of_sequence ? 2 * int64_t{sequence} : 0);
  const Source source{
      {state[0], state[1]}, params.state_of_sequence ? 0u : sequence, uint32_t(params.total_heads), params.threshold};
  uint32_t* const words = params.words + int64_t{row} * params.key_blocks * kBlockWords + word;
  const uint32_t of_head = uint32_t(params.first_head + head), I = uint32_t(params.first_query_block + query_block);
  const uint32_t first_J = uint32_t(params.first_key_block);
  if constexpr (kMapping == Mapping::kFlashAttention2) {
    store_lines<1>(words, first, end,
                   [&](uint32_t J) { return flash_attention_2_word<kRounds>(source, of_head, I, first_J + J, word); });
  } else {
    const auto with_calls = [&](auto calls) {
      store_lines<kAtATime>(words, first, end, [&](uint32_t J) {
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
