// Bits of dropout on the GPU: a warp makes lines of one block of queries, a lane one word of each.
#pragma once

#include <cstdint>

#include "../dropout/mask.h"
#include "../schedule/mask.h"

namespace dash_attn::dropout {

inline constexpr int kGeneratorThreads = 256;
inline constexpr int kLinesOfUnit = 16;  // that a warp makes at a time

struct GeneratorParams {
  uint32_t* words;        // [sequence][head][block of queries][block of keys][kBlockWords]
  const uint64_t* state;  // seed and offset, or those of each sequence
  bool state_of_sequence;
  int batch, heads, query_blocks, key_blocks;
  // Where the call's bits lie among all that there are.
  int total_heads, first_head, first_query_block, first_key_block;
  int threshold;
  Mask mask;  // lines of which no query sees a key are not made; of the call's own rows
};

template <Mapping kMapping, int kRounds>
__global__ void __launch_bounds__(kGeneratorThreads) generator_kernel(const GeneratorParams params) {
  const int units_of_row = ceil_div(params.key_blocks, kLinesOfUnit);
  const int64_t units = int64_t(params.batch) * params.heads * params.query_blocks * units_of_row;
  const int64_t warps = int64_t(gridDim.x) * (kGeneratorThreads / 32);
  const int word = threadIdx.x % 32;
  for (int64_t unit = int64_t(blockIdx.x) * (kGeneratorThreads / 32) + threadIdx.x / 32; unit < units; unit += warps) {
    const int64_t row = unit / units_of_row;
    const int first_of_unit = int(unit % units_of_row) * kLinesOfUnit;
    const int64_t of_sequence = row / params.query_blocks;
    const int query_block = int(row % params.query_blocks);
    const int head = int(of_sequence % params.heads), sequence = int(of_sequence / params.heads);
    const int first_query = query_block * kBlockRows;
    const int last_query = min_int(first_query + kBlockRows, params.mask.sequence.seqlen_q) - 1;
    const int first = max_int(first_of_unit, params.mask.keys_of(first_query).first / kBlockRows);
    const int end = min_int(min_int(first_of_unit + kLinesOfUnit, params.key_blocks),
                            ceil_div(params.mask.keys_of(last_query).end(), kBlockRows));
    const uint64_t* const state = params.state + (params.state_of_sequence ? 2 * int64_t(sequence) : 0);
    const Source source{{state[0], state[1]},
                        params.state_of_sequence ? 0u : uint32_t(sequence),
                        uint32_t(params.total_heads),
                        params.threshold};
    uint32_t* const words = params.words + row * params.key_blocks * kBlockWords + word;
    for (int block = first; block < end; ++block) {
      words[int64_t(block) * kBlockWords] = mask_word<kMapping, kRounds>(
          source, uint32_t(params.first_head + head), uint32_t(params.first_query_block + query_block),
          uint32_t(params.first_key_block + block), word);
    }
  }
}

}  // namespace dash_attn::dropout
