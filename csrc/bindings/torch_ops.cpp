// dash_attn._C: the CUDA implementation of the ops dash_attn_C::forward and backward, on the stable ABI: preconditions,
// workspace, device and stream. The checks that a user meets are in operand_checks.h; these keep a direct caller from
// launching on bad input.
#include <cuda_runtime_api.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <tuple>

#include "bindings/flat_arguments.h"
#include "bindings/op_checks.h"
#include "bindings/op_records.h"
#include "contract/policy.h"
#include "contract/tile_shapes.h"
#include "dropout/mask.h"
#include "launch/arguments.h"

namespace dash_attn {
namespace {

constexpr std::uintptr_t kCarriedAlignment = 128;  // bulk copies need 16

// batch 0: of a pack, (total, heads, head_dim); else (batch, seqlen, heads, head_dim).
struct Shape {
  int64_t batch, seqlen, heads, head_dim;

  bool is_pack() const { return batch == 0; }
  int64_t rank() const { return is_pack() ? 3 : 4; }
  Shape with_head_dim(int64_t other) const { return {batch, seqlen, heads, other}; }
};

Shape shape_of(const Tensor& tensor, bool is_pack) {
  const int64_t first = is_pack ? 0 : 1;
  return {is_pack ? 0 : tensor.size(0), tensor.size(first), tensor.size(first + 1), tensor.size(first + 2)};
}

// The tensor as the kernels see it. A dimension of extent 1 has no meaningful stride; it gets the one it would
// have in a contiguous tensor, so that a TMA descriptor accepts it.
TensorView view_of(const Tensor& tensor, const char* name, const Shape& expected, ScalarType dtype, int32_t device) {
  check_device(tensor, name, device);
  STD_TORCH_CHECK(tensor.scalar_type() == dtype, name, " must have the dtype of q");
  const int64_t rank = expected.rank();
  STD_TORCH_CHECK(tensor.dim() == rank, name, " must have ", rank, " dimensions, got ", tensor.dim());
  const Shape shape = shape_of(tensor, expected.is_pack());
  STD_TORCH_CHECK(shape.batch == expected.batch && shape.seqlen == expected.seqlen && shape.heads == expected.heads &&
                      shape.head_dim == expected.head_dim,
                  name, " has shape (", shape.batch, ", ", shape.seqlen, ", ", shape.heads, ", ", shape.head_dim,
                  "), expected (", expected.batch, ", ", expected.seqlen, ", ", expected.heads, ", ", expected.head_dim,
                  ")");
  STD_TORCH_CHECK(tensor.stride(rank - 1) == 1, name, " must have a contiguous last dimension, its stride is ",
                  tensor.stride(rank - 1));
  const int64_t contiguous[3] = {shape.seqlen * shape.heads * shape.head_dim, shape.heads * shape.head_dim,
                                 shape.head_dim};
  int64_t strides[3] = {0, 0, 0};
  for (int64_t dim = 0; dim < rank - 1; ++dim) {
    int64_t& stride = strides[dim + 4 - rank];
    stride = tensor.size(dim) == 1 ? contiguous[dim + 4 - rank] : tensor.stride(dim);
    STD_TORCH_CHECK(stride > 0 && stride % kVectorElements == 0, name, " has stride ", stride, " in dimension ", dim,
                    ", expected a positive multiple of ", kVectorElements, " elements");
  }
  void* data = tensor.data_ptr();
  STD_TORCH_CHECK(reinterpret_cast<std::uintptr_t>(data) % kVectorBytes == 0, name, " must start at a multiple of ",
                  kVectorBytes, " bytes");
  return {data, strides[0], strides[1], strides[2]};
}

int checked_head_dim(int64_t head_dim, const char* name) {
  STD_TORCH_CHECK(head_dim >= 1 && head_dim <= kMaxHeadDim && head_dim % kVectorElements == 0, "the head_dim of ", name,
                  " is ", head_dim, ", expected a multiple of ", kVectorElements, " up to ", kMaxHeadDim);
  return static_cast<int>(head_dim);
}

using PackTensors = PackTensorsOf<Tensor>;
using ScoreTensors = ScoreTensorsOf<Tensor>;
using Dropout = DropoutOf<Tensor>;
using Cache = CacheOf<Tensor>;

// What both backward ops read.
struct BackwardInputs {
  Tensor dout, q, k, v, out, softmax_lse;

  static constexpr auto kMembers =
      std::make_tuple(&BackwardInputs::dout, &BackwardInputs::q, &BackwardInputs::k, &BackwardInputs::v,
                      &BackwardInputs::out, &BackwardInputs::softmax_lse);
};

// (heads,) in fp32, null where there is none.
float* of_heads(OptionalTensor tensor, const char* name, int64_t heads, int32_t device) {
  if (!tensor) return nullptr;
  check_device(*tensor, name, device);
  STD_TORCH_CHECK(tensor->scalar_type() == ScalarType::Float, name, " must be float32");
  STD_TORCH_CHECK(tensor->dim() == 1 && tensor->size(0) == heads, name, " must have ", heads, " elements");
  STD_TORCH_CHECK(tensor->is_contiguous(), name, " must be contiguous");
  return static_cast<float*>(tensor->data_ptr());
}

void read_scores(const ScoreTensors& scores, double softcap, int32_t device, AttentionArguments& arguments) {
  const auto& [sinks, slopes] = scores;
  arguments.sinks = of_heads(sinks, "sinks", arguments.heads, device);
  arguments.softcap = static_cast<float>(softcap);
  STD_TORCH_CHECK(arguments.softcap >= 0, "softcap is ", softcap, ", expected 0 or a positive number");
  if (!slopes) return;
  STD_TORCH_CHECK(softcap == 0, "softcap and alibi_slopes must not be given together");
  check_device(*slopes, "alibi_slopes", device);
  STD_TORCH_CHECK(slopes->scalar_type() == ScalarType::Float, "alibi_slopes must be float32");
  const int64_t rank = slopes->dim(), heads = arguments.heads;
  STD_TORCH_CHECK((rank == 1 || (rank == 2 && slopes->size(0) == arguments.batch)) && slopes->size(rank - 1) == heads,
                  "alibi_slopes must be (heads,) or (batch, heads), with ", heads, " heads and a batch of ",
                  arguments.batch);
  STD_TORCH_CHECK(heads == 1 || slopes->stride(rank - 1) == 1, "alibi_slopes must have a contiguous last dimension");
  arguments.alibi_slopes = static_cast<const float*>(slopes->data_ptr());
  arguments.alibi_batch_stride = rank == 2 ? slopes->stride(0) : 0;
  STD_TORCH_CHECK(arguments.alibi_batch_stride * arguments.batch <= std::numeric_limits<int>::max(),
                  "alibi_slopes has stride ", arguments.alibi_batch_stride, " in dimension 0, which is too large");
}

// What both passes take.
struct Inputs {
  int32_t device;
  ScalarType dtype;
  Shape query, key, value, out;
};

// Checks `softmax_lse`, or its gradient, of queries of this shape.
float* checked_lse(const Tensor& softmax_lse, const char* name, const Shape& query, int32_t device) {
  check_device(softmax_lse, name, device);
  STD_TORCH_CHECK(softmax_lse.scalar_type() == ScalarType::Float, name, " must be float32");
  const int64_t rank = query.rank(), heads_at = rank - 3;
  STD_TORCH_CHECK(softmax_lse.dim() == rank - 1 && (query.is_pack() || softmax_lse.size(0) == query.batch) &&
                      softmax_lse.size(heads_at) == query.heads && softmax_lse.size(heads_at + 1) == query.seqlen,
                  name, " must be (batch, heads, seqlen_q), or (heads, total_q) of a pack, with ", query.heads,
                  " heads and ", query.seqlen, " queries");
  STD_TORCH_CHECK(softmax_lse.is_contiguous(), name, " must be contiguous");
  return static_cast<float*>(softmax_lse.data_ptr());
}

// Checks q, k, v, softmax_lse, a pack and what changes scores, and fills in the arguments that follow from them. Keys
// in a cache have lengths and no offsets, and their queries need none.
Inputs read_inputs(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& softmax_lse,
                   const PackTensors& pack, const ScoreTensors& scores, double softcap, double softmax_scale,
                   const MaskArguments& mask, int64_t sm_margin, AttentionArguments& arguments) {
  STD_TORCH_CHECK(q.is_cuda(), "q must be a CUDA tensor");
  const int32_t device = q.get_device_index();
  const ScalarType dtype = q.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::BFloat16 || dtype == ScalarType::Half, "q must be bfloat16 or float16");
  const auto& [cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k] = pack;
  const bool is_pack = cu_seqlens_q || seqused_k;
  const int64_t rank = is_pack ? 3 : 4;
  STD_TORCH_CHECK(q.dim() == rank && k.dim() == rank && v.dim() == rank, "q, k and v must have ", rank,
                  " dimensions, got ", q.dim(), ", ", k.dim(), " and ", v.dim());
  const Shape query = shape_of(q, is_pack), of_k = shape_of(k, is_pack);
  const Shape key = {query.batch, of_k.seqlen, of_k.heads, query.head_dim};
  const Shape value = key.with_head_dim(v.size(rank - 1)), out = query.with_head_dim(value.head_dim);

  STD_TORCH_CHECK(is_pack || !seqused_q, "seqused_q needs cu_seqlens");
  STD_TORCH_CHECK(!cu_seqlens_q || cu_seqlens_q->dim() == 1, "cu_seqlens_q must have one dimension");
  const int64_t batch = cu_seqlens_q ? cu_seqlens_q->size(0) - 1 : is_pack ? seqused_k->numel() : query.batch;
  arguments.batch = to_int(batch, "batch");
  const int64_t rows_q = is_pack && !cu_seqlens_q ? to_int(query.seqlen, "seqlen_q") / batch : 0;
  STD_TORCH_CHECK(!is_pack || cu_seqlens_q || (rows_q > 0 && rows_q * batch == query.seqlen),
                  "the rows of q must be a multiple of the ", batch, " sequences, got ", query.seqlen);
  arguments.pack = {integers(cu_seqlens_q, "cu_seqlens_q", batch + 1, device),
                    integers(cu_seqlens_k, "cu_seqlens_k", batch + 1, device),
                    integers(seqused_q, "seqused_q", batch, device), integers(seqused_k, "seqused_k", batch, device),
                    static_cast<int>(rows_q)};
  arguments.seqlen_q = to_int(query.seqlen, "seqlen_q");
  arguments.seqlen_k = to_int(key.seqlen, "seqlen_k");
  STD_TORCH_CHECK(arguments.seqlen_q < kUnbounded && arguments.seqlen_k < kUnbounded, "q and k must have fewer than ",
                  kUnbounded, " rows, got ", arguments.seqlen_q, " and ", arguments.seqlen_k);
  arguments.heads = to_int(query.heads, "the number of query heads");
  arguments.kv_heads = to_int(key.heads, "the number of key and value heads");
  STD_TORCH_CHECK(arguments.heads % arguments.kv_heads == 0, "q has ", arguments.heads,
                  " heads, expected a multiple of the ", arguments.kv_heads, " heads of k and v");
  arguments.head_dims = {checked_head_dim(query.head_dim, "q"), checked_head_dim(value.head_dim, "v")};

  arguments.q = view_of(q, "q", query, dtype, device);
  arguments.k = view_of(k, "k", key, dtype, device);
  arguments.v = view_of(v, "v", value, dtype, device);

  arguments.softmax_lse = checked_lse(softmax_lse, "softmax_lse", query, device);
  read_scores(scores, softcap, device, arguments);
  arguments.dtype = dtype == ScalarType::BFloat16 ? Dtype::kBFloat16 : Dtype::kFloat16;
  arguments.softmax_scale = static_cast<float>(softmax_scale);
  STD_TORCH_CHECK(arguments.softmax_scale > 0, "softmax_scale is ", softmax_scale, ", expected a positive number");
  arguments.mask = mask.rule();
  arguments.num_sms = usable_sms(device, sm_margin, "q");
  arguments.sm_margin = static_cast<int>(sm_margin);
  return {device, dtype, query, key, value, out};
}

void require_both_offsets(const PackTensors& pack) {
  const bool is_pack = pack.cu_seqlens_q.has_value();
  STD_TORCH_CHECK(is_pack == pack.cu_seqlens_k.has_value(),
                  "cu_seqlens_q and cu_seqlens_k must be given both or neither");
  STD_TORCH_CHECK(is_pack || !pack.seqused_k, "seqused_k needs cu_seqlens");
}

void read_dropout(const Dropout& dropout, const Inputs& inputs, AttentionArguments& arguments) {
  const auto& [bits, rng_state, p] = dropout;
  STD_TORCH_CHECK(!rng_state, "the kernels take bits, and no rng_state");
  STD_TORCH_CHECK(bits.has_value() == (p != 0), "dropout_bits must be given where dropout_p is above 0");
  if (!bits) return;
  check_bits(*bits, arguments.batch, arguments.heads, inputs.device);
  STD_TORCH_CHECK(arguments.softcap == 0 && !arguments.alibi_slopes, "no kernel drops beside a softcap or slopes");
  constexpr int kMostBlocks = dropout::num_blocks(kUnbounded);
  STD_TORCH_CHECK(bits->size(2) <= kMostBlocks && bits->size(3) <= kMostBlocks, "dropout_bits must have at most ",
                  kMostBlocks, " blocks of queries and of keys");
  const int query_blocks = to_int(bits->size(2), "the number of blocks of queries");
  const int key_blocks = to_int(bits->size(3), "the number of blocks of keys");
  STD_TORCH_CHECK(arguments.is_pack() || (query_blocks == dropout::num_blocks(arguments.seqlen_q) &&
                                          key_blocks == dropout::num_blocks(arguments.seqlen_k)),
                  "dropout_bits must have a block for every 32 queries and keys, got ", query_blocks, " and ",
                  key_blocks);
  arguments.dropout = {bits->data_ptr(), query_blocks, key_blocks, checked_probability(p)};
}

// The mask by key columns, whose last two dimensions must be contiguous.
void read_columns(OptionalTensor columns, const MaskArguments& mask, const Inputs& inputs,
                  AttentionArguments& arguments) {
  if (!columns) return;
  check_device(*columns, "startend_row_indices", inputs.device);
  STD_TORCH_CHECK(columns->scalar_type() == ScalarType::Int, "startend_row_indices must be int32");
  const bool is_pack = arguments.is_pack();
  const int64_t rank = is_pack ? 3 : 4;
  STD_TORCH_CHECK(columns->dim() == rank, "startend_row_indices must have ", rank, " dimensions, got ", columns->dim());
  const int64_t heads = columns->size(rank - 3), keys = columns->size(rank - 2), bounds = columns->size(rank - 1);
  STD_TORCH_CHECK((is_pack || columns->size(0) == arguments.batch) && (heads == 1 || heads == arguments.kv_heads) &&
                      keys == inputs.key.seqlen,
                  "startend_row_indices must be (batch, 1 or ", arguments.kv_heads, ", ", inputs.key.seqlen,
                  ", bounds), without the batch of a pack");
  STD_TORCH_CHECK(bounds == 2 || bounds == (mask.causal ? 1 : 4), "startend_row_indices has ", bounds,
                  " bounds of a key, expected ", mask.causal ? "1 or 2" : "2 or 4");
  STD_TORCH_CHECK((bounds == 1 || columns->stride(rank - 1) == 1) && (keys == 1 || columns->stride(rank - 2) == bounds),
                  "startend_row_indices must have contiguous last dimensions");
  const int64_t batch_stride = is_pack || arguments.batch == 1 ? 0 : columns->stride(0);
  const int64_t head_stride = heads == 1 ? 0 : columns->stride(rank - 3);
  const int* data = static_cast<const int*>(columns->data_ptr());
  STD_TORCH_CHECK(!arguments.drops() && arguments.softcap == 0 && !arguments.alibi_slopes,
                  "no kernel has startend_row_indices beside dropout, a softcap or slopes");
  arguments.columns = {data, static_cast<int>(bounds), mask.causal, batch_stride, head_stride};
}

void read_max_logits(OptionalTensor max_logits, const Inputs& inputs, ForwardArguments& arguments) {
  if (!max_logits) return;
  check_device(*max_logits, "max_logits", inputs.device);
  STD_TORCH_CHECK(max_logits->scalar_type() == ScalarType::Float && max_logits->dim() == 2 &&
                      max_logits->size(0) == arguments.batch && max_logits->size(1) == arguments.heads &&
                      max_logits->is_contiguous(),
                  "max_logits must be contiguous float32 (", arguments.batch, ", ", arguments.heads, ")");
  arguments.max_logits = static_cast<float*>(max_logits->data_ptr());
}

// A call's workspace. It is freed when the op returns, while the kernels may still run: torch's allocator hands memory
// out again in stream order.
class Workspace {
 public:
  explicit Workspace(int32_t device) : device_(device) {}

  AllocateWorkspace allocator() {
    return [this](int64_t bytes) {
      memory_ = empty_bytes(bytes, device_);
      return memory_->data_ptr();
    };
  }

 private:
  int32_t device_;
  std::optional<Tensor> memory_;
};

// Attention; autograd.cpp gives the schema and dash_attn/ops.py the arguments. Writes out and softmax_lse, and raises
// max_logits to the largest logits.
void forward(const Tensor& q, const Tensor& k, const Tensor& v, Tensor out, Tensor softmax_lse, const PackTensors& pack,
             const ScoreTensors& scores, double softmax_scale, double softcap, const MaskArguments& mask,
             int64_t sm_margin, const Dropout& dropout, OptionalTensor columns, OptionalTensor max_logits) {
  require_both_offsets(pack);
  ForwardArguments arguments{};
  const Inputs inputs =
      read_inputs(q, k, v, softmax_lse, pack, scores, softcap, softmax_scale, mask, sm_margin, arguments);
  read_dropout(dropout, inputs, arguments);
  read_columns(columns, mask, inputs, arguments);
  read_max_logits(max_logits, inputs, arguments);
  arguments.out = view_of(out, "out", inputs.out, inputs.dtype, inputs.device);
  const torch::stable::accelerator::DeviceGuard guard(inputs.device);
  Workspace workspace(inputs.device);
  run_forward(arguments, workspace.allocator(), current_stream(inputs.device));
}

// The pages of a call with keys in a cache, whose rows are those of k.
PageTable pages_of(const Cache& cache, const AttentionArguments& arguments, int32_t device) {
  const auto& [table, seqused_k, page_rows, page_distance] = cache;
  const int* const data = checked_block_table(table, arguments.batch, device);
  const int64_t most = table ? table->size(1) : 1, pages = table ? 1 : arguments.batch;
  STD_TORCH_CHECK(most >= 1, "block_table must have at least one page of each sequence");
  STD_TORCH_CHECK(page_rows >= 1 && page_distance >= page_rows && most * page_rows < kUnbounded &&
                      page_distance < kUnbounded && (pages - 1) * page_distance + page_rows <= arguments.seqlen_k,
                  "no page can have ", page_rows, " rows at a distance of ", page_distance, ", with ", most,
                  " pages of a sequence and ", arguments.seqlen_k, " rows in all");
  const int64_t num_pages = (arguments.seqlen_k - page_rows) / page_distance + 1;
  return {data, static_cast<int>(most), Divisor(static_cast<int>(page_rows)), static_cast<int>(page_distance),
          static_cast<int>(num_pages)};
}

// The forward of a pack whose keys lie in a cache. The rows of k and v are those of all pages.
void forward_of_cache(const Tensor& q, const Tensor& k, const Tensor& v, Tensor out, Tensor softmax_lse,
                      OptionalTensor cu_seqlens_q, OptionalTensor seqused_q, const Cache& cache,
                      const ScoreTensors& scores, double softmax_scale, double softcap, const MaskArguments& mask,
                      int64_t sm_margin) {
  ForwardArguments arguments{};
  const PackTensors pack{cu_seqlens_q, std::nullopt, seqused_q, cache.seqused_k};
  const Inputs inputs =
      read_inputs(q, k, v, softmax_lse, pack, scores, softcap, softmax_scale, mask, sm_margin, arguments);
  arguments.out = view_of(out, "out", inputs.out, inputs.dtype, inputs.device);
  arguments.pages = pages_of(cache, arguments, inputs.device);
  const torch::stable::accelerator::DeviceGuard guard(inputs.device);
  Workspace workspace(inputs.device);
  run_forward(arguments, workspace.allocator(), current_stream(inputs.device));
}

// Reads what both backward ops have, and fills in the arguments that follow from it.
Inputs read_backward(const BackwardInputs& x, const PackTensors& pack, const ScoreTensors& scores, double softcap,
                     double softmax_scale, const MaskArguments& mask, OptionalTensor dsoftmax_lse, int64_t schedule,
                     int64_t sm_margin, BackwardArguments& arguments) {
  require_both_offsets(pack);
  const Inputs inputs =
      read_inputs(x.q, x.k, x.v, x.softmax_lse, pack, scores, softcap, softmax_scale, mask, sm_margin, arguments);
  arguments.out = view_of(x.out, "out", inputs.out, inputs.dtype, inputs.device);
  arguments.dout = view_of(x.dout, "dout", inputs.out, inputs.dtype, inputs.device);
  if (dsoftmax_lse) {
    arguments.dsoftmax_lse = checked_lse(*dsoftmax_lse, "dsoftmax_lse", inputs.query, inputs.device);
  }
  STD_TORCH_CHECK(schedule >= 0 && schedule < kNumPolicies, "schedule is ", schedule,
                  ", expected a policy's number, 0 to ", kNumPolicies - 1);
  arguments.policy = static_cast<Policy>(schedule);
  return inputs;
}

// Gradients of attention. Writes dq, dk and dv.
void backward(const BackwardInputs& x, Tensor dq, Tensor dk, Tensor dv, const PackTensors& pack,
              const ScoreTensors& scores, OptionalTensor dsoftmax_lse, OptionalTensor dsinks, double softmax_scale,
              double softcap, const MaskArguments& mask, int64_t schedule, int64_t sm_margin, const Dropout& dropout,
              OptionalTensor columns) {
  BackwardArguments arguments{};
  const Inputs inputs = read_backward(x, pack, scores, softcap, softmax_scale, mask, dsoftmax_lse, schedule, sm_margin,
                                      arguments);
  read_dropout(dropout, inputs, arguments);
  read_columns(columns, mask, inputs, arguments);
  const auto& [device, dtype, query, key, value, output] = inputs;
  arguments.dq = view_of(dq, "dq", query, dtype, device);
  arguments.dk = view_of(dk, "dk", key, dtype, device);
  arguments.dv = view_of(dv, "dv", value, dtype, device);
  STD_TORCH_CHECK(!dsinks || scores.sinks, "dsinks needs sinks");
  arguments.dsinks = of_heads(dsinks, "dsinks", query.heads, device);
  STD_TORCH_CHECK(!dsinks || int64_t{arguments.batch} * arguments.heads <= std::numeric_limits<int>::max(),
                  "batch * heads is too large for dsinks: ", arguments.batch, " * ", arguments.heads);

  const torch::stable::accelerator::DeviceGuard guard(device);
  Workspace workspace(device);
  run_backward(arguments, workspace.allocator(), current_stream(device));
}

// Contiguous fp32 sums of so many elements at least; the kernels move 16 bytes of them at a time.
float* carried_sums(const Tensor& tensor, const char* name, int64_t least, int32_t device) {
  check_device(tensor, name, device);
  STD_TORCH_CHECK(tensor.scalar_type() == ScalarType::Float && tensor.dim() == 1 && tensor.is_contiguous(), name,
                  " must be contiguous float32 of one dimension");
  STD_TORCH_CHECK(tensor.size(0) >= least, name, " must have at least ", least, " elements, got ", tensor.size(0));
  STD_TORCH_CHECK(reinterpret_cast<std::uintptr_t>(tensor.data_ptr()) % kCarriedAlignment == 0, name,
                  " must start at a multiple of ", kCarriedAlignment, " bytes");
  return static_cast<float*>(tensor.data_ptr());
}

// The backward of a dense chunk of keys by a chunk of queries, of one split of the query heads: adds to dq_sums and
// key_sums. The mask is the sequence's, of which `keys_before` keys come before the chunk's; the first query is aligned
// with key `first_own_key` of the chunk, which may be one before or behind it. dq_sums has sums of `tiles_with_dq`
// query tiles from `first_with_dq` on. dq, or dk and dv, are written where they are given: the sums are then complete.
void backward_of_chunks(const BackwardInputs& x, Tensor dq_sums, Tensor key_sums, OptionalTensor total,
                        OptionalTensor dq, OptionalTensor dk, OptionalTensor dv, OptionalTensor dsoftmax_lse,
                        int64_t first_with_dq, int64_t tiles_with_dq, bool keys_continue, double softmax_scale,
                        const MaskArguments& mask, int64_t first_own_key, int64_t keys_before, int64_t schedule,
                        int64_t sm_margin) {
  BackwardArguments arguments{};
  const Inputs inputs = read_backward(x, /*pack=*/{}, /*scores=*/{}, /*softcap=*/0, softmax_scale, mask, dsoftmax_lse,
                                      schedule, sm_margin, arguments);
  const auto& [device, dtype, query, key, value, output] = inputs;
  STD_TORCH_CHECK(dk.has_value() == dv.has_value(), "dk and dv must be given both or neither");
  STD_TORCH_CHECK(first_own_key >= -kMostRowsAway && first_own_key <= kMostRowsAway && keys_before >= 0 &&
                      keys_before <= kMostRowsAway && query.seqlen <= kMostRowsAway && key.seqlen <= kMostRowsAway,
                  "first_own_key, keys_before and the lengths must be at most ", kMostRowsAway, ", got ", first_own_key,
                  ", ", keys_before, ", ", query.seqlen, " and ", key.seqlen);
  STD_TORCH_CHECK(first_with_dq >= 0 && tiles_with_dq >= 0 && first_with_dq <= query.seqlen &&
                      tiles_with_dq <= query.seqlen - first_with_dq,
                  "first_with_dq and tiles_with_dq must be a run of query tiles, got ", first_with_dq, " and ",
                  tiles_with_dq);
  arguments.mask.window.own_key_shift = static_cast<int>(first_own_key) - (arguments.seqlen_k - arguments.seqlen_q);
  arguments.mask.window.keys_before = static_cast<int>(keys_before);
  STD_TORCH_CHECK(!total || total->data_ptr() != key_sums.data_ptr(), "total must not be key_sums");
  if (dq) arguments.dq = view_of(*dq, "dq", query, dtype, device);
  if (dk) arguments.dk = view_of(*dk, "dk", key, dtype, device);
  if (dv) arguments.dv = view_of(*dv, "dv", value, dtype, device);
  const int64_t key_floats = carried_key_floats(arguments);
  arguments.carried = {carried_sums(dq_sums, "dq_sums", carried_dq_floats(arguments), device),
                       carried_sums(key_sums, "key_sums", key_floats, device),
                       total ? carried_sums(*total, "total", key_floats, device) : nullptr,
                       {static_cast<int>(first_with_dq), static_cast<int>(tiles_with_dq)},
                       keys_continue,
                       dq.has_value(),
                       dk.has_value()};

  const torch::stable::accelerator::DeviceGuard guard(device);
  Workspace workspace(device);
  run_backward(arguments, workspace.allocator(), current_stream(device));
}

}  // namespace
}  // namespace dash_attn

STABLE_TORCH_LIBRARY_IMPL(dash_attn_C, CUDA, library) {
  library.impl("forward", TORCH_BOX(dash_attn::flat<&dash_attn::forward>));
  library.impl("forward_of_cache", TORCH_BOX(dash_attn::flat<&dash_attn::forward_of_cache>));
  library.impl("backward", TORCH_BOX(dash_attn::flat<&dash_attn::backward>));
  library.impl("backward_of_chunks", TORCH_BOX(dash_attn::flat<&dash_attn::backward_of_chunks>));
}
