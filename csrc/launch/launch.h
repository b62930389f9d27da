// Launching a kernel with its shared memory and attributes.
#pragma once

#include <cuda_runtime_api.h>

#include <initializer_list>
#include <string>
#include <vector>

#include "check.h"

namespace dash_attn {

struct LaunchShape {
  unsigned blocks;
  int threads, shared_bytes;
};

// Programmatic dependent launch, where allowed: see ptx::launch_dependents and ptx::wait_for_previous_kernel. A kernel that
// starts early takes SMs beside those of the kernel before, which a caller who keeps SMs for others does not allow.
inline cudaLaunchAttribute starts_before_previous_ends(bool allowed) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = allowed;
  return attribute;
}

// `name` stands in errors.
template <typename Params>
void launch(const char* name, void (*kernel)(Params), const Params& params, const LaunchShape& shape,
            cudaStream_t stream, std::initializer_list<cudaLaunchAttribute> attributes = {}) {
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shape.shared_bytes),
             (std::string("sizing the shared memory of ") + name).c_str());
  std::vector<cudaLaunchAttribute> attrs(attributes);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(shape.blocks);
  config.blockDim = dim3(shape.threads);
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  config.attrs = attrs.data();
  config.numAttrs = static_cast<unsigned>(attrs.size());
  check_cuda(cudaLaunchKernelEx(&config, kernel, params), (std::string("launching ") + name).c_str());
}

}  // namespace dash_attn
