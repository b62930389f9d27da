// From a claim number to the KV tile that a CTA owns.
#pragma once

#include <cstdint>

#include "../host_device.h"
#include "order.h"
#include "policy.h"
#include "problem.h"

namespace dash_attn {

struct Work {
  int batch;
  int kv_head;
  int kv_tile;
  bool valid;  // false: the group is smaller than the cluster and this CTA sits the claim out
};

// Claims of the whole problem; a kernel needs it below 2^31.
template <Policy P>
DASH_HOST_DEVICE constexpr int64_t num_claims(Problem const& problem) {
  return static_cast<int64_t>(problem.batch) * problem.kv_heads * Order<P>::groups(problem);
}

// Work of CTA `cta_rank` of the cluster that took `claim`. Claims must be taken in increasing order: the groups of
// every (batch, KV head) then come in the policy's order, which is the order in which waits point back.
//
// Heads come in sections of problem.head_section, batch-major. Within a section the first group of each head comes
// before the second of any: fewer groups of one head run at a time, so fewer wait for each other's adds, and the
// longest (or shortest) tiles of all heads come together. No order of adds depends on it: it may follow the device.
template <Policy P>
DASH_HOST_DEVICE constexpr Work assign(Problem const& problem, int claim, int cta_rank) {
  int const groups = Order<P>::groups(problem);
  int const heads = problem.batch * problem.kv_heads;
  int const section_start = claim / groups / problem.head_section * problem.head_section;
  int const section_heads = min_int(problem.head_section, heads - section_start);
  int const claim_in_section = claim - section_start * groups;
  int const group = claim_in_section / section_heads;
  int const head = section_start + claim_in_section - group * section_heads;
  int const kv = Order<P>::kv_tile(problem, group, cta_rank);
  int const batch = head / problem.kv_heads;
  return {batch, head - batch * problem.kv_heads, kv, kv >= 0};
}

}  // namespace dash_attn
