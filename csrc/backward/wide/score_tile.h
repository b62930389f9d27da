// Like ../score_tile.h, for fragments whose rows are queries: S becomes P, and dP becomes dS.
#pragma once

#include "../score_tile.h"

namespace dash_attn::backward::wide {

// A value for each of a thread's two rows.
struct RowPair {
  float of[2];
};

// The LSE or D of the thread's rows, which are stored in the order of statistic_position.
__device__ __forceinline__ RowPair statistics_of(const float* rows, int thread) {
  const int row = fragment_row(thread, 0);
  return {{rows[statistic_position(row)], rows[statistic_position(row + 8)]}};
}

// Masks a row of a fragment of scores: columns from `end` on, or before `first`, become -inf. Both bounds are relative
// to the column of the thread's register 0.
template <int kSize>
__device__ __forceinline__ void hide_from(float (&scores)[kSize], int row, int end) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    if (row_of(i) == row && fragment_column(0, i) >= end) { scores[i] = -INFINITY; }
  }
}
template <int kSize>
__device__ __forceinline__ void hide_before(float (&scores)[kSize], int row, int first) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    if (row_of(i) == row && fragment_column(0, i) < first) { scores[i] = -INFINITY; }
  }
}

// Hides what the mask hides of the keys from `first_key` on.
template <int kSize>
__device__ __forceinline__ void apply_mask(float (&s)[kSize], const Mask& mask, int first_query, int first_key,
                                           int thread) {
  const int column = first_key + fragment_column(thread, 0);
#pragma unroll
  for (int row = 0; row < kRowsPerThread; ++row) {
    const Range keys = mask.keys_of(first_query + fragment_row(thread, 2 * row));
    hide_from(s, row, keys.end() - column);
    if (!starts_at_first_key(mask.kind)) { hide_before(s, row, keys.first - column); }
  }
}

// P = exp2(scale score - LSE); `lse` is in base 2.
template <int kSize>
__device__ __forceinline__ void probabilities(float (&s)[kSize], const RowPair& lse, float scale_log2) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) { s[i] = ptx::exp2_approx(fmaf(s[i], scale_log2, -lse.of[i / 2 % 2])); }
}

// One slice of dS = P * (dP - D) * the score's derivative, rounded once, overwrites P. Dropped elements of dP are 0.
template <typename Element, typename Score, typename Bits, int kSize>
__device__ __forceinline__ void score_gradient(RegisterSlice& p, const float (&dp)[kSize], int slice,
                                               const RowPair& delta, const RowPair& lse, const ScoreParams& params,
                                               const Bits& bits) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = i % 2;
    const float2 probability = unpack<Element>(p[i]);
    const int number = 8 * slice + 2 * i;
    float low = Score::keep(bits, number, dp[number]) - delta.of[row];
    float high = Score::keep(bits, number + 1, dp[number + 1]) - delta.of[row];
    if constexpr (Score::kChangesLogits) {
      if (Score::has_derivative(params)) {
        low *= Score::derivative(probability.x, lse.of[row], params);
        high *= Score::derivative(probability.y, lse.of[row], params);
      }
    }
    p[i] = pack<Element>(probability.x * low, probability.y * high);
  }
}

}  // namespace dash_attn::backward::wide
