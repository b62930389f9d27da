// What all CUDA ops ask of their arguments before they launch, on torch's stable ABI.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>
#include <torch/headeronly/util/shim_utils.h>

#include <cstdint>
#include <limits>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>

#include "devices.h"
#include "dropout/mask.h"
#include "placement/sequences.h"

namespace dash_attn {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = const std::optional<Tensor>&;

constexpr int kVectorElements = 8;  // 16 bytes of a 16-bit type: what TMA and the vector accesses step by
constexpr std::uintptr_t kVectorBytes = 16;

inline void check_device(const Tensor& tensor, const char* name, int32_t device) {
  STD_TORCH_CHECK(tensor.is_cuda(), name, " must be a CUDA tensor");
  STD_TORCH_CHECK(tensor.get_device_index() == device, name, " is on cuda:", tensor.get_device_index(),
                  ", but q is on cuda:", device, ": all tensors must be on one device");
}

inline int to_int(int64_t value, const char* name) {
  STD_TORCH_CHECK(value >= 1 && value <= std::numeric_limits<int>::max(), name, " is ", value,
                  ", expected at least 1 and less than 2^31");
  return static_cast<int>(value);
}

// Streaming multiprocessors that the kernel may use on `device`, where the argument `name` is.
inline int usable_sms(int32_t device, int64_t sm_margin, const char* name) {
  check_hopper(device, name);
  const int sms = facts_of(device).sms;
  if (sm_margin < 0 || sm_margin >= sms) {
    // A check that users meet, as a ValueError: without the place in the sources that STD_TORCH_CHECK puts first.
    throw std::invalid_argument("sm_margin must be at least 0 and less than the " + std::to_string(sms) +
                                " SMs of cuda:" + std::to_string(device) + ", got " + std::to_string(sm_margin));
  }
  return sms - static_cast<int>(sm_margin);
}

// Memory of the device that a call needs and does not get. operators.h turns this into torch's own error, which the
// stable ABI cannot throw.
class OutOfMemory : public std::bad_alloc {
 public:
  OutOfMemory(int64_t bytes, int32_t device, size_t free)
      : text_("CUDA out of memory. Tried to allocate a workspace of " + std::to_string(bytes) + " bytes on cuda:" +
              std::to_string(device) + ", of which " + std::to_string(free) +
              " bytes are free outside torch's cache") {}

  const char* what() const noexcept override { return text_.c_str(); }

 private:
  std::string text_;
};

inline Tensor empty_bytes(int64_t size, int32_t device) {
  constexpr int64_t kStride = 1;
  AtenTensorHandle handle = nullptr;
  if (aoti_torch_empty_strided(1, &size, &kStride, aoti_torch_dtype_uint8(), aoti_torch_device_type_cuda(), device,
                               &handle) != AOTI_TORCH_SUCCESS) {
    size_t free = 0, total = 0;
    STD_CUDA_CHECK(cudaMemGetInfo(&free, &total));  // the allocation may also have met the error of an earlier kernel
    throw OutOfMemory(size, device, free);
  }
  return Tensor(handle);
}

// The data of an int32 tensor with one dimension, null where there is none.
inline int* integers(OptionalTensor tensor, const char* name, int64_t size, int32_t device) {
  if (!tensor) return nullptr;
  check_device(*tensor, name, device);
  STD_TORCH_CHECK(tensor->scalar_type() == ScalarType::Int, name, " must be int32");
  STD_TORCH_CHECK(tensor->dim() == 1 && tensor->size(0) == size, name, " must have ", size, " elements");
  STD_TORCH_CHECK(tensor->is_contiguous(), name, " must be contiguous");
  return static_cast<int*>(tensor->data_ptr());
}

// The data of a table of pages, null where there is none.
inline const int* checked_block_table(OptionalTensor table, int64_t batch, int32_t device) {
  if (!table) return nullptr;
  check_device(*table, "block_table", device);
  STD_TORCH_CHECK(table->scalar_type() == ScalarType::Int && table->dim() == 2 && table->is_contiguous() &&
                      table->size(0) == batch && table->numel() <= kMostTableEntries,
                  "block_table must be contiguous int32 (", batch, ", max_pages), with at most ", kMostTableEntries,
                  " entries");
  return static_cast<const int*>(table->data_ptr());
}

// (batch, heads, blocks of queries, blocks of keys, bytes)
inline void check_bits(const Tensor& bits, int64_t batch, int64_t heads, int32_t device) {
  check_device(bits, "dropout_bits", device);
  STD_TORCH_CHECK(bits.scalar_type() == ScalarType::Byte, "dropout_bits must be uint8");
  STD_TORCH_CHECK(bits.dim() == 5 && bits.size(0) == batch && bits.size(1) == heads &&
                      bits.size(4) == dropout::kBlockBytes && bits.is_contiguous(),
                  "dropout_bits must be contiguous (", batch, ", ", heads, ", blocks of queries, blocks of keys, ",
                  dropout::kBlockBytes, ")");
  STD_TORCH_CHECK(reinterpret_cast<std::uintptr_t>(bits.data_ptr()) % dropout::kBitsAlignment == 0,
                  "dropout_bits must start at a multiple of ", dropout::kBitsAlignment, " bytes");
}

inline float checked_probability(double p) {
  STD_TORCH_CHECK(p >= 0 && static_cast<float>(p) < 1, "dropout_p is ", p, ", expected at least 0 and below 1");
  return static_cast<float>(p);
}

}  // namespace dash_attn
