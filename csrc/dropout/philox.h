// Philox4x32: a counter-based generator, which computes any number of its sequence without the earlier ones (Salmon,
// Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011). Plain C++: no CUDA or torch.
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

// With fewer than 7 rounds the bits of neighbouring counters are visibly dependent. The generator's authors use 10 by
// default.
inline constexpr int kFewestRounds = 7;
inline constexpr int kDefaultRounds = 7;

struct WideProduct {
  uint32_t high, low;
};

#ifdef __CUDA_ARCH__
// One instruction. For C++'s 64-bit product nvcc also adds the products of the upper halves, which are 0.
__device__ __forceinline__ WideProduct multiply_wide_on_device(uint32_t a, uint32_t b) {
  WideProduct product;
  asm("{\n\t.reg .b64 whole;\n\tmul.wide.u32 whole, %2, %3;\n\tmov.b64 {%0, %1}, whole;\n\t}"
      : "=r"(product.low), "=r"(product.high)
      : "r"(a), "r"(b));
  return product;
}
#endif

DASH_HOST_DEVICE constexpr WideProduct multiply_wide(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
  return multiply_wide_on_device(a, b);
#else
  uint64_t const product = uint64_t{a} * b;
  return {static_cast<uint32_t>(product >> 32), static_cast<uint32_t>(product)};
#endif
}

DASH_HOST_DEVICE constexpr PhiloxCounter philox_round(PhiloxCounter c, PhiloxKey key) {
  WideProduct const first = multiply_wide(0xD2511F53u, c.word[0]), second = multiply_wide(0xCD9E8D57u, c.word[2]);
  return {{second.high ^ c.word[1] ^ key.word[0], second.low, first.high ^ c.word[3] ^ key.word[1], first.low}};
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
