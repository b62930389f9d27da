// csrc/device/elements.h on the host, where elements are also numbers.
#pragma once

#include <bit>
#include <cstdint>

namespace dash_attn {

// Eight elements at a time. Compilers do not vectorize this on their own.
using EightWords = uint32_t __attribute__((vector_size(32)));
using EightFloats = float __attribute__((vector_size(32)));

struct bf16 {
  uint16_t bits;

  bf16() = default;
  explicit bf16(float x) {
    const uint32_t word = std::bit_cast<uint32_t>(x);
    const bool is_nan = (word & 0x7fffffff) > 0x7f800000;
    bits = uint16_t(is_nan ? 0x7fff : (word + 0x7fff + (word >> 16 & 1)) >> 16);
  }
  explicit operator float() const { return std::bit_cast<float>(uint32_t(bits) << 16); }
  static EightFloats floats(EightWords bits) { return EightFloats(bits << 16); }
};

struct fp16 {
  _Float16 value;

  fp16() = default;
  explicit fp16(float x) : value(_Float16(x)) {}
  // By hand: compilers call a slow function.
  explicit operator float() const { return floats(EightWords{std::bit_cast<uint16_t>(value)})[0]; }
  static EightFloats floats(EightWords bits) {
    const EightWords magnitude = (bits & 0x7fff) << 13;
    const EightFloats scaled = EightFloats(magnitude) * 0x1p112f;  // exponents of fp16 are less by 15, not 127
    const EightWords word = (bits & 0x7c00) != 0x7c00 ? EightWords(scaled) : 0x7f800000 | magnitude;
    return EightFloats((bits & 0x8000) << 16 | word);
  }
};

}  // namespace dash_attn
