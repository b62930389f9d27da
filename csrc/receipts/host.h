// A launch on the host: for the op on CPU tensors, and to test everything that the kernel computes about places.
#pragma once

#include <cstdint>
#include <cstring>

#include "parts.h"

namespace dash_attn::receipts {

struct HostMemory {
  template <int kBytes>
  static uint32_t word(std::uintptr_t address) {
    uint32_t word = 0;
    std::memcpy(&word, reinterpret_cast<const void*>(address), kBytes);
    return word;
  }

  template <int kBytes, bool>
  static GroupBits<kBytes> group(std::uintptr_t address) {
    GroupBits<kBytes> group;
    std::memcpy(&group, reinterpret_cast<const void*>(address), sizeof group);
    return group;
  }
};

inline void run_on_host(const Table& table) {
  // Several warps, so that each skips units and pieces as on a GPU.
  constexpr int kWarps = 3;
  const int levels = levels_of_sum(table.block_shift);
  for (int warp = 0; warp < kWarps; ++warp) {
    for_units(table, warp, kWarps, [&](const Piece& piece, const Unit& unit) {
      uint64_t sums[kLanes];
      for (int lane = 0; lane < kLanes; ++lane) { sums[lane] = lane_sum<HostMemory>(piece, unit, lane); }
      for (int lane = 0; lane < kLanes; lane += 1 << levels) {
        for (int other = 1; other < 1 << levels; ++other) { sums[lane] += sums[lane + other]; }
        if (sums[lane] != 0) { table.sums[place_of_sum(piece, unit, lane, table.block_shift)] += sums[lane]; }
      }
    });
  }
}

}  // namespace dash_attn::receipts
