// Python's view of the policies: their names, the masks they are defined for, and the calls they have kernels for.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "../contract/choice.h"
#include "../contract/order.h"
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

// Calls f with the policy as a type, once its mask is known to fit.
template <class Problem, class F>
decltype(auto) with_policy(std::string const& name, Problem const& problem, F&& f) {
  Policy const policy = checked_policy(name, problem.grid.mask.kind);
  int const tiles = max_int(problem.grid.query_tiles(), problem.grid.kv_tiles());
  if (divides(policy) && tiles > kMostTilesOfDivided) {
    throw py::value_error("schedule='" + name + "' is for at most " + std::to_string(kMostTilesOfDivided) +
                          " query tiles and KV tiles, got " + std::to_string(tiles));
  }
  return AllPolicies::with(policy, std::forward<F>(f));
}

inline void bind_policies(py::module_& m) {
  py::tuple names(kNumUserPolicies), yardsticks(kNumPolicies - kNumUserPolicies);
  for (int i = 0; i < kNumPolicies; ++i) {
    if (i < kNumUserPolicies) {
      names[i] = py::str(kPolicyNames[i]);
    } else {
      yardsticks[i - kNumUserPolicies] = py::str(kPolicyNames[i]);
    }
  }
  m.attr("POLICIES") = names;
  m.attr("YARDSTICKS") = yardsticks;

  m.def(
      "fits",
      [](std::string const& schedule, bool causal, WindowSize window, int64_t attention_chunk) {
        return fits(parse_policy(schedule), checked_rule(causal, window, attention_chunk).kind);
      },
      py::arg("schedule"), py::arg("causal"), py::kw_only(), py::arg("window") = kAnyWindow,
      py::arg("attention_chunk") = 0, "Whether the policy is defined for this mask.");

  auto const call = [](bool causal, int64_t head_dim, std::optional<int64_t> value_head_dim, WindowSize window,
                       int64_t attention_chunk, bool changed_scores, bool dropout) {
    MaskKind const mask = checked_rule(causal, window, attention_chunk).kind;
    return CallKind{mask, padded_row(head_dim, value_head_dim), changed_scores, dropout};
  };
  m.def(
      "has_kernel",
      [=](std::string const& schedule, bool causal, int64_t head_dim, std::optional<int64_t> value_head_dim,
          WindowSize window, int64_t attention_chunk, bool changed_scores, bool dropout) {
        return has_kernel(parse_policy(schedule),
                          call(causal, head_dim, value_head_dim, window, attention_chunk, changed_scores, dropout));
      },
      py::arg("schedule"), py::kw_only(), py::arg("causal"), py::arg("head_dim"),
      py::arg("value_head_dim") = py::none(), py::arg("window") = kAnyWindow, py::arg("attention_chunk") = 0,
      py::arg("changed_scores") = false, py::arg("dropout") = false,
      "Whether the policy has a kernel for such calls.");
  m.def(
      "resolve",
      [=](std::string const& schedule, bool causal, int64_t head_dim, std::optional<int64_t> value_head_dim,
          WindowSize window, int64_t attention_chunk, bool changed_scores, bool dropout) {
        CallKind const kind = call(causal, head_dim, value_head_dim, window, attention_chunk, changed_scores, dropout);
        std::optional<Policy> const policy = chosen_policy(schedule, kind);
        if (!policy) throw py::value_error(refused_schedule(schedule, kind));
        return kPolicyNames[static_cast<int>(*policy)];
      },
      py::arg("schedule"), py::kw_only(), py::arg("causal"), py::arg("head_dim"),
      py::arg("value_head_dim") = py::none(), py::arg("window") = kAnyWindow, py::arg("attention_chunk") = 0,
      py::arg("changed_scores") = false, py::arg("dropout") = false,
      "The policy that a schedule means for such calls.");

  m.def(
      "mask_name",
      [](bool causal, WindowSize window, int64_t attention_chunk) {
        return mask_name(checked_rule(causal, window, attention_chunk).kind);
      },
      py::kw_only(), py::arg("causal"), py::arg("window") = kAnyWindow, py::arg("attention_chunk") = 0,
      "full, causal or window: the kernel that a call takes.");
}

}  // namespace dash_attn
