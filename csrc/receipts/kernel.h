// The kernel: one launch for the parts of many tensors. Integer sums do not depend on their order, so warps add theirs
// atomically, and the result is the same for any number of warps.
#pragma once

#include "parts.h"

namespace dash_attn::receipts {

constexpr int kKernelThreads = 256;
constexpr int kKernelWarps = kKernelThreads / kLanes;
// This many blocks on an SM have enough loads in flight to hide memory latency: 32 warps x 32 lanes x 64 bytes.
constexpr int kKernelBlocksOfSm = 4;

struct DeviceMemory {
  template <int kBytes>
  static __device__ __forceinline__ uint32_t word(std::uintptr_t address) {
    if constexpr (kBytes == 1) { return __ldg(reinterpret_cast<const uint8_t*>(address)); }
    if constexpr (kBytes == 2) { return __ldg(reinterpret_cast<const uint16_t*>(address)); }
    if constexpr (kBytes == 4) { return __ldg(reinterpret_cast<const uint32_t*>(address)); }
  }

  template <int kBytes, bool kVectors>
  static __device__ __forceinline__ GroupBits<kBytes> group(std::uintptr_t address) {
    GroupBits<kBytes> group{};
    if constexpr (!kVectors) {
      constexpr int kWords = GroupBits<kBytes>::kWordsOfRegister;
#pragma unroll
      for (int lane = 0; lane < kGroupWords; ++lane) {
        group.bits[lane / kWords] |= word<kBytes>(address + lane * kBytes) << 8 * kBytes * (lane % kWords);
      }
    } else if constexpr (kBytes == 1) {
      const uint2 vector = __ldg(reinterpret_cast<const uint2*>(address));
      group = {{vector.x, vector.y}};
    } else {
#pragma unroll
      for (int i = 0; i < kBytes / 2; ++i) {
        const uint4 vector = __ldg(reinterpret_cast<const uint4*>(address) + i);
        group.bits[4 * i] = vector.x, group.bits[4 * i + 1] = vector.y;
        group.bits[4 * i + 2] = vector.z, group.bits[4 * i + 3] = vector.w;
      }
    }
    return group;
  }
};

__global__ void __launch_bounds__(kKernelThreads, kKernelBlocksOfSm)
    fingerprint_kernel(const __grid_constant__ Table table) {
  const int lane = threadIdx.x % kLanes;
  const int64_t warp = int64_t(blockIdx.x) * kKernelWarps + threadIdx.x / kLanes;
  const int levels = levels_of_sum(table.block_shift);
  for_units(table, warp, int64_t(gridDim.x) * kKernelWarps, [&](const Piece& piece, const Unit& unit) {
    unsigned long long sum = lane_sum<DeviceMemory>(piece, unit, lane);
    for (int level = 0; level < levels; ++level) { sum += __shfl_xor_sync(0xffffffff, sum, 1 << level); }
    // A sum of 0 changes nothing. Lanes without words have that sum, and their block may have no place.
    if ((lane & ((1 << levels) - 1)) == 0 && sum != 0) {
      const int64_t place = place_of_sum(piece, unit, lane, table.block_shift);
      atomicAdd(reinterpret_cast<unsigned long long*>(table.sums) + place, sum);
    }
  });
}

}  // namespace dash_attn::receipts
