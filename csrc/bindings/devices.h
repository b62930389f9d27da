// What the CUDA ops ask of a device, on torch's stable ABI.
#pragma once

#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/macros.h>
#include <torch/headeronly/util/Exception.h>
#include <torch/headeronly/util/shim_utils.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace dash_attn {

struct DeviceFacts {
  int major, minor, sms;
};

inline int device_attribute(cudaDeviceAttr attribute, int device) {
  int value = 0;
  STD_CUDA_CHECK(cudaDeviceGetAttribute(&value, attribute, device));
  return value;
}

inline const DeviceFacts& facts_of(int32_t device) {
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

// `name` is the argument whose tensors are there.
inline void check_hopper(int32_t device, const char* name) {
  const auto [major, minor, sms] = facts_of(device);
  // A check that users meet: without the place in the sources that STD_TORCH_CHECK puts first.
  if (major != 9 || minor != 0) {
    throw std::runtime_error(std::string(name) + " must be on a GPU of compute capability 9.0 (Hopper: H100, H200, " +
                             "GH200), got cuda:" + std::to_string(device) + " with compute capability " +
                             std::to_string(major) + "." + std::to_string(minor));
  }
}

inline cudaStream_t current_stream(int32_t device) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return static_cast<cudaStream_t>(stream);
}

}  // namespace dash_attn
