// The names that variants.def uses, and the Config each of its lines stands for.
#pragma once

#include "../backward/config.h"
#include "../forward/config.h"
#include "backward.h"
#include "forward.h"

namespace dash_attn {

struct BFloat16 {
  using Element = cutlass::bfloat16_t;
  static constexpr Dtype kDtype = Dtype::kBFloat16;
};

struct Float16 {
  using Element = cutlass::half_t;
  static constexpr Dtype kDtype = Dtype::kFloat16;
};

template <typename DtypeName, int kHeadDim, bool kCausal, Policy kPolicy>
using BackwardVariant = backward::Config<typename DtypeName::Element, kHeadDim, kCausal, kPolicy>;

template <typename DtypeName, int kHeadDim, bool kCausal>
using ForwardVariant = forward::Config<typename DtypeName::Element, kHeadDim, kCausal>;

template <typename Config>
void launch_backward(const BackwardArguments& arguments, cudaStream_t stream);

template <typename Config>
void launch_forward(const ForwardArguments& arguments, cudaStream_t stream);

}  // namespace dash_attn
