// Tensors as the bindings hand them to the launch code. No torch.
#pragma once

#include <cstdint>

namespace dash_attn {

// (batch, seqlen, heads, head_dim); of a pack (total, heads, head_dim), with stride_batch 0.
struct TensorView {
  void* data;
  int64_t stride_batch, stride_seqlen, stride_head;  // in elements; the head_dim stride is 1
};

enum class Dtype { kBFloat16, kFloat16 };

}  // namespace dash_attn
