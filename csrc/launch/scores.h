// Which score a call asks for, and what its kernels need to know of it.
#pragma once

#include <cmath>

#include "../device/score.h"
#include "arguments.h"

namespace dash_attn {

inline ScoreKind score_kind(const AttentionArguments& a) {
  return a.softcap > 0 ? ScoreKind::kSoftcap : a.alibi_slopes ? ScoreKind::kAlibi : ScoreKind::kPlain;
}

// A softcap has no kernel of its own for the full mask, ALiBi for none but windows: there the mask is a window without
// bounds.
inline MaskRule served_mask(ScoreKind score, const MaskRule& mask) {
  const bool is_full = mask.kind == MaskKind::kFull, is_causal = mask.kind == MaskKind::kCausal;
  if ((score == ScoreKind::kSoftcap && is_full) || (score == ScoreKind::kAlibi && (is_full || is_causal))) {
    return {MaskKind::kWindow, {kUnbounded, is_causal ? 0 : kUnbounded, 0}};
  }
  return mask;
}

inline ScoreParams make_score_params(const AttentionArguments& a) {
  ScoreParams params{};
  const ScoreKind kind = score_kind(a);
  params.scale_log2 = float((kind == ScoreKind::kSoftcap ? a.softcap : a.softmax_scale) * M_LOG2E);
  params.product_factor = kind == ScoreKind::kSoftcap ? a.softmax_scale / a.softcap : 1 / a.softmax_scale;
  params.inverse_scale_log2 = 1 / params.scale_log2;
  params.slopes = a.alibi_slopes;
  params.slopes_stride = a.alibi_batch_stride;
  return params;
}

}  // namespace dash_attn
