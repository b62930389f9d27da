// The forward kernels of csrc/ for one row of the table of tiles, EMULATED_DIMS, on the host.
#include "built.h"
#include "launch/compiled_forward.h"

using namespace dash_attn;

namespace {

// The kernel that serves a call, of those for Dtype.
template <typename Dtype>
const ForwardKernel& kernel_of(const ForwardArguments& a, const MaskRule& mask) {
  const ForwardKernel* found = nullptr;
  const auto serve = [&]<typename Mask, typename Score>(Mask, Score) {
    if (mask.kind != Mask::kKind || !Score::Score::serves(score_kind(a))) { return; }
    if constexpr (emulator::is_built<Dtype, Mask, Score>()) {
      found = &compiled_forward<ForwardVariant<Dtype, EMULATED_DIMS, Mask, Score>>();
    }
  };
  serve(Full{}, Plain{});
  serve(Causal{}, Plain{});
  serve(Windowed{}, Plain{});
  serve(Columns{}, Plain{});
  serve(Windowed{}, Changed{});
  serve(Windowed{}, Dropout{});
  constexpr int kDim = EMULATED_DIMS::kDims.qk;
  if constexpr (kDim == 64 || kDim == 128) {
    serve(Full{}, Dropout{});
    serve(Causal{}, Dropout{});
  }
  if constexpr (kDim == 96 || kDim == 128 || kDim == 256) { serve(Causal{}, Softcap{}); }
  if (!found) { emulator::fail_without_kernel(); }
  return *found;
}

// The same for short query tiles, or null.
template <typename Dtype>
const ForwardKernel* short_kernel_of(const ForwardArguments& a) {
  if constexpr (EMULATED_DIMS::kDims.v <= 128 && emulator::is_built<Dtype, Windowed, Plain>()) {
    if (score_kind(a) == ScoreKind::kPlain) {
      return &compiled_forward<ForwardVariant<Dtype, EMULATED_DIMS, Windowed, Plain, true>>();
    }
  }
  return nullptr;
}

}  // namespace

namespace dash_attn {

const ForwardKernel& forward_kernel_of(const ForwardArguments& a, const MaskRule& mask) {
  return a.dtype == Dtype::kBFloat16 ? kernel_of<BFloat16>(a, mask) : kernel_of<Float16>(a, mask);
}

const ForwardKernel* short_forward_kernel_of(const ForwardArguments& a, const MaskRule&) {
  return a.dtype == Dtype::kBFloat16 ? short_kernel_of<BFloat16>(a) : short_kernel_of<Float16>(a);
}

}  // namespace dash_attn
