// What the bindings call: the forward pass on raw pointers. No torch.
#pragma once

#include <cuda_runtime_api.h>

#include "tensor.h"

namespace dash_attn {

struct ForwardArguments {
  TensorView q, k, v, out;
  float* softmax_lse;  // (batch, heads, seqlen_q)
  Dtype dtype;
  int batch, seqlen_q, seqlen_k, heads, kv_heads, head_dim;
  float softmax_scale;  // positive
  bool causal;
  int num_sms;  // SMs the kernel may use
};

void run_forward(const ForwardArguments& arguments, cudaStream_t stream);

}  // namespace dash_attn
