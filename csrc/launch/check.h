#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace dash_attn {

// `doing` what, to or with `what`: the words of the error.
inline void check_cuda(cudaError_t error, const char* doing, const char* what = "") {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("dash_attn: CUDA error while ") + doing + what + ": " +
                             cudaGetErrorString(error));
  }
}

}  // namespace dash_attn
