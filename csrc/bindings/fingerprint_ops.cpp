// dash_attn._C: the CUDA implementation of dash_attn_C::fingerprint_blocks, on torch's stable ABI. fingerprint.cpp has
// the schema and what it means.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings/devices.h"
#include "launch/fingerprint.h"
#include "receipts/plan.h"

namespace dash_attn {
namespace {

using torch::stable::Tensor;

Tensor empty_sums(int64_t count, int32_t device) {
  constexpr int64_t kStride = 1;
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(1, &count, &kStride, aoti_torch_dtype_int64(),
                                                  aoti_torch_device_type_cuda(), device, &handle));
  return Tensor(handle);
}

Tensor fingerprint_blocks(std::vector<Tensor> tensors, std::vector<int64_t> pieces, int64_t block, int64_t sums) {
  // Values that are refused are ValueErrors in Python.
  if (tensors.empty()) { throw std::invalid_argument("tensors must hold at least one tensor, got none"); }
  int32_t device = -1;
  for (const Tensor& tensor : tensors) {
    if (tensor.is_cuda()) { device = tensor.get_device_index(); }
  }
  std::vector<receipts::Words> words;
  words.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& tensor = tensors[i];
    const std::string name = "tensors[" + std::to_string(i) + "]";
    if (!tensor.is_cuda() || tensor.get_device_index() != device) {
      throw std::invalid_argument(name + " must be on cuda:" + std::to_string(device) + ", as others are");
    }
    if (!tensor.is_contiguous()) { throw std::invalid_argument(name + " must be contiguous"); }
    words.push_back(receipts::words_of(tensor.data_ptr(), tensor.numel(), static_cast<int64_t>(tensor.element_size())));
  }
  const receipts::PieceReader reader(words, block, sums);
  const std::vector<receipts::Piece> read = reader.read(pieces);
  check_hopper(device, "tensors");
  const torch::stable::accelerator::DeviceGuard guard(device);
  const Tensor result = empty_sums(sums, device);
  run_fingerprint(read, reader.block_shift(), static_cast<uint64_t*>(result.data_ptr()), sums, current_stream(device));
  return result;
}

}  // namespace
}  // namespace dash_attn

STABLE_TORCH_LIBRARY_IMPL(dash_attn_C, CUDA, library) {
  library.impl("fingerprint_blocks", TORCH_BOX(&dash_attn::fingerprint_blocks));
}
