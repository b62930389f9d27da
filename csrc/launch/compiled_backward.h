// A compiled backward kernel as an entry that plans can use. The translation units that setup.py writes include this.
#pragma once

#include "../backward/kernel.h"
#include "../backward/rows.h"
#include "kernels.h"
#include "launch.h"
#include "variant.h"

namespace dash_attn {

template <typename Variant>
void launch_compiled(const backward::KernelParams& params, int ctas, bool starts_early, cudaStream_t stream) {
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {Variant::kClusterSize, 1, 1};
  launch("the backward kernel", backward::backward_kernel<Variant>, params,
         {unsigned(ctas), Variant::kThreads, sizeof(backward::SharedStorage<Variant>)}, stream,
         {starts_before_previous_ends(starts_early), cluster});
}

template <typename Variant>
const BackwardKernel& compiled_backward() {
  static constexpr BackwardKernel kKernel{Variant::Swizzle::kColumns, Variant::kStoredRows, Variant::kClusterSize,
                                          backward::PreprocessTileOf<Variant>::kBlocks, Variant::kMayFinishDq,
                                          launch_compiled<Variant>};
  return kKernel;
}

}  // namespace dash_attn
