// From a call to the kernel of this build that serves it.
#include <string>

#include "kernels.h"
#include "scores.h"
#include "variant.h"

namespace dash_attn {
namespace {

std::string mask_name(MaskKind kind) { return kMaskNames[static_cast<int>(kind)]; }

// `mask`: the kernel's; `more`: what else was asked of it.
[[noreturn]] void no_kernel(const AttentionArguments& a, const MaskRule& mask, const char* pass,
                            const std::string& more) {
  const std::string by =
      mask.kind == a.mask.kind ? "" : " (which the kernels of the " + mask_name(mask.kind) + " mask serve)";
  throw std::runtime_error(std::string("dash_attn: this build has no ") + pass + " kernel for dtype " +
                           (a.dtype == Dtype::kBFloat16 ? "bfloat16" : "float16") + ", head dims " +
                           head_dims_text(a.head_dims) + ", " + mask_name(a.mask.kind) + " mask, " +
                           kScoreNames[static_cast<int>(score_kind(a))] + " score" + by + more +
                           "; see the DASH_ATTN_* build variables in docs/install.md");
}

template <typename DtypeName, typename Dims, typename MaskName, typename ScoreName>
bool serves(const AttentionArguments& a, const MaskRule& mask) {
  return a.dtype == DtypeName::kDtype && a.padded_head_dims() == Dims::kDims && mask.kind == MaskName::kKind &&
         ScoreName::Score::serves(score_kind(a));
}

}  // namespace

const ForwardKernel& forward_kernel_of(const ForwardArguments& a, const MaskRule& mask) {
#define DASH_FORWARD_VARIANT(dtype, head_dims, mask_name, score)                         \
  if (serves<dtype, Dims##head_dims, mask_name, score>(a, mask)) {                       \
    return compiled_forward<ForwardVariant<dtype, Dims##head_dims, mask_name, score>>(); \
  }
#include "built_variants.def"
#undef DASH_FORWARD_VARIANT
  no_kernel(a, mask, "forward", "");
}

const ForwardKernel* short_forward_kernel_of(const ForwardArguments& a, const MaskRule& mask) {
#define DASH_SHORT_FORWARD_VARIANT(dtype, head_dims, mask_name, score)                          \
  if (serves<dtype, Dims##head_dims, mask_name, score>(a, mask)) {                              \
    return &compiled_forward<ForwardVariant<dtype, Dims##head_dims, mask_name, score, true>>(); \
  }
#include "built_variants.def"
#undef DASH_SHORT_FORWARD_VARIANT
  return nullptr;
}

const BackwardKernel& backward_kernel_of(const BackwardArguments& a, const MaskRule& mask) {
#define DASH_BACKWARD_VARIANT(dtype, head_dims, mask_name, score, policies)                        \
  if (policies::contains(a.policy) && serves<dtype, Dims##head_dims, mask_name, score>(a, mask)) { \
    using Found = BackwardVariant<dtype, Dims##head_dims, mask_name, score, policies>;             \
    const bool is_ordered = accumulation(a.policy) == Accumulation::kOrdered;                      \
    if (!a.carries() || (Found::kMayCarry && is_ordered)) { return compiled_backward<Found>(); }   \
  }
#include "built_variants.def"
#undef DASH_BACKWARD_VARIANT
  no_kernel(a, mask, "backward",
            std::string(", schedule ") + kPolicyNames[int(a.policy)] + (a.carries() ? ", carried sums" : ""));
}

}  // namespace dash_attn
