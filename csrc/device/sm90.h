// What the kernels take for granted of a Hopper SM.
#pragma once

#include <cstdint>
#include <cute/arch/copy_sm90_desc.hpp>

namespace dash_attn {

constexpr int kWarpgroupThreads = 128;
constexpr int kWarpgroupWarps = 4;
constexpr int kSharedMemoryLimit = 227 * 1024;
constexpr int kRegistersPerSm = 64 * 1024;

// What the launch gives a CTA that is alone on its SM, a multiple of 8 a thread. setmaxnreg moves registers within
// that: asking for more waits for ever.
constexpr int launch_registers(int threads) { return kRegistersPerSm / threads / 8 * 8 * threads; }

// Hints for TMA loads: of tiles that other CTAs will read too, and of those that are read once in all.
constexpr auto kKeepInL2 = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_LAST);
constexpr auto kReadOnce = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_FIRST);

}  // namespace dash_attn
