// Scores: what becomes of a product q . k before the softmax, and its derivative. The one place to add another.
//
// A score type has
//   log2_weight(product, scale_log2, reference)   log2 of e^score, less `reference`
//   kHasDerivative                                whether dS must be multiplied with something of its own
#pragma once

namespace dash_attn {

// score = softmax_scale * q . k. Its derivative, softmax_scale, is a factor of whole rows and is applied at the end.
struct ScaledScore {
  static constexpr bool kHasDerivative = false;

  static __device__ __forceinline__ float log2_weight(float product, float scale_log2, float reference) {
    return fmaf(product, scale_log2, -reference);
  }
};

}  // namespace dash_attn
