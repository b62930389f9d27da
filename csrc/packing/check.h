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
  check_keys(params.pages, params.k, params.batch, int(blockIdx.x), int(gridDim.x));
  // What follows this kernel in the stream must also follow the forward. One CTA waits for its end: more would keep SMs
  // from other streams.
  if (blockIdx.x == 0) { ptx::wait_for_previous_kernel(); }
}

}  // namespace dash_attn::packing
