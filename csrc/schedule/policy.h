// The policies: which of them exist, their names, the masks they are defined for and how each adds dQ.
#pragma once

#include <type_traits>

#include "../host_device.h"

namespace dash_attn {

// Values are part of the interface of the compiled ops: never renumber. The yardstick is last, and has no value of its own.
enum class Policy : int {
  kAscending = 0,
  kDescending,
  kSpt,
  kShift,
  kSymmetricShift,
  kOrderFree,
  kSptDescending,
  kAtomic
};

inline constexpr int kNumPolicies = 8;
inline constexpr int kNumDeterministicPolicies = 7;  // the first ones; users can choose no other
inline constexpr const char* kPolicyNames[kNumPolicies] = {
    "ascending", "descending", "spt", "shift", "symmetric_shift", "order_free", "spt_descending", "atomic"};

// How the partials of dQ become a sum.
enum class Accumulation {
  kOrdered,    // in fp32, one after the other, in the order of their ranks
  kOrderFree,  // rounded to a grid that the inputs fix and added as integers: any order gives the same bits
  kUnordered,  // in fp32 in any order, with other bits every time: what determinism costs is measured against it
};

DASH_HOST_DEVICE constexpr Accumulation accumulation(Policy policy) {
  return policy == Policy::kOrderFree ? Accumulation::kOrderFree
         : policy == Policy::kAtomic  ? Accumulation::kUnordered
                                      : Accumulation::kOrdered;
}

// Shift's rotation needs every query tile live for every KV tile; symmetric shift is built round the diagonal; tiles that
// are all of one length need no evening out.
DASH_HOST_DEVICE constexpr bool fits(Policy policy, bool causal) {
  if (policy == Policy::kShift) return !causal;
  if (policy == Policy::kSymmetricShift || policy == Policy::kSptDescending) return causal;
  return true;
}

template <Policy P>
using PolicyConstant = std::integral_constant<Policy, P>;

// Calls f(PolicyConstant<policy>{}): the one place where a run-time policy becomes a type.
template <class F>
constexpr decltype(auto) with_policy(Policy policy, F&& f) {
  switch (policy) {
    case Policy::kDescending:
      return f(PolicyConstant<Policy::kDescending>{});
    case Policy::kSpt:
      return f(PolicyConstant<Policy::kSpt>{});
    case Policy::kShift:
      return f(PolicyConstant<Policy::kShift>{});
    case Policy::kSymmetricShift:
      return f(PolicyConstant<Policy::kSymmetricShift>{});
    case Policy::kOrderFree:
      return f(PolicyConstant<Policy::kOrderFree>{});
    case Policy::kSptDescending:
      return f(PolicyConstant<Policy::kSptDescending>{});
    case Policy::kAtomic:
      return f(PolicyConstant<Policy::kAtomic>{});
    case Policy::kAscending:
      break;
  }
  return f(PolicyConstant<Policy::kAscending>{});
}

}  // namespace dash_attn
