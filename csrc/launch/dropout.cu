#include <algorithm>
#include <stdexcept>
#include <string>

#include "../generator/generate.h"
#include "arguments.h"
#include "dropout.h"
#include "launch.h"

namespace dash_attn {
namespace {

using dropout::Mapping;

void (*generator_of(const GeneratorArguments& a))(dropout::GeneratorParams) {
  if (a.of_flash_attention_2 && a.rounds == 7) { return dropout::generator_kernel<Mapping::kFlashAttention2, 7>; }
  if (!a.of_flash_attention_2 && a.rounds == 7) { return dropout::generator_kernel<Mapping::kBitSliced, 7>; }
  if (!a.of_flash_attention_2 && a.rounds == 10) { return dropout::generator_kernel<Mapping::kBitSliced, 10>; }
  throw std::runtime_error("dash_attn: no generator of dropout's bits has " + std::to_string(a.rounds) + " rounds");
}

}  // namespace

void run_generator(const GeneratorArguments& a, cudaStream_t stream) {
  dropout::GeneratorParams params;
  params.words = static_cast<uint32_t*>(a.bits);
  params.state = reinterpret_cast<const uint64_t*>(a.state);
  params.state_of_sequence = a.state_of_sequence;
  params.batch = a.batch;
  params.heads = a.heads;
  params.query_blocks = dropout::num_blocks(a.sequence.seqlen_q);
  params.key_blocks = dropout::num_blocks(a.sequence.seqlen_k);
  params.total_heads = a.total_heads;
  params.first_head = a.first_head;
  params.first_query_block = a.first_query / dropout::kBlockRows;
  params.first_key_block = a.first_key / dropout::kBlockRows;
  params.threshold = dropout::keep_threshold(a.p);
  params.mask = mask_of(a.mask, a.sequence);
  const int64_t units =
      int64_t{a.batch} * a.heads * params.query_blocks * ceil_div(params.key_blocks, dropout::kLinesOfUnit);
  constexpr int kWarps = dropout::kGeneratorThreads / 32, kBlocksOfSm = 2048 / dropout::kGeneratorThreads;
  const int64_t blocks = std::min<int64_t>((units + kWarps - 1) / kWarps, int64_t{a.num_sms} * kBlocksOfSm);
  launch("the generator of dropout's bits", generator_of(a), params,
         within_margin(blocks, dropout::kGeneratorThreads, 0, a.num_sms, a.sm_margin), stream);
}

}  // namespace dash_attn
