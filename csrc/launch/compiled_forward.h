// A compiled forward kernel as an entry that plans can use. The translation units that setup.py writes include this.
#pragma once

#include "../forward/kernel.h"
#include "kernels.h"
#include "launch.h"
#include "variant.h"

namespace dash_attn {

template <typename Variant>
void launch_compiled(const forward::KernelParams& params, int ctas, bool starts_early, cudaStream_t stream) {
  launch("the forward kernel", forward::forward_kernel<Variant>, params,
         {unsigned(ctas), Variant::kThreads, sizeof(forward::SharedStorage<Variant>)}, stream,
         {starts_before_previous_ends(starts_early)});
}

template <typename Variant>
const ForwardKernel& compiled_forward() {
  static constexpr ForwardKernel kKernel{Variant::Swizzle::kColumns, Variant::kKey,
                                         {Variant::serves_steps(false), Variant::serves_steps(true)},
                                         launch_compiled<Variant>};
  return kKernel;
}

}  // namespace dash_attn
