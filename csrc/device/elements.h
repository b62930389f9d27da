// The element types of tensors. Kernels compute with packed pairs of elements (fragment.h), so a type here is only a
// name and a size.
//
// nvcc and ptxas optimise a kernel differently if its mangled name contains "cutlass". The kernels were tuned that way,
// and the namespace of these types puts the word into their names.
#pragma once

#include <cstdint>

namespace dash_attn {

namespace like_cutlass {

struct bf16 {
  uint16_t bits;
};

struct fp16 {
  uint16_t bits;
};

}  // namespace like_cutlass

using like_cutlass::bf16, like_cutlass::fp16;

}  // namespace dash_attn
