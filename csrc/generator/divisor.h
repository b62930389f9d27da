// Division by a number that is known beforehand, as a multiplication. Plain C++.
#pragma once

#include <cstdint>

#include "../host_device.h"

namespace dash_attn::dropout {

// 2^shift is the smallest power of two that is at least the divisor d, and the multiplier is 2^(31 + shift) / d,
// rounded up by less than one. For a dividend below 2^31 the quotient is then less than 1 / d too large, which is not
// enough to reach the next integer.
class Divisor {
 public:
  Divisor() = default;
  explicit constexpr Divisor(int divisor) : multiplier_(0), shift_(0) {
    while (int64_t{1} << shift_ < divisor) ++shift_;
    multiplier_ = uint32_t(((uint64_t{1} << (31 + shift_)) + divisor - 1) / divisor);
  }

  // The dividend must not be negative.
  DASH_HOST_DEVICE constexpr int quotient(int dividend) const {
    return int(uint32_t(uint64_t{2 * uint32_t(dividend)} * multiplier_ >> 32) >> shift_);
  }

 private:
  uint32_t multiplier_, shift_;
};

constexpr int kLargestInt = 0x7fffffff;
static_assert(Divisor(1).quotient(kLargestInt) == kLargestInt && Divisor(kLargestInt).quotient(kLargestInt - 1) == 0);
static_assert(Divisor(3).quotient(kLargestInt) == kLargestInt / 3 && Divisor(3).quotient(kLargestInt - 2) == 715827881);
static_assert(Divisor(65537).quotient(65537 * 32767) == 32767 && Divisor(65537).quotient(65537 * 32767 - 1) == 32766);

}  // namespace dash_attn::dropout
