// Philox4x32: a counter-based generator, so that any number of its sequence is had without those before it (Salmon,
// Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011). Plain C++: no CUDA, CuTe or torch.
#pragma once

#include <cstdint>

#include "../host_device.h"

namespace dash_attn::dropout {

struct PhiloxCounter {
  uint32_t word[4];
};

struct PhiloxKey {
  uint32_t word[2];
};

// Below 7 rounds the bits of neighbouring counters are visibly dependent; 10 is the generator's own default.
inline constexpr int kFewestRounds = 7;
inline constexpr int kDefaultRounds = 7;

DASH_HOST_DEVICE constexpr PhiloxCounter philox_round(PhiloxCounter c, PhiloxKey key) {
  uint64_t const first = uint64_t{0xD2511F53u} * c.word[0], second = uint64_t{0xCD9E8D57u} * c.word[2];
  auto const high = [](uint64_t product) { return static_cast<uint32_t>(product >> 32); };
  auto const low = [](uint64_t product) { return static_cast<uint32_t>(product); };
  return {{high(second) ^ c.word[1] ^ key.word[0], low(second), high(first) ^ c.word[3] ^ key.word[1], low(first)}};
}

// 128 random bits for each counter and key.
template <int kRounds>
DASH_HOST_DEVICE constexpr PhiloxCounter philox4x32(PhiloxCounter counter, PhiloxKey key) {
  static_assert(kRounds >= 1);
  for (int round = 0; round < kRounds; ++round) {
    counter = philox_round(counter, key);
    key = {{key.word[0] + 0x9E3779B9u, key.word[1] + 0xBB67AE85u}};
  }
  return counter;
}

}  // namespace dash_attn::dropout
