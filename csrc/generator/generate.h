// The kernel that generates the bits of dropout.
#pragma once

#include "lines.h"
#include "partition.h"

namespace dash_attn::dropout {

template <Mapping kMapping, int kRounds>
__global__ void __launch_bounds__(kGeneratorThreads, generator_blocks_of_sm(kMapping))
    generator_kernel(const GeneratorParams params) {
  const uint32_t units = uint32_t(params.units()), warps = gridDim.x * (kGeneratorThreads / 32);
  uint32_t unit = blockIdx.x * (kGeneratorThreads / 32) + threadIdx.x / 32;
  for (; unit < units; unit += warps) { make_lines<kMapping, kRounds>(params, unit, threadIdx.x % 32); }
}

}  // namespace dash_attn::dropout
