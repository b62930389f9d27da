// The fingerprint of receipts on groups of 8 words, shared by the kernel and the host. The head of
// dash_attn/receipts/fingerprints.py defines it: the sum, modulo 2^64, of each word times its key. Plain C++: no CUDA
// or torch.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../host_device.h"

namespace dash_attn::receipts {

constexpr int kGroupWords = 8;

DASH_HOST_DEVICE constexpr uint32_t lane_key(int lane) {
  constexpr uint32_t kKeys[kGroupWords] = {0x12D687A1, 0xA82C4757, 0x94A1B38F, 0x5EE05AEB,
                                           0x64E2D6A5, 0x7A1FB19D, 0xC64D8B1B, 0xD8E2BC73};
  return kKeys[lane];
}

constexpr uint64_t kGamma = 0x9E3779B97F4A7C15;

// The input of `mix`. Those of groups at a given distance differ by a constant.
DASH_HOST_DEVICE constexpr uint64_t seed_of(uint64_t group) { return (group + 1) * kGamma; }

DASH_HOST_DEVICE constexpr uint64_t mix(uint64_t seed) {
  uint64_t z = seed;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
  z = (z ^ z >> 27) * 0x94D049BB133111EB;
  return z ^ z >> 31;
}

// Sums over the words of one group, which have kBytes each.
template <int kBytes>
struct GroupSums {
  static_assert(kBytes == 1 || kBytes == 2 || kBytes == 4);
  // The sum of eight 16-bit words has 19 bits.
  using Plain = std::conditional_t<kBytes == 4, uint64_t, uint32_t>;
  Plain plain = 0;     // of the words
  uint64_t keyed = 0;  // of the words times lane_key

  DASH_HOST_DEVICE constexpr void add(uint32_t word, int lane) {
    plain += word;
    keyed += uint64_t{word} * lane_key(lane);
  }

  // The sum of the words times their keys.
  DASH_HOST_DEVICE constexpr uint64_t fingerprint(uint64_t seed) const {
    const uint64_t m = mix(seed);
    return (m & ~uint64_t{1}) * plain + ((m << 32 | m >> 32) | 1) * keyed;
  }
};

// A group as stored in memory, in little-endian 32-bit registers.
template <int kBytes>
struct GroupBits {
  static constexpr int kWordsOfRegister = 4 / kBytes;
  static constexpr int kBitsOfWord = 8 * kBytes;
  uint32_t bits[2 * kBytes];

  DASH_HOST_DEVICE constexpr uint32_t word(int lane) const {
    constexpr uint32_t kMask = 0xFFFFFFFF >> (32 - kBitsOfWord);
    return bits[lane / kWordsOfRegister] >> kBitsOfWord * (lane % kWordsOfRegister) & kMask;
  }

  DASH_HOST_DEVICE constexpr uint64_t fingerprint(uint64_t seed) const {
    GroupSums<kBytes> sums;
    for (int lane = 0; lane < kGroupWords; ++lane) { sums.add(word(lane), lane); }
    return sums.fingerprint(seed);
  }
};

}  // namespace dash_attn::receipts
