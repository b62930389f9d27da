// dash_attn._C: the CUDA implementation of the ops dash_attn_C::forward and backward, on torch's stable ABI:
// preconditions, workspace, device and stream. The checks that a user meets are in operand_checks.h; these keep a
// direct caller from launching on bad input.
#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>
#include <torch/headeronly/util/shim_utils.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "config/tile_shapes.h"
#include "launch/arguments.h"

namespace dash_attn {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int kVectorElements = 8;  // 16 bytes of a 16-bit type: what TMA and the vector accesses step by
constexpr std::uintptr_t kVectorBytes = 16;

struct Shape {
  int64_t batch, seqlen, heads, head_dim;
};

Shape shape_of(const Tensor& tensor) { return {tensor.size(0), tensor.size(1), tensor.size(2), tensor.size(3)}; }

void check_device(const Tensor& tensor, const char* name, int32_t device) {
  STD_TORCH_CHECK(tensor.is_cuda(), name, " must be a CUDA tensor");
  STD_TORCH_CHECK(tensor.get_device_index() == device, name, " is on cuda:", tensor.get_device_index(),
                  ", but q is on cuda:", device, ": all tensors must be on one device");
}

// The tensor as the kernels see it. A dimension of extent 1 has no meaningful stride; it gets the one it would
// have in a contiguous tensor, so that a TMA descriptor accepts it.
TensorView view_of(const Tensor& tensor, const char* name, const Shape& expected, ScalarType dtype, int32_t device) {
  check_device(tensor, name, device);
  STD_TORCH_CHECK(tensor.scalar_type() == dtype, name, " must have the dtype of q");
  STD_TORCH_CHECK(tensor.dim() == 4, name, " must be (batch, seqlen, heads, head_dim), got ", tensor.dim(),
                  " dimensions");
  const Shape shape = shape_of(tensor);
  STD_TORCH_CHECK(shape.batch == expected.batch && shape.seqlen == expected.seqlen && shape.heads == expected.heads &&
                      shape.head_dim == expected.head_dim,
                  name, " has shape (", shape.batch, ", ", shape.seqlen, ", ", shape.heads, ", ", shape.head_dim,
                  "), expected (", expected.batch, ", ", expected.seqlen, ", ", expected.heads, ", ", expected.head_dim,
                  ")");
  STD_TORCH_CHECK(tensor.stride(3) == 1, name, " must have a contiguous last dimension, its stride is ",
                  tensor.stride(3));
  const int64_t contiguous[3] = {shape.seqlen * shape.heads * shape.head_dim, shape.heads * shape.head_dim,
                                 shape.head_dim};
  int64_t strides[3];
  for (int dim = 0; dim < 3; ++dim) {
    strides[dim] = tensor.size(dim) == 1 ? contiguous[dim] : tensor.stride(dim);
    STD_TORCH_CHECK(strides[dim] > 0 && strides[dim] % kVectorElements == 0, name, " has stride ", strides[dim],
                    " in dimension ", dim, ", expected a positive multiple of ", kVectorElements, " elements");
  }
  void* data = tensor.data_ptr();
  STD_TORCH_CHECK(reinterpret_cast<std::uintptr_t>(data) % kVectorBytes == 0, name, " must start at a multiple of ",
                  kVectorBytes, " bytes");
  return {data, strides[0], strides[1], strides[2]};
}

int to_int(int64_t value, const char* name) {
  STD_TORCH_CHECK(value >= 1 && value <= std::numeric_limits<int>::max(), name, " is ", value,
                  ", expected at least 1 and less than 2^31");
  return static_cast<int>(value);
}

struct DeviceFacts {
  int major, minor, sms;
};

int device_attribute(cudaDeviceAttr attribute, int device) {
  int value = 0;
  STD_CUDA_CHECK(cudaDeviceGetAttribute(&value, attribute, device));
  return value;
}

const DeviceFacts& facts_of(int32_t device) {
  static const std::vector<DeviceFacts> facts = [] {
    int count = 0;
    STD_CUDA_CHECK(cudaGetDeviceCount(&count));
    std::vector<DeviceFacts> all;
    for (int i = 0; i < count; ++i) {
      all.push_back({device_attribute(cudaDevAttrComputeCapabilityMajor, i),
                     device_attribute(cudaDevAttrComputeCapabilityMinor, i),
                     device_attribute(cudaDevAttrMultiProcessorCount, i)});
    }
    return all;
  }();
  return facts.at(device);
}

// Streaming multiprocessors that the kernel may use on `device`.
int usable_sms(int32_t device, int64_t sm_margin) {
  const auto [major, minor, sms] = facts_of(device);
  // The two checks of this file that users meet: without the place in the sources that STD_TORCH_CHECK puts first.
  if (major != 9 || minor != 0) {
    throw std::runtime_error(
        "q must be on a GPU of compute capability 9.0 (Hopper: H100, H200, GH200), got cuda:" + std::to_string(device) +
        " with compute capability " + std::to_string(major) + "." + std::to_string(minor));
  }
  if (sm_margin < 0 || sm_margin >= sms) {
    // A ValueError in Python.
    throw std::invalid_argument("sm_margin must be at least 0 and less than the " + std::to_string(sms) +
                                " SMs of cuda:" + std::to_string(device) + ", got " + std::to_string(sm_margin));
  }
  return sms - static_cast<int>(sm_margin);
}

// What both passes take.
struct Inputs {
  int32_t device;
  ScalarType dtype;
  Shape query, key;
};

// Checks q, k, v and softmax_lse, and fills in the arguments that follow from them.
Inputs read_inputs(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& softmax_lse, double softmax_scale,
                   bool causal, int64_t sm_margin, AttentionArguments& arguments) {
  STD_TORCH_CHECK(q.is_cuda(), "q must be a CUDA tensor");
  const int32_t device = q.get_device_index();
  const ScalarType dtype = q.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::BFloat16 || dtype == ScalarType::Half, "q must be bfloat16 or float16");
  STD_TORCH_CHECK(q.dim() == 4 && k.dim() == 4, "q and k must be (batch, seqlen, heads, head_dim), got ", q.dim(),
                  " and ", k.dim(), " dimensions");
  const Shape query = shape_of(q);
  const Shape key = {query.batch, k.size(1), k.size(2), query.head_dim};

  arguments.batch = to_int(query.batch, "batch");
  arguments.seqlen_q = to_int(query.seqlen, "seqlen_q");
  arguments.seqlen_k = to_int(key.seqlen, "seqlen_k");
  arguments.heads = to_int(query.heads, "the number of query heads");
  arguments.kv_heads = to_int(key.heads, "the number of key and value heads");
  STD_TORCH_CHECK(arguments.heads % arguments.kv_heads == 0, "q has ", arguments.heads,
                  " heads, expected a multiple of the ", arguments.kv_heads, " heads of k and v");
  arguments.head_dim = to_int(query.head_dim, "head_dim");
  STD_TORCH_CHECK(arguments.head_dim % kVectorElements == 0 && padded_head_dim(arguments.head_dim) != 0, "head_dim is ",
                  arguments.head_dim, ", expected a multiple of ", kVectorElements, " up to 128");

  arguments.q = view_of(q, "q", query, dtype, device);
  arguments.k = view_of(k, "k", key, dtype, device);
  arguments.v = view_of(v, "v", key, dtype, device);

  check_device(softmax_lse, "softmax_lse", device);
  STD_TORCH_CHECK(softmax_lse.scalar_type() == ScalarType::Float, "softmax_lse must be float32");
  STD_TORCH_CHECK(softmax_lse.dim() == 3 && softmax_lse.size(0) == query.batch && softmax_lse.size(1) == query.heads &&
                      softmax_lse.size(2) == query.seqlen,
                  "softmax_lse must be (batch, heads, seqlen_q) = (", query.batch, ", ", query.heads, ", ",
                  query.seqlen, ")");
  STD_TORCH_CHECK(softmax_lse.is_contiguous(), "softmax_lse must be contiguous");
  arguments.softmax_lse = static_cast<float*>(softmax_lse.data_ptr());

  arguments.dtype = dtype == ScalarType::BFloat16 ? Dtype::kBFloat16 : Dtype::kFloat16;
  arguments.softmax_scale = static_cast<float>(softmax_scale);
  arguments.mask = mask_kind(causal);
  arguments.num_sms = usable_sms(device, sm_margin);
  arguments.sm_margin = static_cast<int>(sm_margin);
  return {device, dtype, query, key};
}

cudaStream_t current_stream(int32_t device) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return static_cast<cudaStream_t>(stream);
}

Tensor empty_bytes(int64_t size, int32_t device) {
  constexpr int64_t kStride = 1;
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(1, &size, &kStride, aoti_torch_dtype_uint8(),
                                                  aoti_torch_device_type_cuda(), device, &handle));
  return Tensor(handle);
}

// Attention; autograd.cpp gives the schema and dash_attn/ops.py the arguments. Writes out and softmax_lse.
void forward(const Tensor& q, const Tensor& k, const Tensor& v, Tensor out, Tensor softmax_lse, double softmax_scale,
             bool causal, int64_t sm_margin) {
  ForwardArguments arguments{};
  const Inputs inputs = read_inputs(q, k, v, softmax_lse, softmax_scale, causal, sm_margin, arguments);
  STD_TORCH_CHECK(arguments.softmax_scale > 0, "softmax_scale is ", softmax_scale, ", expected a positive number");
  arguments.out = view_of(out, "out", inputs.query, inputs.dtype, inputs.device);
  const torch::stable::accelerator::DeviceGuard guard(inputs.device);
  std::optional<Tensor> workspace;
  if (const size_t bytes = forward_workspace_bytes(arguments)) {
    workspace = empty_bytes(static_cast<int64_t>(bytes), inputs.device);
    arguments.workspace = workspace->data_ptr();
  }
  run_forward(arguments, current_stream(inputs.device));
}

// Gradients of attention. Writes dq, dk and dv.
void backward(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
              const Tensor& softmax_lse, Tensor dq, Tensor dk, Tensor dv, double softmax_scale, bool causal,
              int64_t schedule, int64_t sm_margin) {
  BackwardArguments arguments{};
  const auto [device, dtype, query, key] =
      read_inputs(q, k, v, softmax_lse, softmax_scale, causal, sm_margin, arguments);
  arguments.out = view_of(out, "out", query, dtype, device);
  arguments.dout = view_of(dout, "dout", query, dtype, device);
  arguments.dq = view_of(dq, "dq", query, dtype, device);
  arguments.dk = view_of(dk, "dk", key, dtype, device);
  arguments.dv = view_of(dv, "dv", key, dtype, device);
  STD_TORCH_CHECK(schedule >= 0 && schedule <= std::numeric_limits<int>::max(), "schedule is ", schedule,
                  ", expected the number of a policy");
  arguments.schedule = static_cast<int>(schedule);

  const torch::stable::accelerator::DeviceGuard guard(device);
  // Freed on return while the kernels may still run: torch's allocator hands it out again in stream order.
  const Tensor workspace = empty_bytes(static_cast<int64_t>(backward_workspace_bytes(arguments)), device);
  arguments.workspace = workspace.data_ptr();
  run_backward(arguments, current_stream(device));
}

}  // namespace
}  // namespace dash_attn

STABLE_TORCH_LIBRARY_IMPL(dash_attn_C, CUDA, library) {
  library.impl("forward", TORCH_BOX(&dash_attn::forward));
  library.impl("backward", TORCH_BOX(&dash_attn::backward));
}
