// What the bindings call: both passes on raw pointers. No torch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "../schedule/mask.h"
#include "tensor.h"

namespace dash_attn {

struct AttentionArguments {
  TensorView q, k, v, out;
  float* softmax_lse;  // (batch, heads, seqlen_q); the backward only reads it
  void* workspace;     // of forward_workspace_bytes or backward_workspace_bytes
  Dtype dtype;
  int batch, seqlen_q, seqlen_k, heads, kv_heads, head_dim;
  float softmax_scale;  // positive
  MaskKind mask;
  int num_sms;    // SMs the kernels may use
  int sm_margin;  // SMs of the device beside those

  Sequence sequence() const { return {seqlen_q, seqlen_k}; }
  int group_size() const { return heads / kv_heads; }
};

using ForwardArguments = AttentionArguments;

struct BackwardArguments : AttentionArguments {
  TensorView dout, dq, dk, dv;
  int schedule;  // number of a policy
};

size_t forward_workspace_bytes(const ForwardArguments& arguments);
void run_forward(const ForwardArguments& arguments, cudaStream_t stream);

size_t backward_workspace_bytes(const BackwardArguments& arguments);
void run_backward(const BackwardArguments& arguments, cudaStream_t stream);

}  // namespace dash_attn
