#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace dash_attn {

inline void check_cuda(cudaError_t error, const char* doing) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("dash_attn: CUDA error while ") + doing + ": " + cudaGetErrorString(error));
  }
}

}  // namespace dash_attn
