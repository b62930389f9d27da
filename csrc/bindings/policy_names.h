// Policies by the names that Python has for them.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "../schedule/policy.h"
#include "tile_bindings.h"

namespace dash_attn {

inline Policy parse_policy(std::string const& name) {
  std::string allowed;
  for (int i = 0; i < kNumPolicies; ++i) {
    if (name == kPolicyNames[i]) return static_cast<Policy>(i);
    allowed += std::string(i ? ", '" : "'") + kPolicyNames[i] + "'";
  }
  throw py::value_error("schedule must be one of " + allowed + ", got '" + name + "'");
}

// The policy, which must be defined for the mask.
inline Policy checked_policy(std::string const& name, MaskKind mask) {
  Policy const policy = parse_policy(name);
  if (!fits(policy, mask)) {
    MaskKind const own = fits(policy, MaskKind::kFull) ? MaskKind::kFull : MaskKind::kCausal;
    throw py::value_error("schedule='" + name + "' is defined for the " + mask_name(own) + " mask only, got the " +
                          mask_name(mask) + " mask");
  }
  return policy;
}

}  // namespace dash_attn
