// The score that a call asks for, and the parameters of its kernels.
#pragma once

#include <cmath>

#include "../contract/served_mask.h"
#include "../device/dropout_bits.h"
#include "../device/score.h"
#include "arguments.h"

namespace dash_attn {

inline ScoreKind score_kind(const AttentionArguments& a) {
  if (a.drops()) { return ScoreKind::kDropout; }
  return a.softcap > 0 ? ScoreKind::kSoftcap : a.alibi_slopes ? ScoreKind::kAlibi : ScoreKind::kPlain;
}

// The call's mask as its kernel sees it. Calls that carry sums and calls that read pages have the kernels of windows:
// the former are so long that the planner's additional arithmetic does not show, and the latter wait for memory. In
// kernels for masks by key columns the rest of the mask is a window, too.
inline MaskRule kernel_mask(const AttentionArguments& a, bool as_window, bool has_columns) {
  if (as_window) { return {MaskKind::kWindow, a.mask.as_window()}; }
  if (has_columns) { return {MaskKind::kColumns, a.mask.as_window()}; }
  return served_mask(score_kind(a), a.padded_head_dims(), a.mask);
}

inline ScoreParams make_score_params(const AttentionArguments& a) {
  ScoreParams params{};
  const ScoreKind kind = score_kind(a);
  params.scale_log2 = float((kind == ScoreKind::kSoftcap ? a.softcap : a.softmax_scale) * M_LOG2E);
  params.product_factor = kind == ScoreKind::kSoftcap ? a.softmax_scale / a.softcap : 1 / a.softmax_scale;
  params.inverse_scale_log2 = 1 / params.scale_log2;
  params.slopes = a.alibi_slopes;
  params.slopes_stride = int(a.alibi_batch_stride);
  return params;
}

inline dropout::BitsView make_bits_view(const AttentionArguments& a) {
  const DropoutTensor& given = a.dropout;
  return {static_cast<const uint8_t*>(given.bits), a.heads,          given.query_blocks, given.key_blocks,
          given.query_blocks * given.key_blocks,   1 / (1 - given.p)};
}

}  // namespace dash_attn
