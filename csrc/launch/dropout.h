// What the bindings call for the bits of dropout, on raw pointers. No torch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../contract/mask.h"

namespace dash_attn {

struct GeneratorArguments {
  void* bits;            // (batch, heads, blocks of queries, blocks of keys, 128 bytes)
  const int64_t* state;  // seed and offset, or those of each sequence
  bool state_of_sequence;
  int batch, heads;
  Sequence sequence;                                    // of the longest one
  int total_heads, first_head, first_query, first_key;  // the latter two multiples of a block's rows
  float p;
  bool of_flash_attention_2;
  int rounds;
  MaskRule mask;  // bits that no pass looks at under it may be left out
  int num_sms;    // that the kernel may use
  int sm_margin;  // SMs of the device beside those
};

void run_generator(const GeneratorArguments& arguments, cudaStream_t stream);

}  // namespace dash_attn
