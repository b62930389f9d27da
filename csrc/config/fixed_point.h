// The grid of order-free accumulation: a power of two for each row of dQ, and the heads that have too little room for it.
// Derived in docs/order_free.md. Plain C++: no CUDA, CuTe or torch.
//
// Determinism contract: a row's grid is a function of its dO and D and of its KV head's statistics; the rule for a head,
// of the statistics of its KV head's group and the length. Nothing here knows the batch, the schedule or the GPU.
#pragma once

#include <cmath>
#include <cstdint>

#include "../host_device.h"

namespace dash_attn::fixed_point {

// Of one KV head and the query heads that share it. Norms are upper bounds of Euclidean norms of rows. Not finite where
// the inputs are not.
struct HeadStatistics {
  float max_query_norm, max_key_norm;
  float max_product;  // of a key's |V row| and its largest element of K
  // Over pairs of neighbouring rows: of the magnitudes of all elements of their difference, and of its norms.
  float sum_of_key_steps, sum_of_value_steps;
};

// Scores beyond this leave fp32 too few digits to promise that a row of P sums to little more than 1.
inline constexpr double kMaxScore = 2048;
// What a row's error may be, relative to the norm of a row of dQ as the differences between the head's rows of K and of V
// let expect it.
inline constexpr double kMaxError = 1e-4;
inline constexpr double kMeanMagnitudeToDeviation = 1.2533;  // of a normal distribution: sqrt(pi / 2)
inline constexpr float kSmallestProduct = 1e-30f;
// Units that the bound of a row may take: 2^31, less what rounding can add to the bound (at most 1.17, and another factor
// of 2 where dS is rounded to subnormal numbers of fp16).
inline constexpr double kCapacity = 1.5 * (1 << 30);

DASH_HOST_DEVICE constexpr double capacity(bool half_precision) { return half_precision ? kCapacity / 2 : kCapacity; }

// Whether dQ of the head is summed in fp32 in the order of ranks instead.
DASH_HOST_DEVICE inline bool needs_order(HeadStatistics const& head, double softmax_scale, int head_dim, int seqlen_k,
                                         int kv_tiles, bool half_precision) {
  double const largest_score = softmax_scale * double(head.max_query_norm) * double(head.max_key_norm);
  // Both per element of dQ and unit of |dO|. Rounding kv_tiles partials leaves sqrt(kv_tiles / 12) units, where a unit is up
  // to twice bound / capacity. Rows of K and V that all are attended alike leave 1 / sqrt(seqlen_k) of what one of them
  // would; what all have in common cancels, so only differences count. Those of two normal values are sqrt(2) of one.
  double const unit = 2 * double(head.max_product) / capacity(half_precision);
  double const noise = unit * std::sqrt(double(kv_tiles) / 12);
  double const pairs = double(seqlen_k) / 2;
  double const key_step = double(head.sum_of_key_steps) / pairs / head_dim;
  double const value_step = double(head.sum_of_value_steps) / pairs / std::sqrt(double(head_dim));
  double const expected = key_step * value_step / 2 * kMeanMagnitudeToDeviation / std::sqrt(double(seqlen_k));
  // A smaller product may have lost digits of its own in fp32.
  bool const exact = head.max_product >= kSmallestProduct || expected == 0;
  // Written so that NaN needs the order.
  return !(largest_score <= kMaxScore && noise <= kMaxError * expected && std::isfinite(noise) && exact);
}

// A row is in units of 2^-e. What the kernel multiplies by is the float 2^(e - kFractionBits), of which the exponent's bits
// are stored: the product plus kOffset, which is 3, has the number of units in the lowest bits of its significand.
inline constexpr int kFractionBits = 22;
inline constexpr float kOffset = 3.f;
inline constexpr uint32_t kOffsetBits = 0x40400000;

inline constexpr int kMinExponent = kFractionBits - 126;  // from here on the stored float is a normal one
inline constexpr int kMaxExponent = 126;                  // 2^-126, the unit then, is the smallest normal float
inline constexpr uint8_t kNotFinite = 255;                // the row is NaN

DASH_HOST_DEVICE constexpr uint8_t stored_scale(int exponent) {
  return static_cast<uint8_t>(exponent - kFractionBits + 127);
}
DASH_HOST_DEVICE constexpr int stored_exponent(uint8_t scale) { return scale - 127 + kFractionBits; }

// Largest e with bound * 2^e <= capacity, for a finite bound of the sum of the magnitudes of the row's partials:
// |dO| * max_product + |D| * max |K element|. Below kMinExponent the row needs the order.
DASH_HOST_DEVICE inline int row_exponent(double bound, bool half_precision) {
  if (bound == 0) return 0;
  int exponent;
  frexp(capacity(half_precision) / bound, &exponent);
  return exponent - 1 < kMaxExponent ? exponent - 1 : kMaxExponent;
}

}  // namespace dash_attn::fixed_point
