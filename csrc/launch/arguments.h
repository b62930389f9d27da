// What the bindings call: both passes on raw pointers. No torch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "../schedule/mask.h"
#include "tensor.h"

namespace dash_attn {

// Where the sequences of a pack are, on the device; cu_seqlens is null for a dense batch. Sequence b starts at row
// cu_seqlens[b] and has seqused[b] rows, or where seqused is null those up to cu_seqlens[b + 1].
struct Pack {
  const int *cu_seqlens_q, *cu_seqlens_k;  // (batch + 1)
  const int *seqused_q, *seqused_k;        // (batch)
};

struct AttentionArguments {
  TensorView q, k, v, out;
  float* softmax_lse;  // (batch, heads, seqlen_q), of a pack (heads, total_q); the backward only reads it
  void* workspace;     // of forward_workspace_bytes or backward_workspace_bytes
  Dtype dtype;
  int batch, seqlen_q, seqlen_k, heads, kv_heads, head_dim;  // seqlen: of a pack total_q, total_k
  float softmax_scale;                                       // positive
  MaskRule mask;
  Pack pack;
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
