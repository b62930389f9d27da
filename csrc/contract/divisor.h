// Division by a number that is known before a kernel starts, as a multiplication. Plain C++.
#pragma once

#include <cstdint>

#include "../host_device.h"

namespace dash_attn {

// 2^shift is the smallest power of two that is at least the divisor d, and the multiplier is 2^(31 + shift) / d,
// rounded up by less than one. For a dividend below 2^31 the quotient is then less than 1 / d too large, which is not
// enough to reach the next integer. A dividend must not be negative. A divisor of 0 may exist, but divides nothing.
class Divisor {
 public:
  Divisor() = default;
  explicit constexpr Divisor(int value) : value_(value), multiplier_(0), shift_(0) {
    while (int64_t{1} << shift_ < value) ++shift_;
    if (value > 0) multiplier_ = static_cast<uint32_t>(((uint64_t{1} << (31 + shift_)) + value - 1) / value);
  }

  DASH_HOST_DEVICE constexpr operator int() const { return value_; }

  DASH_HOST_DEVICE friend constexpr int operator/(int dividend, Divisor const& by) {
    uint64_t const product = static_cast<uint64_t>(static_cast<uint32_t>(dividend)) * by.multiplier_;
    return static_cast<int>(static_cast<uint32_t>(product >> 31) >> by.shift_);
  }
  DASH_HOST_DEVICE friend constexpr int operator%(int dividend, Divisor const& by) {
    return dividend - dividend / by * by.value_;
  }

 private:
  int value_;
  uint32_t multiplier_;
  int shift_;
};

static_assert(0x7fffffff / Divisor(1) == 0x7fffffff && 0x7ffffffe / Divisor(0x7fffffff) == 0);
static_assert(0x7fffffff / Divisor(3) == 715827882 && 0x7ffffffd / Divisor(3) == 715827881);
static_assert(65537 * 32767 / Divisor(65537) == 32767 && (65537 * 32767 - 1) / Divisor(65537) == 32766);

}  // namespace dash_attn
