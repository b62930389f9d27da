// dash_attn._C: the CUDA implementation of dash_attn_C::dropout_bits, on the stable ABI.
// autograd.cpp gives the schema; the checks that a user meets are in dash_attn/dropout.
#include <cuda_runtime_api.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>

#include <cstdint>

#include "bindings/flat_arguments.h"
#include "bindings/op_checks.h"
#include "bindings/op_records.h"
#include "dropout/mask.h"
#include "launch/dropout.h"

namespace dash_attn {
namespace {

// Bits of dropout (csrc/dropout/mask.h) of `bits`' batch and heads. Writes bits, but for those that no pass looks at
// under the mask.
void dropout_bits(Tensor bits, const Tensor& rng_state, double p, int64_t seqlen_q, int64_t seqlen_k,
                  int64_t first_head, int64_t total_heads, int64_t first_query, int64_t first_key,
                  bool of_flash_attention_2, int64_t rounds, const MaskArguments& mask, int64_t sm_margin) {
  STD_TORCH_CHECK(bits.is_cuda() && bits.dim() == 5, "bits must be a CUDA tensor of 5 dimensions");
  const int32_t device = bits.get_device_index();
  GeneratorArguments arguments{};
  arguments.batch = to_int(bits.size(0), "batch");
  arguments.heads = to_int(bits.size(1), "the number of heads");
  check_bits(bits, arguments.batch, arguments.heads, device);
  arguments.sequence = {to_int(seqlen_q, "seqlen_q"), to_int(seqlen_k, "seqlen_k")};
  STD_TORCH_CHECK(seqlen_q < kUnbounded && seqlen_k < kUnbounded &&
                      bits.size(2) == dropout::num_blocks(arguments.sequence.seqlen_q) &&
                      bits.size(3) == dropout::num_blocks(arguments.sequence.seqlen_k),
                  "bits must have a block for every 32 of ", seqlen_q, " queries and ", seqlen_k, " keys");
  check_device(rng_state, "rng_state", device);
  const int64_t rank = rng_state.dim();
  STD_TORCH_CHECK(rng_state.scalar_type() == ScalarType::Long && rng_state.is_contiguous() &&
                      (rank == 1 || (rank == 2 && rng_state.size(0) == arguments.batch)) &&
                      rng_state.size(rank - 1) == 2,
                  "rng_state must be contiguous int64 (2,) or (", arguments.batch, ", 2)");
  STD_TORCH_CHECK(arguments.batch <= dropout::kMaxSequences && first_head >= 0 && total_heads <= dropout::kMaxHeads &&
                      first_head + arguments.heads <= total_heads,
                  "heads ", first_head, " to ", first_head + arguments.heads, " are not all of ", total_heads);
  STD_TORCH_CHECK(first_query >= 0 && first_key >= 0 && first_query % dropout::kBlockRows == 0 &&
                      first_key % dropout::kBlockRows == 0 && first_query + seqlen_q < kUnbounded &&
                      first_key + seqlen_k < kUnbounded,
                  "first_query and first_key must be multiples of 32, got ", first_query, " and ", first_key);
  arguments.bits = bits.data_ptr();
  arguments.state = static_cast<const int64_t*>(rng_state.data_ptr());
  arguments.state_of_sequence = rank == 2;
  arguments.total_heads = static_cast<int>(total_heads);
  arguments.first_head = static_cast<int>(first_head);
  arguments.first_query = static_cast<int>(first_query);
  arguments.first_key = static_cast<int>(first_key);
  arguments.p = checked_probability(p);
  arguments.of_flash_attention_2 = of_flash_attention_2;
  arguments.rounds = static_cast<int>(rounds);
  arguments.mask = mask.rule();
  arguments.num_sms = usable_sms(device, sm_margin, "rng_state");
  arguments.sm_margin = static_cast<int>(sm_margin);
  const torch::stable::accelerator::DeviceGuard guard(device);
  run_generator(arguments, current_stream(device));
}

}  // namespace
}  // namespace dash_attn

STABLE_TORCH_LIBRARY_IMPL(dash_attn_C, CUDA, library) {
  library.impl("dropout_bits", TORCH_BOX(dash_attn::flat<&dash_attn::dropout_bits>));
}
