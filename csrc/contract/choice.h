// What schedule="..." of a call means, and the error if it means nothing. Host only.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "automatic.h"
#include "policy.h"

namespace dash_attn {

// The policy, if users can choose it and it has a kernel for the call; otherwise none.
inline std::optional<Policy> chosen_policy(std::string_view schedule, CallKind call) {
  if (schedule == "auto") return automatic_policy(call.mask_of_policies(), call.padded);
  for (int i = 0; i < kNumUserPolicies; ++i) {
    Policy const policy = static_cast<Policy>(i);
    if (schedule == kPolicyNames[i] && has_kernel(policy, call)) return policy;
  }
  return std::nullopt;
}

// The error for a schedule for which chosen_policy returns none.
inline std::string refused_schedule(std::string_view schedule, CallKind call) {
  if (schedule == kPolicyNames[static_cast<int>(Policy::kOrderFree)]) {
    return std::string("schedule='order_free' supports plain scores without dropout up to head dim 128; got ") +
           (call.changed_scores ? "softcap or alibi_slopes" : call.drops ? "dropout" : "a head dim above 128");
  }
  std::string text = "schedule must be one of 'auto'";
  for (int i = 0; i < kNumUserPolicies; ++i) {
    if (has_kernel(static_cast<Policy>(i), call)) text += std::string(", '") + kPolicyNames[i] + "'";
  }
  text += !call.has_plain_scores() ? " with softcap, alibi_slopes or dropout"
          : call.has_wide_heads()  ? " at head dims above 128"
                                   : std::string(" under the ") + kMaskNames[static_cast<int>(call.mask)] + " mask";
  return text.append(", got '").append(schedule).append("'");
}

}  // namespace dash_attn
