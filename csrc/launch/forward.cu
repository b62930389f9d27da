#include <string>

#include "check.h"
#include "forward.h"
#include "variant.h"

namespace dash_attn {

void run_forward(const ForwardArguments& a, cudaStream_t stream) {
  const int head_dim = padded_head_dim(a.head_dim);
#define DASH_FORWARD_VARIANT(variant_dtype, variant_head_dim, variant_causal)                           \
  if (a.dtype == variant_dtype::kDtype && head_dim == variant_head_dim && a.causal == variant_causal) { \
    return launch_forward<ForwardVariant<variant_dtype, variant_head_dim, variant_causal>>(a, stream);  \
  }
#include "built_variants.def"
#undef DASH_FORWARD_VARIANT
  throw std::runtime_error(std::string("dash_attn: this build has no forward kernel for dtype ") +
                           (a.dtype == Dtype::kBFloat16 ? "bfloat16" : "float16") + ", head_dim " +
                           std::to_string(a.head_dim) + ", " + (a.causal ? "causal" : "full") +
                           " mask; see the DASH_ATTN_* build variables in README.md");
}

}  // namespace dash_attn
