// Properties of a Hopper SM that the kernels rely on.
#pragma once

#include <cstdint>

namespace dash_attn {

constexpr int kWarpgroupThreads = 128;
constexpr int kWarpgroupWarps = 4;
constexpr int kSharedMemoryLimit = 227 * 1024;
constexpr int kRegistersPerSm = 64 * 1024;
constexpr int kMostRegisters = 256;  // that setmaxnreg gives a thread

// The registers that a launch gives a CTA that is alone on its SM, a multiple of 8 a thread. setmaxnreg moves registers
// within that pool: a request beyond it never returns.
constexpr int launch_registers(int threads) { return kRegistersPerSm / threads / 8 * 8 * threads; }

// The registers of each consumer thread if the threads of the one producer warpgroup keep `of_producer`.
constexpr int consumer_registers(int consumers, int of_producer) {
  const int warpgroups = consumers + 1, threads = warpgroups * kWarpgroupThreads;
  const int share = (launch_registers(threads) / kWarpgroupThreads - of_producer) / consumers / 8 * 8;
  return share < kMostRegisters ? share : kMostRegisters;
}

constexpr bool is_power_of_two(int x) { return (x & (x - 1)) == 0; }

// L2 hints for TMA loads: for tiles that other CTAs will read too, and for tiles that are read once. These are the
// values that PTX's createpolicy returns for evict_last and evict_first.
constexpr uint64_t kKeepInL2 = 0x14F0000000000000, kReadOnce = 0x12F0000000000000;

}  // namespace dash_attn
