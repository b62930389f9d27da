// What the bindings call: the backward pass on raw pointers. No torch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "tensor.h"

namespace dash_attn {

struct BackwardArguments {
  TensorView q, k, v, out, dout, dq, dk, dv;
  const float* softmax_lse;
  void* workspace;
  Dtype dtype;
  int batch, seqlen_q, seqlen_k, heads, kv_heads, head_dim;
  float softmax_scale;
  bool causal;
  int schedule;
  int num_sms;  // SMs the kernel may use
};

size_t backward_workspace_bytes(const BackwardArguments& arguments);
void run_backward(const BackwardArguments& arguments, cudaStream_t stream);

}  // namespace dash_attn
