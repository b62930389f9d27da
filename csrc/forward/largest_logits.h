// The largest logit of each query head of each sequence, which a call may ask for. A maximum has no order: atomics give
// the same bits in every run.
#pragma once

#include <cstdint>

namespace dash_attn::forward {

struct LargestLogits {
  float* of_heads;  // (batch, heads), -inf before the kernel starts; null if nobody asks
  float scale;      // turns a score into a logit
  int heads;

  // Takes the scores of a warp's rows, which are of one head of a sequence. Called by whole warps.
  __device__ __forceinline__ void add_warp(int sequence, int head, float score) const {
    const uint32_t largest = __reduce_max_sync(0xffffffff, ordered(score));
    if (threadIdx.x % 32 == 0) { add(sequence, head, from_ordered(largest)); }
  }

 private:
  static constexpr uint32_t kSign = 0x80000000;

  // Floats without a sign keep their order as signed integers and lie above all with one; those are in reverse order as
  // unsigned integers and lie above all without one. NaN, which has no sign here, is above all others.
  __device__ __forceinline__ void add(int sequence, int head, float score) const {
    float* const place = of_heads + int64_t{sequence} * heads + head;
    const uint32_t bits = __float_as_uint(score == score ? score * scale : score);
    if (bits & kSign) {
      atomicMin(reinterpret_cast<unsigned*>(place), bits);
    } else {
      atomicMax(reinterpret_cast<int*>(place), int(bits));
    }
  }

  // Unsigned integers in the order of floats.
  static __device__ __forceinline__ uint32_t ordered(float x) {
    const uint32_t bits = __float_as_uint(x);
    return bits & kSign ? ~bits : bits | kSign;
  }
  static __device__ __forceinline__ float from_ordered(uint32_t x) {
    return __uint_as_float(x & kSign ? x & ~kSign : ~x);
  }
};

}  // namespace dash_attn::forward
