// Launching a kernel with its shared memory and attributes.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <set>
#include <utility>

#include "../device/sm90.h"
#include "check.h"

namespace dash_attn {

struct LaunchShape {
  unsigned blocks;
  int threads, shared_bytes;
};

// Programmatic dependent launch, if allowed: see ptx::launch_dependents and ptx::wait_for_previous_kernel. A kernel
// that starts early takes SMs beside those of the previous kernel, which a caller who reserves SMs for others does not
// allow.
inline cudaLaunchAttribute starts_before_previous_ends(bool allowed) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = allowed;
  return attribute;
}

// The smallest dynamic shared memory that limits occupancy to one block an SM.
constexpr int kAloneOnSm = kSharedMemoryLimit / 2 + 1024;

// The shape of a launch whose blocks loop over the work. If SMs are to be left to others, each block has an SM to
// itself, and there are no more blocks than usable SMs.
inline LaunchShape within_margin(int64_t blocks, int threads, int shared_bytes, int num_sms, int sm_margin) {
  if (sm_margin == 0) { return {unsigned(blocks), threads, shared_bytes}; }
  return {unsigned(std::min<int64_t>(blocks, num_sms)), threads, std::max(shared_bytes, kAloneOnSm)};
}

// A kernel that needs more than the default must request that once on each device, and must then request the most that
// any of its launches needs: kAloneOnSm, if its blocks need less but may have to be alone on their SM.
inline void allow_shared_memory(const char* name, const void* kernel, int bytes) {
  constexpr int kDefaultBytes = 48 << 10;
  if (bytes <= kDefaultBytes) { return; }
  int device = 0;
  check_cuda(cudaGetDevice(&device), "asking for the current device");
  thread_local std::set<std::pair<int, const void*>> allowed;
  const std::pair<int, const void*> key(device, kernel);
  if (allowed.count(key)) { return; }
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, std::max(bytes, kAloneOnSm)),
             "sizing the shared memory of ", name);
  allowed.insert(key);
}

// `name` appears in errors. A kernel that needs more shared memory than kAloneOnSm must need the same at each launch.
template <typename Params>
void launch(const char* name, void (*kernel)(Params), const Params& params, const LaunchShape& shape,
            cudaStream_t stream, std::initializer_list<cudaLaunchAttribute> attributes = {}) {
  allow_shared_memory(name, reinterpret_cast<const void*>(kernel), shape.shared_bytes);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(shape.blocks);
  config.blockDim = dim3(shape.threads);
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  config.attrs = const_cast<cudaLaunchAttribute*>(attributes.begin());  // read only
  config.numAttrs = static_cast<unsigned>(attributes.size());
  check_cuda(cudaLaunchKernelEx(&config, kernel, params), "launching ", name);
}

}  // namespace dash_attn
