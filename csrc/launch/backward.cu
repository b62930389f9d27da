#include <string>

#include "backward.h"
#include "check.h"
#include "variant.h"
#include "workspace.h"

namespace dash_attn {

size_t backward_workspace_bytes(const BackwardArguments& a) {
  const TileShape tile = backward_tile_shape(padded_head_dim(a.head_dim), a.causal);
  return plan_workspace(nullptr, tile, a).bytes;
}

void run_backward(const BackwardArguments& a, cudaStream_t stream) {
  const int head_dim = padded_head_dim(a.head_dim);
  const auto policy = static_cast<Policy>(a.schedule);
#define DASH_BACKWARD_VARIANT(variant_dtype, variant_head_dim, variant_causal, variant_policy)                   \
  if (a.dtype == variant_dtype::kDtype && head_dim == variant_head_dim && a.causal == variant_causal &&          \
      policy == Policy::k##variant_policy) {                                                                     \
    return launch_backward<                                                                                      \
        BackwardVariant<variant_dtype, variant_head_dim, variant_causal, Policy::k##variant_policy>>(a, stream); \
  }
#include "built_variants.def"
#undef DASH_BACKWARD_VARIANT
  const bool named = a.schedule >= 0 && a.schedule < kNumPolicies;
  throw std::runtime_error(std::string("dash_attn: this build has no backward kernel for dtype ") +
                           (a.dtype == Dtype::kBFloat16 ? "bfloat16" : "float16") + ", head_dim " +
                           std::to_string(a.head_dim) + ", " + (a.causal ? "causal" : "full") + " mask, schedule " +
                           (named ? kPolicyNames[a.schedule] : std::to_string(a.schedule)) +
                           "; see the DASH_ATTN_* build variables in README.md");
}

}  // namespace dash_attn
