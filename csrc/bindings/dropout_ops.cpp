// dash_attn._C: the CUDA implementation of dash_attn_C::dropout_bits and linear_with_dropout_bits, on the stable ABI.
// autograd.cpp gives the schemas; the checks that a user meets are in dash_attn/dropout.
#include <cuda_runtime_api.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>

#include <cstdint>
#include <limits>
#include <optional>

#include "bindings/op_checks.h"
#include "dropout/mask.h"
#include "launch/dropout.h"
#include "launch/linear.h"

namespace dash_attn {
namespace {

// What both ops are told of the bits besides tensors.
struct BitsOfCall {
  double p;
  int64_t seqlen_q, seqlen_k, first_head, total_heads, first_query, first_key;
  bool of_flash_attention_2;
  int64_t rounds;
  bool causal;
  int64_t window_left, window_right, attention_chunk, sm_margin;
};

GeneratorArguments read_bits(const Tensor& bits, const Tensor& rng_state, const BitsOfCall& call) {
  STD_TORCH_CHECK(bits.is_cuda() && bits.dim() == 5, "bits must be a CUDA tensor of 5 dimensions");
  const int32_t device = bits.get_device_index();
  GeneratorArguments arguments{};
  const auto& [p, seqlen_q, seqlen_k, first_head, total_heads, first_query, first_key, of_flash_attention_2, rounds,
               causal, window_left, window_right, attention_chunk, sm_margin] = call;
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
  arguments.mask = mask_rule(causal, window_left, window_right, attention_chunk);
  arguments.num_sms = usable_sms(device, sm_margin, "rng_state");
  arguments.sm_margin = static_cast<int>(sm_margin);
  return arguments;
}

// Bits of dropout (csrc/dropout/mask.h) of `bits`' batch and heads. Writes bits, but for those that no pass looks at
// under the mask.
void dropout_bits(Tensor bits, const Tensor& rng_state, double p, int64_t seqlen_q, int64_t seqlen_k,
                  int64_t first_head, int64_t total_heads, int64_t first_query, int64_t first_key,
                  bool of_flash_attention_2, int64_t rounds, bool causal, int64_t window_left, int64_t window_right,
                  int64_t attention_chunk, int64_t sm_margin) {
  const GeneratorArguments arguments =
      read_bits(bits, rng_state,
                {p, seqlen_q, seqlen_k, first_head, total_heads, first_query, first_key, of_flash_attention_2, rounds,
                 causal, window_left, window_right, attention_chunk, sm_margin});
  const int32_t device = bits.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  run_generator(arguments, current_stream(device));
}

// The stride of a matrix's rows as TMA takes it.
int64_t row_stride(const Tensor& matrix, const char* name, int64_t rows, int64_t columns, ScalarType dtype,
                   int32_t device) {
  STD_TORCH_CHECK(matrix.is_cuda() && matrix.get_device_index() == device, name, " must be on cuda:", device);
  STD_TORCH_CHECK(matrix.scalar_type() == dtype, name, " must have the dtype of x");
  STD_TORCH_CHECK(matrix.dim() == 2 && matrix.size(0) == rows && matrix.size(1) == columns, name, " must be (", rows,
                  ", ", columns, ")");
  const int64_t stride = rows == 1 ? columns : matrix.stride(0);
  STD_TORCH_CHECK(matrix.stride(1) == 1 && stride >= columns && stride % kVectorElements == 0, name,
                  " must have contiguous rows, a multiple of ", kVectorElements, " elements apart, got strides ",
                  matrix.stride(0), " and ", matrix.stride(1));
  STD_TORCH_CHECK(reinterpret_cast<std::uintptr_t>(matrix.data_ptr()) % kVectorBytes == 0, name,
                  " must start at a multiple of ", kVectorBytes, " bytes");
  return stride;
}

// out = x weight^T + bias, all of one 16-bit dtype, the sums in fp32; and bits as above, none where they have no
// element.
void linear_with_dropout_bits(Tensor out, Tensor bits, const Tensor& x, const Tensor& weight, OptionalTensor bias,
                              const Tensor& rng_state, double p, int64_t seqlen_q, int64_t seqlen_k, int64_t first_head,
                              int64_t total_heads, int64_t first_query, int64_t first_key, bool of_flash_attention_2,
                              int64_t rounds, bool causal, int64_t window_left, int64_t window_right,
                              int64_t attention_chunk, int64_t sm_margin) {
  STD_TORCH_CHECK(x.is_cuda() && x.dim() == 2 && weight.dim() == 2,
                  "x and weight must be CUDA tensors of 2 dimensions");
  const int32_t device = x.get_device_index();
  const ScalarType dtype = x.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::BFloat16 || dtype == ScalarType::Half, "x must be bfloat16 or float16");
  LinearArguments arguments{};
  arguments.dtype = dtype == ScalarType::BFloat16 ? Dtype::kBFloat16 : Dtype::kFloat16;
  arguments.rows = to_int(x.size(0), "the number of rows of x");
  arguments.depth = to_int(x.size(1), "the number of columns of x");
  arguments.columns = to_int(weight.size(0), "the number of rows of weight");
  constexpr int64_t kMost = std::numeric_limits<int>::max() / 2;  // room to round up to whole tiles
  STD_TORCH_CHECK(arguments.rows <= kMost && arguments.depth <= kMost && arguments.columns <= kMost,
                  "x and weight must have at most ", kMost, " rows and columns");
  STD_TORCH_CHECK(arguments.depth % kVectorElements == 0 && arguments.columns % kVectorElements == 0,
                  "the columns of x and the rows of weight must be multiples of ", kVectorElements, ", got ",
                  arguments.depth, " and ", arguments.columns);
  arguments.x_stride = row_stride(x, "x", arguments.rows, arguments.depth, dtype, device);
  arguments.weight_stride = row_stride(weight, "weight", arguments.columns, arguments.depth, dtype, device);
  arguments.out_stride = row_stride(out, "out", arguments.rows, arguments.columns, dtype, device);
  arguments.x = x.data_ptr();
  arguments.weight = weight.data_ptr();
  arguments.out = out.data_ptr();
  if (bias) {
    STD_TORCH_CHECK(bias->is_cuda() && bias->get_device_index() == device && bias->scalar_type() == dtype &&
                        bias->dim() == 1 && bias->size(0) == arguments.columns && bias->is_contiguous(),
                    "bias must be contiguous, (", arguments.columns, "), and of the dtype and device of x");
    STD_TORCH_CHECK(reinterpret_cast<std::uintptr_t>(bias->data_ptr()) % sizeof(uint32_t) == 0,
                    "bias must start at a multiple of ", sizeof(uint32_t), " bytes");
    arguments.bias = bias->data_ptr();
  }
  arguments.makes_bits = bits.numel() != 0;
  if (arguments.makes_bits) {
    STD_TORCH_CHECK(bits.is_cuda() && bits.get_device_index() == device, "bits must be on the device of x");
    arguments.bits =
        read_bits(bits, rng_state,
                  {p, seqlen_q, seqlen_k, first_head, total_heads, first_query, first_key, of_flash_attention_2, rounds,
                   causal, window_left, window_right, attention_chunk, sm_margin});
  } else {
    arguments.bits.of_flash_attention_2 = of_flash_attention_2;
    arguments.bits.rounds = static_cast<int>(rounds);
    arguments.bits.num_sms = usable_sms(device, sm_margin, "x");
    arguments.bits.sm_margin = static_cast<int>(sm_margin);
  }
  const torch::stable::accelerator::DeviceGuard guard(device);
  // Freed on return while the kernel may still run: torch's allocator hands it out again in stream order.
  const Tensor count = empty_bytes(sizeof(int), device);
  arguments.units_taken = static_cast<int*>(count.data_ptr());
  run_linear(arguments, current_stream(device));
}

}  // namespace
}  // namespace dash_attn

STABLE_TORCH_LIBRARY_IMPL(dash_attn_C, CUDA, library) {
  library.impl("dropout_bits", TORCH_BOX(&dash_attn::dropout_bits));
  library.impl("linear_with_dropout_bits", TORCH_BOX(&dash_attn::linear_with_dropout_bits));
}
