// The policies: their names, the masks they are defined for, the calls they have kernels for, and how each accumulates
// dQ.
#pragma once

#include <type_traits>

#include "../host_device.h"
#include "mask.h"
#include "tile_shapes.h"

namespace dash_attn {

enum class Policy : int { kDescending, kSpt, kShift, kSymmetricShift, kOrderFree, kAscending, kAtomic };

inline constexpr int kNumPolicies = 7;
// The first kNumUserPolicies are for users. The others are yardsticks, which benchmarks measure in builds that request
// them by DASH_ATTN_POLICIES.
inline constexpr int kNumUserPolicies = 5;
inline constexpr const char* kPolicyNames[kNumPolicies] = {"descending", "spt",       "shift", "symmetric_shift",
                                                           "order_free", "ascending", "atomic"};

// How the partials of dQ are summed.
enum class Accumulation {
  kOrdered,    // in fp32, one after the other, in the order of their ranks
  kOrderFree,  // rounded to units that the inputs fix and added as integers: any order gives the same bits
  kUnordered,  // in fp32 in any order, with different bits each time: the baseline that shows the cost of determinism
};

DASH_HOST_DEVICE constexpr Accumulation accumulation(Policy policy) {
  return policy == Policy::kOrderFree ? Accumulation::kOrderFree
         : policy == Policy::kAtomic  ? Accumulation::kUnordered
                                      : Accumulation::kOrdered;
}

// Shift needs every query tile to be live for every KV tile. Symmetric shift is built around the diagonal.
DASH_HOST_DEVICE constexpr bool fits(Policy policy, MaskKind mask) {
  if (policy == Policy::kShift) return mask == MaskKind::kFull;
  if (policy == Policy::kSymmetricShift) return mask == MaskKind::kCausal;
  return true;
}

// Whether a KV tile's visits are divided among two work tiles (order.h).
DASH_HOST_DEVICE constexpr bool divides(Policy policy) { return policy == Policy::kShift; }

// The properties of a call that decide whether a policy has a kernel for it.
struct CallKind {
  MaskKind mask;
  HeadDims padded;      // of padded_head_dims
  bool changed_scores;  // by a softcap or by slopes
  bool drops;
  bool has_columns = false;  // a mask by key columns

  DASH_HOST_DEVICE constexpr bool has_wide_heads() const { return padded.qk > 128 || padded.v > 128; }

  DASH_HOST_DEVICE constexpr bool has_plain_scores() const { return !changed_scores && !drops; }

  // Whether all policies that fit the mask have kernels. Other calls have the ordered policies of windows alone.
  DASH_HOST_DEVICE constexpr bool has_all_policies() const { return has_plain_scores() && !has_wide_heads(); }

  // The mask whose policies have kernels.
  DASH_HOST_DEVICE constexpr MaskKind mask_of_policies() const { return has_all_policies() ? mask : MaskKind::kWindow; }
};

DASH_HOST_DEVICE constexpr bool has_kernel(Policy policy, CallKind call) {
  if (call.has_columns) return policy == Policy::kDescending && call.has_plain_scores();
  if (policy == Policy::kOrderFree && !call.has_all_policies()) return false;
  return fits(policy, call.mask_of_policies());
}

template <Policy P>
using PolicyConstant = std::integral_constant<Policy, P>;

// Policies that one kernel serves, which selects one at run time. `with` is the only place where a policy becomes a
// type: it calls f(PolicyConstant<policy>{}). A policy that is not in the set is taken for the last member, which
// therefore must be deterministic.
template <Policy kFirst, Policy... kRest>
struct PolicySet {
  static constexpr Policy kAny = kFirst;

  DASH_HOST_DEVICE static constexpr bool contains(Policy policy) {
    return policy == kFirst || (... || (policy == kRest));
  }

  template <class F>
  DASH_HOST_DEVICE static constexpr decltype(auto) with(Policy policy, F&& f) {
    if constexpr (sizeof...(kRest) == 0) {
      static_assert(accumulation(kFirst) != Accumulation::kUnordered, "the last member of a set is deterministic");
      return f(PolicyConstant<kFirst>{});
    } else {
      if (policy == kFirst) return f(PolicyConstant<kFirst>{});
      return PolicySet<kRest...>::with(policy, f);
    }
  }
};

using AllPolicies = PolicySet<Policy::kAscending, Policy::kDescending, Policy::kSpt, Policy::kShift,
                              Policy::kSymmetricShift, Policy::kAtomic, Policy::kOrderFree>;

}  // namespace dash_attn
