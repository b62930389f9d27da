// TMA descriptors of tensors of 16-bit elements.
#pragma once

#include <cuda.h>

#include "../schedule/sequences.h"
#include "tensor.h"

namespace dash_attn {

// Boxes of 64 columns x `box_heads` heads x `box_rows` rows, heads before rows, written to shared memory with the
// 128-byte swizzle. Coordinates are (column, head, and those of RowOrigin). What lies outside the heads, the columns or
// the sequence reads as zero and is not written. Throws std::runtime_error when the driver refuses.
CUtensorMap make_tensor_map(const TensorView& tensor, Dtype dtype, const RowsOfCall& rows, int heads, int head_dim,
                            int box_heads, int box_rows);

}  // namespace dash_attn
