// TMA descriptors of tensors of 16-bit elements.
#pragma once

#include <cuda.h>

#include "../placement/sequences.h"
#include "tensor.h"

namespace dash_attn {

// What a TMA operation moves, heads before rows in shared memory, with the swizzle of blocks of as many columns, 64 or
// 32 (device/gemm.h).
struct TensorBox {
  int columns, heads, rows;
};

// Coordinates are (column, head, and those of RowOrigin). What lies outside the heads, the columns or the sequence
// reads as zero and is not written. Throws std::runtime_error when the driver refuses.
CUtensorMap make_tensor_map(const TensorView& tensor, Dtype dtype, const RowsOfCall& rows, int heads, int head_dim,
                            const TensorBox& box);

}  // namespace dash_attn
