// The policies: which of them exist, their names and the masks they are defined for.
#pragma once

#include <type_traits>

#include "../host_device.h"

namespace dash_attn {

// Values are part of the interface of the compiled ops: append, never renumber.
enum class Policy : int { kAscending = 0, kDescending, kSpt, kShift, kSymmetricShift };

inline constexpr int kNumPolicies = 5;
inline constexpr const char* kPolicyNames[kNumPolicies] = {"ascending", "descending", "spt", "shift",
                                                           "symmetric_shift"};

// Shift's rotation needs every query tile live for every KV tile; symmetric shift is built round the diagonal.
DASH_HOST_DEVICE constexpr bool fits(Policy policy, bool causal) {
  return policy == Policy::kShift ? !causal : policy == Policy::kSymmetricShift ? causal : true;
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
    case Policy::kAscending:
      break;
  }
  return f(PolicyConstant<Policy::kAscending>{});
}

}  // namespace dash_attn
