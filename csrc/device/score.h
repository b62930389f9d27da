// Scores: what becomes of a product q . k before the softmax, and its derivative. The place to add another, for both
// passes.
//
// A score type has
//   log2_score(product, scale_log2)               log2 of e^score, rounded by itself; grows with the product
//   log2_weight(product, scale_log2, reference)   the same, less `reference`
//   kHasDerivative                                whether dS must be multiplied with something (score_tile.h)
#pragma once

namespace dash_attn {

// score = softmax_scale * q . k. Its derivative, softmax_scale, is a factor of whole rows and is applied at the end.
struct ScaledScore {
  static constexpr bool kHasDerivative = false;

  static __device__ __forceinline__ float log2_score(float product, float scale_log2) {
    return __fmul_rn(product, scale_log2);
  }

  static __device__ __forceinline__ float log2_weight(float product, float scale_log2, float reference) {
    return fmaf(product, scale_log2, -reference);
  }
};

}  // namespace dash_attn
