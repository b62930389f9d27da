// Scores: what becomes of a product q . k before the mask and the softmax, and its derivative; and whether dropout
// follows. The place to add another, for both passes.
//
// A score type turns products into x in place (transform) and the softmax is taken of ScoreParams::scale_log2 * x, in
// base 2. It has
//   kKind
//   kHasDerivative  whether dS must be multiplied with derivative(): the score is no multiple of the product, and what
//                   may be added to that
//   kHasSlope       whether it depends on where query and key are, and on the head
//   kDrops          whether some probabilities are dropped, by the bits of csrc/dropout
#pragma once

#include <cstdint>

#include "ptx.h"

namespace dash_attn {

enum class ScoreKind : int { kPlain, kSoftcap, kAlibi, kDropout };
inline constexpr const char* kScoreNames[] = {"plain", "softcap", "alibi", "dropout"};

struct ScoreParams {
  float scale_log2;      // log2(e) times what x is multiplied with
  float product_factor;  // softcap: softmax_scale / softcap. ALiBi: 1 / softmax_scale
  float inverse_scale_log2;  // 1 / scale_log2: for softcap's derivative, and the forward's limits
  const float* slopes;  // ALiBi's, (sequence, head)
  int slopes_stride;

  // In units of x.
  __device__ __forceinline__ float slope(int sequence, int head) const {
    return slopes[sequence * slopes_stride + head] * product_factor;
  }
};

// score = softmax_scale * product. Its derivative, softmax_scale, is a factor of whole rows and is applied at the end.
struct PlainScore {
  static constexpr ScoreKind kKind = ScoreKind::kPlain;
  static constexpr bool kHasDerivative = false, kHasSlope = false, kDrops = false;
};

// The plain score, with dropout behind the softmax.
struct DropoutScore {
  static constexpr ScoreKind kKind = ScoreKind::kDropout;
  static constexpr bool kHasDerivative = false, kHasSlope = false, kDrops = true;
};

// score = softcap * tanh(softmax_scale * product / softcap) (Gemma 2, arXiv 2408.00118).
struct SoftcapScore {
  static constexpr ScoreKind kKind = ScoreKind::kSoftcap;
  static constexpr bool kHasDerivative = true, kHasSlope = false, kDrops = false;

  template <int kSize>
  static __device__ __forceinline__ void transform(float (&products)[kSize], const ScoreParams& params) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) { products[i] = ptx::tanh_approx(products[i] * params.product_factor); }
  }

  // 1 - tanh^2, from the probability e^score / e^LSE: tanh need not be kept. `lse` is in base 2. Where no probability
  // is left there is no gradient either.
  static __device__ __forceinline__ float derivative(float probability, float lse, const ScoreParams& params) {
    const float tanh = (ptx::log2_approx(probability) + lse) * params.inverse_scale_log2;
    return fmaxf(fmaf(-tanh, tanh, 1.f), 0.f);
  }
};

// score = softmax_scale * product - slope * |query's own key - key| (ALiBi, arXiv 2108.12409). Slopes have no gradient.
struct AlibiScore {
  static constexpr ScoreKind kKind = ScoreKind::kAlibi;
  static constexpr bool kHasDerivative = false, kHasSlope = true, kDrops = false;

  // Of element i of the fragment, bias.slope(i) is its head's and bias.distance(i) the distance, with either sign.
  template <typename Bias, int kSize>
  static __device__ __forceinline__ void transform(float (&products)[kSize], const Bias& bias) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) { products[i] = fmaf(-bias.slope(i), fabsf(bias.distance(i)), products[i]); }
  }
};

}  // namespace dash_attn
