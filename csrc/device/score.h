// A score: what turns a product q . k into a logit, before the mask and the softmax, for both passes.
//
// A score type derives from UnchangedScore and overrides what differs:
//   serves          whether kernels with this type serve calls of a ScoreKind
//   apply           turns the products of a fragment into x in place; the logit is x times ScoreParams::scale_log2, in
//                   base 2. bias_of() returns what depends on heads and positions: slope(i) and distance(i) of
//                   register i, where the distance may have either sign
//   kChangesLogits  whether the logit is not linear in the product, or depends on the head and on positions
//   has_derivative  of scores that do: whether dS is multiplied by derivative(), as the call asks for a logit that is
//                   not linear in the product
//   kMayHaveSlopes  whether calls with ALiBi's slopes have this type
//   kDrops          whether dropout follows the softmax; keep() then zeroes a dropped element
#pragma once

#include <cstdint>

#include "../contract/served_mask.h"
#include "ptx.h"

namespace dash_attn {

struct ScoreParams {
  float scale_log2;          // log2(e) times the factor of x
  float product_factor;      // softcap: softmax_scale / softcap. ALiBi: 1 / softmax_scale
  float inverse_scale_log2;  // 1 / scale_log2, for the softcap's derivative and the forward's limits
  const float* slopes;       // ALiBi's, (sequence, head); null if the call has none
  int slopes_stride;

  __device__ __forceinline__ bool has_slopes() const { return slopes != nullptr; }

  // The slope of a head, in units of x.
  __device__ __forceinline__ float slope(int sequence, int head) const {
    return has_slopes() ? slopes[sequence * slopes_stride + head] * product_factor : 0.f;
  }
};

// logit = softmax_scale * product. The derivative, softmax_scale, is constant, and scales dQ and dK at the end.
struct UnchangedScore {
  static constexpr bool kChangesLogits = false, kMayHaveSlopes = false, kDrops = false;

  template <typename Bias, int kSize>
  static __device__ __forceinline__ void apply(float (&)[kSize], const Bias&, const ScoreParams&) {}

  // `x`, which belongs to register i of a fragment, or zero if dropout drops that element.
  template <typename Bits>
  static __device__ __forceinline__ float keep(const Bits&, int, float x) {
    return x;
  }
};

struct PlainScore : UnchangedScore {
  static constexpr bool serves(ScoreKind kind) { return kind == ScoreKind::kPlain; }
};

// The plain score, followed by dropout.
struct DropoutScore : UnchangedScore {
  static constexpr bool serves(ScoreKind kind) { return kind == ScoreKind::kDropout; }
  static constexpr bool kDrops = true;

  template <typename Bits>
  static __device__ __forceinline__ float keep(const Bits& bits, int i, float x) {
    return bits.keep(i, x);
  }
};

// logit = softcap * tanh(softmax_scale * product / softcap) (Gemma 2, arXiv 2408.00118).
struct SoftcapScore : UnchangedScore {
  static constexpr bool serves(ScoreKind kind) { return kind == ScoreKind::kSoftcap; }
  static constexpr bool kChangesLogits = true;

  static __device__ __forceinline__ bool has_derivative(const ScoreParams&) { return true; }

  template <typename Bias, int kSize>
  static __device__ __forceinline__ void apply(float (&products)[kSize], const Bias&, const ScoreParams& params) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) { products[i] = ptx::tanh_approx(products[i] * params.product_factor); }
  }

  // 1 - tanh^2, computed from the probability e^logit / e^LSE, so that tanh need not be kept. `lse` is in base 2. An
  // element whose probability is zero has no gradient either.
  static __device__ __forceinline__ float derivative(float probability, float lse, const ScoreParams& params) {
    const float tanh = (ptx::log2_approx(probability) + lse) * params.inverse_scale_log2;
    return fmaxf(fmaf(-tanh, tanh, 1.f), 0.f);
  }
};

// The softcap or, if the call has slopes, logit = softmax_scale * product - slope * |query's own key - key| (ALiBi,
// arXiv 2108.12409). Slopes have no gradient.
struct ChangedScore : SoftcapScore {
  static constexpr bool serves(ScoreKind kind) { return kind == ScoreKind::kSoftcap || kind == ScoreKind::kAlibi; }
  static constexpr bool kMayHaveSlopes = true;

  static __device__ __forceinline__ bool has_derivative(const ScoreParams& params) { return !params.has_slopes(); }

  template <typename Bias, int kSize>
  static __device__ __forceinline__ void apply(float (&products)[kSize], const Bias& bias_of,
                                               const ScoreParams& params) {
    if (!params.has_slopes()) { return SoftcapScore::apply(products, bias_of, params); }
    const auto bias = bias_of();
#pragma unroll
    for (int i = 0; i < kSize; ++i) { products[i] = fmaf(-bias.slope(i), fabsf(bias.distance(i)), products[i]); }
  }
};

}  // namespace dash_attn
