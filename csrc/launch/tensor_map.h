// TMA descriptors of (batch, seqlen, heads, head_dim) tensors of 16-bit elements.
#pragma once

#include <cuda.h>

#include "tensor.h"

namespace dash_attn {

// Boxes of 64 columns x `rows` rows of one head, written to shared memory with the 128-byte swizzle. What lies outside
// the tensor reads as zero and is not written. Throws std::runtime_error when the driver refuses.
CUtensorMap make_tensor_map(const TensorView& tensor, Dtype dtype, int batch, int seqlen, int heads, int head_dim,
                            int rows);

// The same of the tensor seen as (batch, heads / group, seqlen, group, head_dim): a box's rows are all heads of a group
// at one position, then at the next. `group` divides `heads` and `rows`.
CUtensorMap make_grouped_tensor_map(const TensorView& tensor, Dtype dtype, int batch, int seqlen, int heads,
                                    int head_dim, int group, int rows);

}  // namespace dash_attn
