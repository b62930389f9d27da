// The elementwise part of a step: a thread's elements of S^T become P^T, and dP^T becomes dS^T.
#pragma once

#include <type_traits>

#include "../contract/mask.h"
#include "../device/fragment.h"
#include "../device/ptx.h"
#include "../device/score.h"

namespace dash_attn::backward {

// Hides what the mask hides of the 64 keys from `first_key` on.
template <int kSize>
__device__ __forceinline__ void apply_mask(float (&s)[kSize], const Mask& mask, int first_query, int first_key,
                                           int thread) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const int key = first_key + fragment_row(thread, 2 * row);
    const int first = key < mask.sequence.seqlen_k ? mask.queries_of(key).first : mask.sequence.seqlen_q;
    const int column = first_query + fragment_column(thread, 0);
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if (row_of(i) == row && fragment_column(0, i) < first - column) { s[i] = -INFINITY; }
    }
  }
  if (starts_at_first_key(mask.kind)) { return; }
  // Under a window few tiles are cut on both sides.
  constexpr int kQueries = 2 * kSize;
  if (first_query + kQueries <= mask.queries_of(first_key).end()) { return; }
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const int end = mask.queries_of(first_key + fragment_row(thread, 2 * row)).end();
    const int column = first_query + fragment_column(thread, 0);
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if (row_of(i) == row && fragment_column(0, i) >= end - column) { s[i] = -INFINITY; }
    }
  }
}

// ALiBi's bias of a fragment in one step, whose products all have the same head.
struct StepBias {
  float slope_of_step, first_distance;

  __device__ __forceinline__ float slope(int) const { return slope_of_step; }
  __device__ __forceinline__ float distance(int i) const {
    return first_distance + float(fragment_column(0, i) - fragment_row(0, i));
  }
};

// The statistics of the queries (columns) of a thread's registers 8 * slice ... 8 * slice + 7.
struct SliceStatistics {
  float of[2][2];
};

__device__ __forceinline__ SliceStatistics slice_of(const float* rows, int thread, int slice) {
  const float4 four = *reinterpret_cast<const float4*>(rows + slice_statistics(thread, slice));
  return {{{four.x, four.y}, {four.z, four.w}}};
}

// P = exp2(scale score - LSE); `lse` is in base 2.
template <int kSize>
__device__ __forceinline__ void probabilities(float (&s)[kSize], const float* lse, float scale_log2, int thread) {
#pragma unroll
  for (int slice = 0; slice < kSize / 8; ++slice) {
    const SliceStatistics row = slice_of(lse, thread, slice);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float& x = s[8 * slice + i];
      x = ptx::exp2_approx(fmaf(x, scale_log2, -row.of[i / 4][i % 2]));
    }
  }
}

// dS = P * (dP - D), times the score's derivative if kHasDerivative. The result is rounded and overwrites P. Dropped
// elements of dP are 0.
template <typename Element, typename Score, bool kHasDerivative, typename Bits, int kSize>
__device__ __forceinline__ void gradient_of_scores(RegisterSlice (&p)[kSize / 8], const float (&dp)[kSize],
                                                   const float* delta, const float* lse, const ScoreParams& params,
                                                   const Bits& bits, int thread) {
#pragma unroll
  for (int slice = 0; slice < kSize / 8; ++slice) {
    const SliceStatistics row = slice_of(delta, thread, slice);
    if constexpr (Score::kDrops && std::is_same_v<Element, bf16>) {
      // Pairs are selected after rounding, which are half as many as elements.
      const uint32_t dropped[2] = {negated_pair(pack<Element>(row.of[0][0], row.of[0][1])),
                                   negated_pair(pack<Element>(row.of[1][0], row.of[1][1]))};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int number = 8 * slice + 2 * i;
        const uint32_t kept = pack<Element>(dp[number] - row.of[i / 2][0], dp[number + 1] - row.of[i / 2][1]);
        p[slice][i] = multiply_bf16_pairs(p[slice][i], bits.choose(slice, i, kept, dropped[i / 2]));
      }
      continue;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int number = 8 * slice + 2 * i;
      float low = Score::keep(bits, number, dp[number]) - row.of[i / 2][0];
      float high = Score::keep(bits, number + 1, dp[number + 1]) - row.of[i / 2][1];
      if constexpr (kHasDerivative) {
        if (i == 0) { compiler_fence(); }  // keeps later slices from being read early, which would take registers
        const SliceStatistics row_lse = slice_of(lse, thread, slice);
        const float2 probability = unpack<Element>(p[slice][i]);
        low *= Score::derivative(probability.x, row_lse.of[i / 2][0], params);
        high *= Score::derivative(probability.y, row_lse.of[i / 2][1], params);
      }
      p[slice][i] = multiply_pair<Element>(p[slice][i], low, high);
    }
  }
}

template <typename Element, typename Score, typename Bits, int kSize>
__device__ __forceinline__ void score_gradient(RegisterSlice (&p)[kSize / 8], const float (&dp)[kSize],
                                               const float* delta, const float* lse, const ScoreParams& params,
                                               const Bits& bits, int thread) {
  if constexpr (Score::kChangesLogits) {
    if (Score::has_derivative(params)) {
      return gradient_of_scores<Element, Score, true>(p, dp, delta, lse, params, bits, thread);
    }
  }
  gradient_of_scores<Element, Score, false>(p, dp, delta, lse, params, bits, thread);
}

}  // namespace dash_attn::backward
