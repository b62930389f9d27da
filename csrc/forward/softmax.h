// The softmax of the two rows that a thread holds a part of, tile of keys by tile of keys (the online softmax of
// FlashAttention-2, arXiv 2307.08691).
#pragma once

#include <climits>

#include "../device/fragment.h"
#include "../device/ptx.h"
#include "../device/score.h"

namespace dash_attn::forward {

constexpr int kRowsPerThread = 2;

// Which of the thread's two rows register i of an accumulator belongs to.
__device__ constexpr int row_of(int i) { return (i / 2) % 2; }

using RowStatistic = float[kRowsPerThread];

// Of the four threads that share a row.
template <typename Operation>
__device__ __forceinline__ float across_row(float x, Operation operation) {
  x = operation(x, __shfl_xor_sync(0xffffffff, x, 1));
  return operation(x, __shfl_xor_sync(0xffffffff, x, 2));
}

// Minus zero: multiplies sums of nothing as zero does, and is no power of two.
constexpr float kNothingSummed = -0.f;

class OnlineSoftmax {
 public:
  explicit __device__ __forceinline__ OnlineSoftmax(const ScoreParams& params)
      : scale_log2_(params.scale_log2), inverse_scale_log2_(params.inverse_scale_log2) {}

  // Sets the reference by the first scores. Until `set_limits` every step decides.
  template <int kSize>
  __device__ __forceinline__ void start(const float (&s)[kSize]) {
    RowStatistic correction;
    move(s, correction);
  }

  // Has the reference follow the scores of a further tile, once before they are exponentiated. `correction` is what
  // earlier sums must be multiplied with, kNothingSummed where the row saw no key in earlier tiles; false means that it
  // is 1 for every row of the warp, and may be unset.
  //
  // The reference is the largest score so far, or one up to kSlack below it: P up to 2^kSlack is as exact as P up to 1,
  // and after the first tiles few rows need a correction. Which do depends on the row alone.
  template <int kSize>
  __device__ __forceinline__ bool follow(const float (&s)[kSize], RowStatistic& correction) {
    if (!may_move(s)) { return false; }
    const bool corrects = move(s, correction);
    set_limits();
    return corrects;
  }

  // Sets of each row the score from which on it is to be decided about: see may_move.
  __device__ __forceinline__ void set_limits() {
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row) {
      const float stays_below = reference(row) + kSlack;
      limit_[row] = __float_as_uint(fmaf(-fabsf(stays_below), kMargin, stays_below) * inverse_scale_log2_);
    }
    if (__any_sync(0xffffffff, limit_[0] >= kNoSign || limit_[1] >= kNoSign)) {
      for (uint32_t& limit : limit_) { limit = max(limit, kNoSign); }
    }
  }

  // Scores become exponents of P, scale score - reference, to base 2.
  template <int kSize>
  __device__ __forceinline__ void subtract_reference(float (&s)[kSize]) const {
#pragma unroll
    for (int i = 0; i < kSize; ++i) { s[i] = fmaf(s[i], scale_log2_, -offset_[row_of(i)]); }
  }

  // Exponents become P, and P is summed. The sum so far is corrected, as `follow` says, while the first P is added to
  // it, in one rounding.
  template <int kSize>
  __device__ __forceinline__ void exponentiate(float (&s)[kSize], bool corrects, const RowStatistic& correction) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      s[i] = ptx::exp2_approx(s[i]);
      const int row = row_of(i);
      sum_[row] = i == 2 * row ? fmaf(sum_[row], corrects ? correction[row] : 1.f, s[i]) : sum_[row] + s[i];
    }
  }
  template <int kSize>
  __device__ __forceinline__ void exponentiate(float (&s)[kSize]) {
    exponentiate(s, false, {});
  }

  // After the last tile: what the output must be multiplied with, and the log-sum-exp. A sink, of the row's head, is a
  // logit that has no value; -inf changes no bit. Null for none.
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
        const float of_sink = sink_log2 == largest ? 1.f : ptx::exp2_approx(sink_log2 - largest);  // of +inf too
        const float sum_with_sink = fmaf(sum, of_keys, of_sink);
        inverse_sum[row] = __fdividef(of_keys, sum_with_sink);
        const bool is_sink = of_keys == 0.f && sum == sum;  // a row that is NaN says so
        lse[row] = is_sink ? sink : (largest + __log2f(sum_with_sink)) * float(M_LN2);
      }
    }
  }

 private:
  static constexpr float kSlack = 8.f;
  static constexpr float kMargin = 0x1p-20f;            // more than the roundings of what is compared
  static constexpr uint32_t kDecidesAlways = UINT_MAX;  // a limit that every score reaches
  static constexpr uint32_t kNoSign = INT_MAX;          // one that every score without a sign reaches

  // Each row's scores, as integers, into what there is of it.
  template <typename Integer, typename OfThree, int kSize>
  static __device__ __forceinline__ void fold_bits(Integer (&of_row)[kRowsPerThread], const float (&s)[kSize],
                                                   OfThree of_three) {
#pragma unroll
    for (int i = 0; i < kSize; i += 2) {
      Integer& folded = of_row[row_of(i)];
      folded = of_three(folded, Integer(__float_as_uint(s[i])), Integer(__float_as_uint(s[i + 1])));
    }
  }

  // False only where no reference of the warp's rows moves, as in most tiles. That takes no largest score, so none is
  // looked for in other threads. Bits are compared as integers, three at a time by one instruction: floats without a
  // sign keep their order so, and are above all with one. Where a limit has one they are compared as unsigned integers:
  // floats with a sign are in the other order there, and above all without one.
  template <int kSize>
  __device__ __forceinline__ bool may_move(const float (&s)[kSize]) const {
    bool may = false;
    if (__builtin_expect(limit_[0] >= kNoSign, false)) {  // and so are all limits of the warp
      uint32_t smallest[kRowsPerThread] = {UINT_MAX, UINT_MAX};
      fold_bits(smallest, s, ptx::min3);
      may = smallest[0] <= limit_[0] || smallest[1] <= limit_[1];
    } else {
      int largest[kRowsPerThread] = {INT_MIN, INT_MIN};
      fold_bits(largest, s, ptx::max3);
      may = largest[0] >= int(limit_[0]) || largest[1] >= int(limit_[1]);
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
      // Rounded, not fused into the difference: a row whose reference stays gets a correction of exactly 1.
      largest[row] = __fmul_rn(across_row(largest[row], [](float a, float b) { return fmaxf(a, b); }), scale_log2_);
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
  // What is subtracted, the reference. Where that is -inf, of a row that has seen no key yet or only scores of -inf, it
  // is +inf, so that P is 0. Where it is +inf, it is NaN, as the row's result will be.
  RowStatistic offset_ = {INFINITY, INFINITY};
  // Bits of a score from which on it may move. Of all rows of a warp they are those of a float without a sign, or they
  // are kNoSign or more.
  uint32_t limit_[kRowsPerThread] = {kDecidesAlways, kDecidesAlways};
  RowStatistic sum_ = {0.f, 0.f};  // of the elements that this thread holds
};

// Of a row that sees no key.
__device__ __forceinline__ float lse_of_sink(float sink) { return sink == -INFINITY ? INFINITY : sink; }

// What a row summed over tiles of which it saw no key is replaced, not multiplied: 0 * V is not 0 where V is not
// finite, and how many such tiles were walked is no business of the row's.
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
