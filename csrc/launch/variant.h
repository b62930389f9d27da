// The names that variants.def uses, the types that its lines stand for, and the way from run-time values to a geometry.
#pragma once

#include <stdexcept>
#include <string>

#include "../backward/config.h"
#include "../device/score.h"
#include "../forward/config.h"
#include "arguments.h"

namespace dash_attn {

struct BFloat16 {
  using Element = cutlass::bfloat16_t;
  static constexpr Dtype kDtype = Dtype::kBFloat16;
};

struct Float16 {
  using Element = cutlass::half_t;
  static constexpr Dtype kDtype = Dtype::kFloat16;
};

struct Full {
  static constexpr MaskKind kKind = MaskKind::kFull;
};

struct Causal {
  static constexpr MaskKind kKind = MaskKind::kCausal;
};

struct Windowed {
  static constexpr MaskKind kKind = MaskKind::kWindow;
};

struct Plain {
  using Score = PlainScore;
};

struct Softcap {
  using Score = SoftcapScore;
};

struct Alibi {
  using Score = AlibiScore;
};

// Policies that share a kernel.
using Ordered = PolicySet<Policy::kDescending, Policy::kSpt, Policy::kAscending, Policy::kAtomic>;
using Shift = PolicySet<Policy::kShift>;
using SymmetricShift = PolicySet<Policy::kSymmetricShift>;
using OrderFree = PolicySet<Policy::kOrderFree>;

template <typename DtypeName, int kHeadDim, typename MaskName, typename ScoreName>
using ForwardVariant =
    forward::Variant<typename DtypeName::Element, kHeadDim, MaskName::kKind, typename ScoreName::Score>;

template <typename DtypeName, int kHeadDim, typename MaskName, typename ScoreName, typename Policies>
using BackwardVariant = backward::Variant<backward::Geometry<typename DtypeName::Element, kHeadDim>, MaskName::kKind,
                                          typename ScoreName::Score, Policies>;

template <typename Variant>
void launch_forward(const ForwardArguments& arguments, cudaStream_t stream);

template <typename Variant>
void launch_backward(const BackwardArguments& arguments, cudaStream_t stream);

// Calls f with an object of the backward's geometry for these arguments.
template <typename F>
void with_geometry(const AttentionArguments& a, F&& f) {
  const auto with_element = [&](auto dtype) {
    using Element = typename decltype(dtype)::Element;
    switch (padded_head_dim(a.head_dim)) {
      case 64:
        return f(backward::Geometry<Element, 64>{});
      case 96:
        return f(backward::Geometry<Element, 96>{});
      case 128:
        return f(backward::Geometry<Element, 128>{});
    }
    throw std::runtime_error("dash_attn: no kernel has head_dim " + std::to_string(a.head_dim));
  };
  return a.dtype == Dtype::kBFloat16 ? with_element(BFloat16{}) : with_element(Float16{});
}

}  // namespace dash_attn
