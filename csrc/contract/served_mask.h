// The mask that the kernel of a call is compiled for. This fixes bits: splits and the order of heads follow from the
// kind of the kernel's mask. It depends on what a call asks for, and not on which kernels a build has.
#pragma once

#include "mask.h"
#include "tile_shapes.h"

namespace dash_attn {

enum class ScoreKind : int { kPlain, kSoftcap, kAlibi, kDropout };
inline constexpr const char* kScoreNames[] = {"plain", "softcap", "alibi", "dropout"};

// Few masks have kernels of their own for scores other than the plain one: the causal mask for softcaps at head dims
// 96, 128 and 256, and every mask for dropout at 64 and 128. All others are served as a window, possibly without
// bounds.
constexpr MaskRule served_mask(ScoreKind score, HeadDims padded, MaskRule const& mask) {
  bool const is_causal = mask.kind == MaskKind::kCausal;
  bool const has_kernel = (score == ScoreKind::kSoftcap && is_causal && padded.qk != 64 && padded.qk != 192) ||
                          (score == ScoreKind::kDropout && (padded.qk == 64 || padded.qk == 128));
  if (score == ScoreKind::kPlain || mask.kind == MaskKind::kWindow || has_kernel) return mask;
  return {MaskKind::kWindow, {kUnbounded, is_causal ? 0 : kUnbounded, Divisor(0)}};
}

}  // namespace dash_attn
