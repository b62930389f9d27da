// The kernels of this build, without their types: what a plan must know of a kernel, and the function that launches it.
#pragma once

#include <cuda_runtime_api.h>

#include "../backward/params.h"
#include "../forward/params.h"
#include "arguments.h"

namespace dash_attn {

struct ForwardKernel {
  int swizzle_columns;  // of every TMA box
  int key_rows;         // of a KV tile
  bool serves_steps[2];  // of decoding without a plan; without and with pages
  // `starts_early`: the kernel may start before the previous kernel of the stream, a plan, has ended.
  void (*launch)(const forward::KernelParams& params, int ctas, bool starts_early, cudaStream_t stream);
};

struct BackwardKernel {
  int swizzle_columns;    // of every TMA box
  int stored_rows;        // keys whose dK or dV one TMA operation stores
  int cluster_size;
  int preprocess_blocks;  // blocks of the preprocess kernel for each query tile of a head
  bool may_finish_dq;     // whether the kernel can round and store dQ itself (backward/finish_dq.h)
  // `starts_early`: the kernel may start before the previous kernel of the stream has ended.
  void (*launch)(const backward::KernelParams& params, int ctas, bool starts_early, cudaStream_t stream);
};

// The kernel of this build that serves a call under `mask`, the call's mask as kernels see it (kernel_mask). Throws
// std::runtime_error if this build has none.
const ForwardKernel& forward_kernel_of(const ForwardArguments& call, const MaskRule& mask);
// The same for short query tiles (forward/short_mainloop.h); null if this build has none. The kernel of
// `forward_kernel_of` has the same bits.
const ForwardKernel* short_forward_kernel_of(const ForwardArguments& call, const MaskRule& mask);
const BackwardKernel& backward_kernel_of(const BackwardArguments& call, const MaskRule& mask);

}  // namespace dash_attn
