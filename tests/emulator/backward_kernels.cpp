// The kernels of the backward for one row of the table of tiles, EMULATED_DIMS, on the host.
#include "built.h"
#include "launch/compiled_backward.h"

using namespace dash_attn;

namespace {

template <typename Dtype, typename Mask, typename Score, typename Policies>
const BackwardKernel* kernel_of_policies() {
  constexpr CallKind kCall{Mask::kKind, EMULATED_DIMS::kDims, Score::Score::kChangesLogits, Score::Score::kDrops,
                           Mask::kKind == MaskKind::kColumns};
  if constexpr (has_kernel(Policies::kAny, kCall) && emulator::is_built<Dtype, Mask, Score, Policies>()) {
    return &compiled_backward<BackwardVariant<Dtype, EMULATED_DIMS, Mask, Score, Policies>>();
  }
  return nullptr;
}

// The kernel that serves a call, of those for Dtype.
template <typename Dtype>
const BackwardKernel& kernel_of(const BackwardArguments& a, const MaskRule& mask) {
  const BackwardKernel* found = nullptr;
  const auto serve = [&]<typename Mask, typename Score>(Mask, Score) {
    if (mask.kind != Mask::kKind || !Score::Score::serves(score_kind(a))) { return; }
    found = a.policy == Policy::kShift       ? kernel_of_policies<Dtype, Mask, Score, Shift>()
            : a.policy == Policy::kOrderFree ? kernel_of_policies<Dtype, Mask, Score, OrderFree>()
                                             : kernel_of_policies<Dtype, Mask, Score, Ordered>();
  };
  constexpr int kDim = EMULATED_DIMS::kDims.qk;
  serve(Full{}, Plain{});
  serve(Causal{}, Plain{});
  serve(Windowed{}, Plain{});
  serve(Columns{}, Plain{});
  if constexpr (kDim == 64 || kDim == 256) {
    serve(Windowed{}, Changed{});
  }
  if constexpr (kDim == 256) { serve(Causal{}, Softcap{}); }
  if constexpr (kDim == 96 || kDim == 256) { serve(Windowed{}, Dropout{}); }
  if (!found) { emulator::fail_without_kernel(); }
  return *found;
}

}  // namespace

namespace dash_attn {

const BackwardKernel& backward_kernel_of(const BackwardArguments& a, const MaskRule& mask) {
  return a.dtype == Dtype::kBFloat16 ? kernel_of<BFloat16>(a, mask) : kernel_of<Float16>(a, mask);
}

}  // namespace dash_attn
