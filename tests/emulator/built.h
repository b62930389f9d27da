// Which kernels a program has.
#pragma once

#include "launch/scores.h"
#include "launch/variant.h"
#include "machine.h"

namespace emulator {

using namespace dash_attn;

extern const HeadDims kRow = EMULATED_DIMS::kDims;

// EMULATED_ONLY names dtypes, masks, scores and policies, such as BFloat16, Causal, Plain, Ordered: others fail.
template <typename... Built>
struct Only {
  template <typename Kind>
  static constexpr bool has = (std::is_same_v<Kind, Built> || ...);
};
template <typename... Kinds>
constexpr bool is_built() {
#ifdef EMULATED_ONLY
  return (Only<EMULATED_ONLY>::has<Kinds> && ...);
#else
  return true;
#endif
}

[[noreturn]] inline void fail_without_kernel() { fail("no kernel serves this"); }

}  // namespace emulator
