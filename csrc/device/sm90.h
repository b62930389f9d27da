// What the kernels take for granted of a Hopper SM.
#pragma once

#include <cstdint>

namespace dash_attn {

constexpr int kWarpgroupThreads = 128;
constexpr int kWarpgroupWarps = 4;
constexpr int kSharedMemoryLimit = 227 * 1024;
constexpr int kRegistersPerSm = 64 * 1024;

// What the launch gives a CTA that is alone on its SM, a multiple of 8 a thread. setmaxnreg moves registers within
// that: asking for more waits for ever.
constexpr int launch_registers(int threads) { return kRegistersPerSm / threads / 8 * 8 * threads; }

// Hints for TMA loads, of tiles that other CTAs will read too and of those that are read once in all: what PTX's
// createpolicy makes of evict_last and evict_first.
constexpr uint64_t kKeepInL2 = 0x14F0000000000000, kReadOnce = 0x12F0000000000000;

}  // namespace dash_attn
