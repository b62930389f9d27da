// The softmax of a thread's two rows, one tile of keys at a time (the online softmax of FlashAttention-2, arXiv
// 2307.08691).
#pragma once

#include <climits>
#include <type_traits>

#include "../device/fragment.h"
#include "../device/ptx.h"
#include "../device/score.h"
#include "../host_device.h"

namespace dash_attn::forward {

using RowStatistic = float[kRowsPerThread];

// Combines the values of the four threads that share a row.
template <typename Operation>
__device__ __forceinline__ float across_row(float x, Operation operation) {
  x = operation(x, __shfl_xor_sync(0xffffffff, x, 1));
  return operation(x, __shfl_xor_sync(0xffffffff, x, 2));
}

// Minus zero: as a factor it acts like zero, and it is no power of two, so that it marks rows that have summed nothing.
constexpr float kNothingSummed = -0.f;

// The bits of a thread's `OnlineSoftmax::largest`, but for NaN.
struct LargestScores {
  static constexpr int kMinusInfinity = -0x800000;  // the bits of -inf
  int of[kRowsPerThread] = {kMinusInfinity, kMinusInfinity};
};

// kFindsLargest: whether calls may ask for the largest scores. With kRows = 1 the functions of a step leave out the
// thread's second row, whose results then mean nothing.
template <bool kFindsLargest>
class OnlineSoftmax {
 public:
  explicit __device__ __forceinline__ OnlineSoftmax(const ScoreParams& params)
      : scale_log2_(params.scale_log2), inverse_scale_log2_(params.inverse_scale_log2) {}

  // Sets the reference from the first scores. Until `set_limits` is called, every step looks for the maximum.
  template <int kSize>
  __device__ __forceinline__ void start(const float (&s)[kSize]) {
    RowStatistic correction;
    move(s, correction);
  }

  // Has the reference follow the scores of a further tile, before they are exponentiated. `correction` is the factor
  // for earlier sums, kNothingSummed if the row saw no key in earlier tiles. Returns false if the factor is 1 for every
  // row of the warp; `correction` may then be unset.
  //
  // The reference is the largest score so far, or a score up to kSlack below it: P up to 2^kSlack is as exact as P up
  // to 1, and after the first tiles few rows need a correction. Whether a row needs one depends on that row alone.
  template <int kRows = kRowsPerThread, int kSize>
  __device__ __forceinline__ bool follow(const float (&s)[kSize], RowStatistic& correction, bool finds_largest) {
    if (!may_move<kRows>(s)) { return false; }
    const bool corrects = move(s, correction);
    set_limits(finds_largest);
    return corrects;
  }

  // Sets each row's limit: a score at or above it may move the reference. See may_move. With `finds_largest`, largest()
  // is exact; without, steps in which no reference moves may miss scores with a sign.
  __device__ __forceinline__ void set_limits(bool finds_largest) {
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row) {
      const float stays_below = reference(row) + kSlack;
      limit_[row] = __float_as_uint(fmaf(-fabsf(stays_below), kMargin, stays_below) * inverse_scale_log2_);
    }
    bool misses_largest = false;
    // The signed comparison keeps the largest score of a row only if that score has no sign.
    if constexpr (kFindsLargest) { misses_largest = finds_largest && (largest_.of[0] < 0 || largest_.of[1] < 0); }
    if (__any_sync(0xffffffff, limit_[0] >= kNoSign || limit_[1] >= kNoSign || misses_largest)) {
      for (uint32_t& limit : limit_) { limit = max(limit, kNoSign); }
    }
  }

  // Turns scores into the exponents of P, scale score - reference, in base 2.
  template <int kRows = kRowsPerThread, int kSize>
  __device__ __forceinline__ void subtract_reference(float (&s)[kSize]) const {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if (row_of(i) < kRows) { s[i] = fmaf(s[i], scale_log2_, -offset_[row_of(i)]); }
    }
  }

  // Turns exponents into P and adds P to the row's sum. The earlier sum is corrected, as `follow` says, in the same
  // rounding as the first addition.
  template <int kRows = kRowsPerThread, int kSize>
  __device__ __forceinline__ void exponentiate(float (&s)[kSize], bool corrects, const RowStatistic& correction) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const int row = row_of(i);
      if (row >= kRows) { continue; }
      s[i] = ptx::exp2_approx(s[i]);
      sum_[row] = i == 2 * row ? fmaf(sum_[row], corrects ? correction[row] : 1.f, s[i]) : sum_[row] + s[i];
    }
  }
  template <int kSize>
  __device__ __forceinline__ void exponentiate(float (&s)[kSize]) {
    exponentiate(s, false, {});
  }

  // Whether the row's sum is 0: all its scores were -inf, and none was NaN. Called by whole warps.
  __device__ __forceinline__ bool has_summed_nothing(int row) const {
    return across_row(sum_[row], [](float a, float b) { return a + b; }) == 0.f;
  }

  // The largest of the row's scores that this thread or another one of the row has seen, and NaN if the thread has seen
  // one that is NaN, or the row one that is +inf. The row's largest score is the largest of its threads'.
  __device__ __forceinline__ float largest(int row) const {
    return sum_[row] == sum_[row] ? __int_as_float(largest_.of[row]) : NAN;
  }

  // After the last tile: the factor that normalises the output, and the log-sum-exp. A sink, one for each head, is a
  // logit without a value; a sink of -inf changes no bit. `sinks` may be null.
  __device__ __forceinline__ void normalize(const float* sinks, const int (&heads)[kRowsPerThread],
                                            RowStatistic& inverse_sum, RowStatistic& lse) {
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row) {
      const float sum = across_row(sum_[row], [](float a, float b) { return a + b; });
      inverse_sum[row] = __fdividef(1.f, sum);
      lse[row] = (reference(row) + __log2f(sum)) * float(M_LN2);  // sum is at least 1
      if (sinks) {
        const float sink = sinks[heads[row]], sink_log2 = sink * float(M_LOG2E);
        if (sink == -INFINITY) { continue; }
        const float largest = fmaxf(reference(row), sink_log2);
        const float of_keys = ptx::exp2_approx(reference(row) - largest);
        const float of_sink = sink_log2 == largest ? 1.f : ptx::exp2_approx(sink_log2 - largest);  // also for +inf
        const float sum_with_sink = fmaf(sum, of_keys, of_sink);
        inverse_sum[row] = __fdividef(of_keys, sum_with_sink);
        const bool is_sink = of_keys == 0.f && sum == sum;  // a NaN row stays NaN
        lse[row] = is_sink ? sink : (largest + __log2f(sum_with_sink)) * float(M_LN2);
      }
    }
  }

 private:
  static constexpr float kSlack = 8.f;
  static constexpr float kMargin = 0x1p-20f;            // exceeds the rounding errors of the compared values
  static constexpr uint32_t kDecidesAlways = UINT_MAX;  // a limit that every score reaches
  static constexpr uint32_t kNoSign = INT_MAX;          // one that every score without a sign reaches

  // Folds each row's scores, as integers, into `of_row`.
  template <typename Integer, typename OfThree, int kSize>
  static __device__ __forceinline__ void fold_bits(Integer (&of_row)[kRowsPerThread], const float (&s)[kSize],
                                                   OfThree of_three) {
#pragma unroll
    for (int i = 0; i < kSize; i += 2) {
      Integer& folded = of_row[row_of(i)];
      folded = of_three(folded, Integer(__float_as_uint(s[i])), Integer(__float_as_uint(s[i + 1])));
    }
  }

  // Raises `largest` to the scores' bits, as signed integers.
  template <int kRows, int kSize>
  __device__ __forceinline__ bool reaches_limit(int (&largest)[kRowsPerThread], const float (&s)[kSize]) const {
    fold_bits(largest, s, ptx::max3);
    return largest[0] >= int(limit_[0]) || (kRows > 1 && largest[1] >= int(limit_[1]));
  }

  // Returns false only if no reference of the warp's rows moves, as in most tiles. This takes neither a maximum nor an
  // exchange between threads. Bits are compared as integers, three at a time in one instruction: as signed integers,
  // floats without a sign keep their order and lie above all floats with one. If a limit has a sign, the comparison is
  // unsigned: floats with a sign are then in reverse order and lie above all without one. With kFindsLargest the
  // comparison also finds the largest scores where no reference moves, in the same instructions.
  template <int kRows, int kSize>
  __device__ __forceinline__ bool may_move(const float (&s)[kSize]) {
    bool may = false;
    if (__builtin_expect(limit_[0] >= kNoSign, false)) {  // then so are all limits of the warp
      uint32_t smallest[kRowsPerThread] = {UINT_MAX, UINT_MAX};
      fold_bits(smallest, s, ptx::min3);
      may = smallest[0] <= limit_[0] || (kRows > 1 && smallest[1] <= limit_[1]);
      if constexpr (kFindsLargest) {
#pragma unroll
        for (int row = 0; row < kRowsPerThread; ++row) {  // a score without a sign is left to `move`
          largest_.of[row] = int(min(uint32_t(largest_.of[row]), max(smallest[row], kNoSign + 1)));
        }
      }
    } else if constexpr (kFindsLargest) {
      may = reaches_limit<kRows>(largest_.of, s);
    } else {
      int largest[kRowsPerThread] = {INT_MIN, INT_MIN};
      may = reaches_limit<kRows>(largest, s);
    }
    return __any_sync(0xffffffff, may);
  }

  template <int kSize>
  __device__ __forceinline__ bool move(const float (&s)[kSize], RowStatistic& correction) {
    RowStatistic largest = {s[0], s[2]};
    bool corrects = false;
#pragma unroll
    for (int i = 0; i < kSize; ++i) { largest[row_of(i)] = fmaxf(largest[row_of(i)], s[i]); }
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row) {
      largest[row] = across_row(largest[row], [](float a, float b) { return fmaxf(a, b); });
      if constexpr (kFindsLargest) {
        largest_.of[row] = __float_as_int(fmaxf(__int_as_float(largest_.of[row]), largest[row]));
      }
      // Rounded before the subtraction, not fused into it, so that a row whose reference stays gets a correction of
      // exactly 1.
      largest[row] = __fmul_rn(largest[row], scale_log2_);
      const float before = reference(row);
      // True for the first score, and for NaN.
      const bool moves = !(largest[row] - before <= kSlack);
      const float after = moves ? largest[row] : before;
      offset_[row] = after == -INFINITY ? INFINITY : after == INFINITY ? NAN : after;
      correction[row] = before == -INFINITY ? kNothingSummed : ptx::exp2_approx(before - offset_[row]);
      corrects |= moves;
    }
    return __any_sync(0xffffffff, corrects);
  }

  __device__ __forceinline__ float reference(int row) const {
    return offset_[row] == INFINITY ? -INFINITY : offset_[row];
  }

  float scale_log2_, inverse_scale_log2_;
  // The reference, which is subtracted. If it is -inf, because the row has seen no key or only scores of -inf, this is
  // +inf, so that P is 0. If it is +inf, this is NaN, as the row's result will be.
  RowStatistic offset_ = {INFINITY, INFINITY};
  // The bits of a score from which on the reference may move. Within a warp either all limits are those of floats
  // without a sign, or all are at least kNoSign.
  uint32_t limit_[kRowsPerThread] = {kDecidesAlways, kDecidesAlways};
  std::conditional_t<kFindsLargest, LargestScores, Empty> largest_;
  RowStatistic sum_ = {0.f, 0.f};  // over the elements that this thread holds
};

// The log-sum-exp of a row that sees no key.
__device__ __forceinline__ float lse_of_sink(float sink) { return sink == -INFINITY ? INFINITY : sink; }

// Sums over tiles in which a row saw no key are replaced, not multiplied: 0 * V is not 0 if V is not finite, and the
// result must not depend on how many such tiles were walked.
template <int kSize>
__device__ __forceinline__ void correct_rows(float (&acc)[kSize], const RowStatistic& correction) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    const float factor = correction[row_of(i)];
    acc[i] = __float_as_uint(factor) == __float_as_uint(kNothingSummed) ? 0.f : acc[i] * factor;
  }
}

template <int kSize>
__device__ __forceinline__ void scale_rows(float (&acc)[kSize], const RowStatistic& factor) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) { acc[i] *= factor[row_of(i)]; }
}

}  // namespace dash_attn::forward
