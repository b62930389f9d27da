// Tensors as the bindings hand them to the launch code. No torch.
#pragma once

#include <cstdint>

namespace dash_attn {

// (batch, seqlen, heads, head_dim); of a pack (total, heads, head_dim), whose stride_batch means nothing.
struct TensorView {
  void* data;
  int64_t stride_batch, stride_seqlen, stride_head;  // in elements; the head_dim stride is 1
};

// A call's rows: those of a dense batch are (batch, seqlen), those of a pack one after the other.
struct RowsOfCall {
  int batch, seqlen;  // of a pack: seqlen rows in all
  bool is_pack;
};

enum class Dtype { kBFloat16, kFloat16 };

}  // namespace dash_attn
