// The names that variants.def uses, the types that its lines stand for, and the way from run-time values to a geometry.
#pragma once

#include <stdexcept>
#include <string>

#include "../backward/config.h"
#include "../device/score.h"
#include "../forward/config.h"
#include "arguments.h"
#include "kernels.h"

namespace dash_attn {

struct BFloat16 {
  using Element = bf16;
  static constexpr Dtype kDtype = Dtype::kBFloat16;
};

struct Float16 {
  using Element = fp16;
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

struct Columns {
  static constexpr MaskKind kKind = MaskKind::kColumns;
};

struct Plain {
  using Score = PlainScore;
};

struct Softcap {
  using Score = SoftcapScore;
};

struct Changed {
  using Score = ChangedScore;
};

struct Dropout {
  using Score = DropoutScore;
};

// Policies that share a kernel. Where DASH_ATTN_POLICIES names a yardstick, OrderedAndYardsticks replaces Ordered.
using Ordered = PolicySet<Policy::kDescending, Policy::kSpt>;
using OrderedAndYardsticks = PolicySet<Policy::kDescending, Policy::kAtomic, Policy::kAscending, Policy::kSpt>;
using Shift = PolicySet<Policy::kShift>;
using SymmetricShift = PolicySet<Policy::kSymmetricShift>;
using OrderFree = PolicySet<Policy::kOrderFree>;

template <int kQkDim, int kValueDim = kQkDim>
struct Dims {
  static constexpr HeadDims kDims = {kQkDim, kValueDim};
  static_assert(padded_head_dims(kQkDim, kValueDim) == kDims, "a row of the table");
};

using Dims64 = Dims<64>;
using Dims96 = Dims<96>;
using Dims128 = Dims<128>;
using Dims192x128 = Dims<192, 128>;
using Dims192 = Dims<192>;
using Dims256 = Dims<256>;

template <typename DtypeName, typename Dims, typename MaskName, typename ScoreName, bool kIsShort = false>
using ForwardVariant = forward::Variant<typename DtypeName::Element, Dims::kDims.qk, Dims::kDims.v, MaskName::kKind,
                                        typename ScoreName::Score, kIsShort>;

template <typename DtypeName, typename Dims, typename MaskName, typename ScoreName, typename Policies>
using BackwardVariant =
    backward::Variant<typename DtypeName::Element, backward::Geometry<Dims::kDims.qk, Dims::kDims.v>, MaskName::kKind,
                      typename ScoreName::Score, Policies>;

template <typename Variant>
const ForwardKernel& compiled_forward();

template <typename Variant>
const BackwardKernel& compiled_backward();

// The translation units that setup.py writes, one variant a line. Each includes compiled_forward.h or
// compiled_backward.h.
#define DASH_INSTANTIATE_FORWARD(dtype, head_dims, mask, score)         \
  template const dash_attn::ForwardKernel& dash_attn::compiled_forward< \
      dash_attn::ForwardVariant<dash_attn::dtype, dash_attn::Dims##head_dims, dash_attn::mask, dash_attn::score>>();
#define DASH_INSTANTIATE_SHORT_FORWARD(dtype, head_dims, mask, score)                                               \
  template const dash_attn::ForwardKernel&                                                                         \
  dash_attn::compiled_forward<dash_attn::ForwardVariant<dash_attn::dtype, dash_attn::Dims##head_dims, dash_attn::mask, \
                                                        dash_attn::score, true>>();
#define DASH_INSTANTIATE_BACKWARD(dtype, head_dims, mask, score, policies)                           \
  template const dash_attn::BackwardKernel& dash_attn::compiled_backward<dash_attn::BackwardVariant< \
      dash_attn::dtype, dash_attn::Dims##head_dims, dash_attn::mask, dash_attn::score, dash_attn::policies>>();

inline std::string head_dims_text(HeadDims dims) {
  return "(" + std::to_string(dims.qk) + ", " + std::to_string(dims.v) + ")";
}

// Calls f with an object of the backward's geometry for these arguments.
template <typename F>
auto with_geometry(const AttentionArguments& a, F&& f) {
  const HeadDims dims = a.padded_head_dims();
  if (dims == HeadDims{64, 64}) { return f(backward::Geometry<64, 64>{}); }
  if (dims == HeadDims{96, 96}) { return f(backward::Geometry<96, 96>{}); }
  if (dims == HeadDims{128, 128}) { return f(backward::Geometry<128, 128>{}); }
  if (dims == HeadDims{192, 128}) { return f(backward::Geometry<192, 128>{}); }
  if (dims == HeadDims{192, 192}) { return f(backward::Geometry<192, 192>{}); }
  if (dims == HeadDims{256, 256}) { return f(backward::Geometry<256, 256>{}); }
  throw std::runtime_error("dash_attn: no kernel has head dims " + head_dims_text(a.head_dims));
}

}  // namespace dash_attn
