#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "../generator/generate.h"
#include "dropout.h"
#include "launch.h"

namespace dash_attn {
namespace {

// `run` is called with the mapping and the rounds as types.
template <typename Run>
void with_mapping(const GeneratorArguments& a, Run&& run) {
  using dropout::Mapping;
  using Seven = std::integral_constant<int, 7>;
  if (a.of_flash_attention_2 && a.rounds == 7) {
    return run(std::integral_constant<Mapping, Mapping::kFlashAttention2>{}, Seven{});
  }
  using BitSliced = std::integral_constant<Mapping, Mapping::kBitSliced>;
  if (!a.of_flash_attention_2 && a.rounds == 7) { return run(BitSliced{}, Seven{}); }
  if (!a.of_flash_attention_2 && a.rounds == 10) { return run(BitSliced{}, std::integral_constant<int, 10>{}); }
  throw std::runtime_error("dash_attn: no generator of dropout's bits has " + std::to_string(a.rounds) + " rounds");
}

dropout::GeneratorParams make_generator_params(const GeneratorArguments& a) {
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
  params.of_query_blocks = Divisor(params.query_blocks);
  params.of_heads = Divisor(params.heads);
  params.unit_shift = dropout::shift_of_small_units(params.key_blocks);
  if (params.units() > std::numeric_limits<int>::max()) {
    throw std::runtime_error("dash_attn: dropout's bits have more than 2^31 units");  // 275 GB at the least
  }
  return params;
}

}  // namespace

void run_generator(const GeneratorArguments& a, cudaStream_t stream) {
  dropout::GeneratorParams params = make_generator_params(a);
  constexpr int kWarps = dropout::kGeneratorThreads / 32;
  with_mapping(a, [&](auto mapping, auto rounds) {
    params.unit_shift =
        dropout::shift_of_units(params.rows(), params.key_blocks, dropout::generator_warps(mapping(), a.num_sms));
    const int64_t blocks = (params.units() + kWarps - 1) / kWarps;
    launch("the generator of dropout's bits", dropout::generator_kernel<mapping(), rounds()>, params,
           within_margin(blocks, dropout::kGeneratorThreads, 0, a.num_sms, a.sm_margin), stream);
  });
}

}  // namespace dash_attn
