// Division by a number that is known before a kernel starts, without the GPU's instructions for a division (Granlund
// and Montgomery, "Division by Invariant Integers using Multiplication", 1994).
#pragma once

#include <cstdint>

#include "../host_device.h"

namespace dash_attn {

class Divisor {
 public:
  Divisor() = default;

  // `value` is at least 0, and a dividend is below 2^31. Nothing may be divided by 0.
  explicit constexpr Divisor(int value) : value_(value), multiplier_(0), shift_(0) {
    while ((int64_t{1} << shift_) < value) { ++shift_; }
    // 2^(31 + shift) / value, rounded up. It is at most 2^32 - 1, because value > 2^(shift - 1).
    if (value > 0) { multiplier_ = static_cast<uint32_t>(((uint64_t{1} << (31 + shift_)) + value - 1) / value); }
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

}  // namespace dash_attn
