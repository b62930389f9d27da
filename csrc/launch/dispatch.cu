// From the arguments of a call to the kernel that serves it, of those in this build.
#include <string>

#include "arguments.h"
#include "forward_work.h"
#include "scores.h"
#include "self_check.h"
#include "variant.h"
#include "workspace.h"

namespace dash_attn {
namespace {

// `a`: as the caller gave them.
[[noreturn]] void no_kernel(const AttentionArguments& a, const char* pass, const std::string& schedule) {
  const MaskKind served = served_mask(score_kind(a), a.padded_head_dims(), a.mask).kind;
  const auto mask_name = [](MaskKind kind) { return std::string(kMaskNames[static_cast<int>(kind)]); };
  const std::string by =
      served == a.mask.kind ? "" : " (which the kernels of the " + mask_name(served) + " mask serve)";
  throw std::runtime_error(std::string("dash_attn: this build has no ") + pass + " kernel for dtype " +
                           (a.dtype == Dtype::kBFloat16 ? "bfloat16" : "float16") + ", head dims " +
                           head_dims_text(a.head_dims) + ", " + mask_name(a.mask.kind) + " mask, " +
                           kScoreNames[static_cast<int>(score_kind(a))] + " score" + by + schedule +
                           "; see the DASH_ATTN_* build variables in docs/install.md");
}

// As the kernel that serves them takes them.
template <typename Arguments>
Arguments for_kernel(Arguments a) {
  a.mask = served_mask(score_kind(a), a.padded_head_dims(), a.mask);
  return a;
}

template <typename DtypeName, typename Dims, typename MaskName, typename ScoreName>
bool serves(const AttentionArguments& a) {
  return a.dtype == DtypeName::kDtype && a.padded_head_dims() == Dims::kDims && a.mask.kind == MaskName::kKind &&
         score_kind(a) == ScoreName::Score::kKind;
}

}  // namespace

size_t forward_workspace_bytes(const ForwardArguments& arguments) {
  const ForwardArguments a = for_kernel(arguments);
  return plan_workspace(nullptr, a, make_forward_scheduler(a)).bytes;
}

void run_forward(const ForwardArguments& arguments, cudaStream_t stream) {
  if (arguments.is_pack()) { require_self_check(); }
  const ForwardArguments a = for_kernel(arguments);
#define DASH_FORWARD_VARIANT(dtype, head_dims, mask, score)                                \
  if (serves<dtype, Dims##head_dims, mask, score>(a)) {                                    \
    return launch_forward<ForwardVariant<dtype, Dims##head_dims, mask, score>>(a, stream); \
  }
#include "built_variants.def"
#undef DASH_FORWARD_VARIANT
  no_kernel(arguments, "forward", "");
}

int64_t carried_dq_floats(const AttentionArguments& a) {
  const TileGrid grid = backward_grid(a);
  return int64_t{a.batch} * a.heads * grid.query_tiles() * grid.tiling.query * a.padded_head_dims().qk;
}

int64_t carried_key_floats(const AttentionArguments& a) {
  const TileGrid grid = backward_grid(a);
  return int64_t{a.batch} * a.kv_heads * grid.kv_tiles() * grid.tiling.key * a.padded_head_dims().sum();
}

size_t backward_workspace_bytes(const BackwardArguments& arguments) {
  return plan_workspace(nullptr, for_kernel(arguments)).bytes;
}

void run_backward(const BackwardArguments& arguments, cudaStream_t stream) {
  require_self_check();
  const BackwardArguments a = for_kernel(arguments);
  const auto policy = static_cast<Policy>(a.schedule);
  BackwardArguments of_kernel = a;
  if (a.carries()) { of_kernel.mask.kind = MaskKind::kWindow; }
#define DASH_BACKWARD_VARIANT(dtype, head_dims, mask, score, policies)                                 \
  if (serves<dtype, Dims##head_dims, mask, score>(of_kernel) && policies::contains(policy) &&          \
      policies::kCarries == a.carries()) {                                                             \
    return launch_backward<BackwardVariant<dtype, Dims##head_dims, mask, score, policies>>(a, stream); \
  }
#include "built_variants.def"
#undef DASH_BACKWARD_VARIANT
  const bool named = a.schedule >= 0 && a.schedule < kNumPolicies;
  no_kernel(arguments, "backward",
            std::string(", schedule ") + (named ? kPolicyNames[a.schedule] : std::to_string(a.schedule).c_str()) +
                (a.carries() ? ", carried sums" : ""));
}

}  // namespace dash_attn
