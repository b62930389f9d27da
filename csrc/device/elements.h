// The element types of tensors. Kernels compute with packed pairs of elements (fragment.h), so a type here is a size
// and a name.
//
// nvcc and ptxas apply other optimisations to a kernel whose mangled name contains "cutlass". The kernels were tuned
// with those, and the namespace of these types brings the word into their names.
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
