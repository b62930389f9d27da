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
  int split;    // of the KV head's query heads
  int kv_tile;  // -1: the group is smaller than the cluster and this CTA sits the claim out

  DASH_HOST_DEVICE constexpr bool valid() const { return kv_tile >= 0; }
};

// Claims of the whole problem; a kernel needs it below 2^31.
template <Policy P>
DASH_HOST_DEVICE constexpr int64_t num_claims(Problem const& problem) {
  return static_cast<int64_t>(problem.batch) * problem.kv_heads * problem.head_splits * Order<P>::groups(problem);
}

// The first of the query heads that a claim walks.
DASH_HOST_DEVICE constexpr int first_query_head(Problem const& problem, Work const& work) {
  return work.kv_head * problem.queries_per_kv + work.split * problem.queries_per_claim;
}

// KV heads first ... first + count - 1 of every sequence.
struct HeadRange {
  int first, count;
};

template <Policy P>
DASH_HOST_DEVICE constexpr Work assign_heads(Problem const& problem, HeadRange range, int section, int claim,
                                             int cta_rank) {
  int const groups = Order<P>::groups(problem);
  int const heads = problem.batch * range.count;
  int const section_start = claim / groups / section * section;
  int const section_splits = min_int(section, heads * problem.head_splits - section_start);
  int const claim_in_section = claim - section_start * groups;
  int const group = claim_in_section / section_splits;
  int const head_of_split = section_start + claim_in_section - group * section_splits;
  int const split = head_of_split / heads;
  int const head = head_of_split - split * heads;
  int const batch = head / range.count;
  return {batch, range.first + head - batch * range.count, split, Order<P>::kv_tile(problem, group, cta_rank)};
}

// Work of CTA `cta_rank` of the cluster that took `claim`. Claims must be taken in increasing order: the groups of
// every (batch, KV head, split) then come in the policy's order, and the splits of a group in ascending order, which are
// the orders in which waits point back.
//
// All heads' first splits come before any second one: where there are enough heads, a claim that ends then finds the sums
// of the split before ready. These come in sections of problem.head_section. Within a section the first group of each
// comes before the second of any: fewer groups of one run at a time, so fewer wait for each other's adds, and the longest
// (or shortest) tiles of all heads come together. No order of adds depends on it: it may follow the device.
template <Policy P>
DASH_HOST_DEVICE constexpr Work assign(Problem const& problem, int claim, int cta_rank) {
  if constexpr (P == Policy::kSptDescending) {
    int const spt_heads = Order<P>::spt_heads(problem);
    int const spt_claims = problem.batch * spt_heads * problem.head_splits * Order<P>::groups(problem);
    if (claim < spt_claims) return assign_heads<Policy::kSpt>(problem, {0, spt_heads}, 1, claim, cta_rank);
    return assign_heads<Policy::kDescending>(problem, {spt_heads, problem.kv_heads - spt_heads}, problem.head_section,
                                             claim - spt_claims, cta_rank);
  } else {
    return assign_heads<P>(problem, {0, problem.kv_heads}, problem.head_section, claim, cta_rank);
  }
}

}  // namespace dash_attn
