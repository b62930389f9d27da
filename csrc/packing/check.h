// Runs beside a forward that needs no plan: a step of decoding whose query tiles all run at once. Such a forward reads
// the lengths and pages itself and keeps within the cache whatever they are. This kernel refuses wrong ones.
#pragma once

#include "../device/ptx.h"
#include "lengths.h"

namespace dash_attn::packing {

constexpr int kCheckThreads = 128;

struct CheckParams {
  Lengths k;
  PageTable pages;
  int batch;
};

inline __global__ void __launch_bounds__(kCheckThreads) check_kernel(const __grid_constant__ CheckParams params) {
  if (params.pages.exists()) {
    check_pages(params.pages, params.k, params.batch, int(blockIdx.x), int(gridDim.x));
  } else {
    for (int i = int(blockIdx.x * blockDim.x + threadIdx.x); i < params.batch; i += int(gridDim.x * blockDim.x)) {
      params.k(i);
    }
  }
  ptx::wait_for_previous_kernel();  // the forward: what follows this kernel in the stream follows both
}

}  // namespace dash_attn::packing
