// TMA descriptors of (batch, seqlen, heads, head_dim) tensors of 16-bit elements.
#pragma once

#include <cuda.h>

#include "backward.h"

namespace dash_attn {

// Boxes of 64 columns x `rows` rows of one head, written to shared memory with the 128-byte swizzle. What lies outside
// the tensor reads as zero and is not written. Throws std::runtime_error when the driver refuses.
CUtensorMap make_tensor_map(const TensorView& tensor, Dtype dtype, int batch, int seqlen, int heads, int head_dim,
                            int rows);

}  // namespace dash_attn
