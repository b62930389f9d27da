// The orders: for each policy, which KV tiles a claim takes, in which order a KV tile visits its query tiles, and the
// rank of each (KV tile, query tile) in the sum of dQ. Decided here and nowhere else.
//
// Determinism contract: visit and rank are functions of (seqlen_q, seqlen_k, tile_q, tile_k, causal, policy, cta_group)
// alone, and in spt_descending of a head's place among those of its sequence. Not of the batch, the number of SMs or who
// runs what, when.
//
// Forward-progress contract: the groups of a head are claimed in the order of their numbers, and every tile of lower
// rank at a query tile belongs to an earlier group, or to the same group and, on the clock of steps that all its CTAs
// share, to a step that is not later. So a wait for the previous rank can never close a cycle: docs/schedules.md.
//
// A claim also walks the query heads of its split of the KV head, in ascending order: next_step. That is part of both
// contracts. So is the sum of dK and dV over the splits, for which the end of a claim waits for the same KV tile's claim of
// the split before: claimed earlier (assignment.h). How many splits there are depends on the shape alone (head_splits.h).
#pragma once

#include "../host_device.h"
#include "policy.h"
#include "problem.h"
#include "rotation.h"

namespace dash_attn {

// Order<P> has
//   kCtaGroup                     the cluster size the kernel launches; the functions read problem.cta_group
//   groups(problem)               claims that one (batch, KV head, split) is cut into
//   kv_tile(problem, group, r)    KV tile of CTA r of the cluster that took `group`; -1 when the group has no such tile
//   visit(problem, kv, step)      query tile at `step`, 0 <= step < problem.live_query_tiles(kv)
//   rank(problem, kv, q)          place of KV tile `kv` in dQ_q, 0 <= rank < problem.live_kv_tiles(q), q live for kv
//   kHeadsTogether                whether all query heads of a claim take a step before any takes the next
template <Policy P>
struct Order;

// Where a claim is: the step of query head `head` of those that it walks.
struct ClaimStep {
  int step, head;  // head: of the split's
};

// One head after the other makes a KV tile with few steps, as the causal mask leaves some, wait at each head for those
// with many. All heads together do not, where all KV tiles start at the same query tile. Where they start at their own,
// it only lengthens the wait for the first.
template <Policy P>
DASH_HOST_DEVICE constexpr ClaimStep next_step(Problem const& problem, int kv, ClaimStep at) {
  if (Order<P>::kHeadsTogether) {
    return at.head + 1 < problem.queries_per_claim ? ClaimStep{at.step, at.head + 1} : ClaimStep{at.step + 1, 0};
  }
  return at.step + 1 < problem.live_query_tiles(kv) ? ClaimStep{at.step + 1, at.head} : ClaimStep{0, at.head + 1};
}

// KV tiles in groups of `cta_group` from tile 0 upwards.
struct AscendingGroups {
  DASH_HOST_DEVICE static constexpr int groups(Problem const& problem) {
    return ceil_div(problem.kv_tiles, problem.cta_group);
  }
  DASH_HOST_DEVICE static constexpr int kv_tile(Problem const& problem, int group, int cta_rank) {
    int const kv = group * problem.cta_group + cta_rank;
    return kv < problem.kv_tiles ? kv : -1;
  }
};

// q upwards from the first live tile, partials added in ascending KV.
template <>
struct Order<Policy::kAscending> : AscendingGroups {
  static constexpr int kCtaGroup = 1;
  static constexpr bool kHeadsTogether = false;

  DASH_HOST_DEVICE static constexpr int visit(Problem const& problem, int kv, int step) {
    return problem.first_query_tile(kv) + step;
  }
  DASH_HOST_DEVICE static constexpr int rank(Problem const&, int kv, int) { return kv; }
};

// q downwards from the last tile: under the causal mask all KV tiles start at a live tile, none waits for the diagonal
// of a longer one (DASH, arXiv 2601.21824). The paper mirrors every second head onto the SMs; a claim counter
// does as much by itself, since the SM that had the shortest tile is the first to come for the next head's longest.
template <>
struct Order<Policy::kDescending> : AscendingGroups {
  static constexpr int kCtaGroup = 1;
  static constexpr bool kHeadsTogether = true;

  DASH_HOST_DEVICE static constexpr int visit(Problem const& problem, int, int step) {
    return problem.query_tiles - 1 - step;
  }
  DASH_HOST_DEVICE static constexpr int rank(Problem const&, int kv, int) { return kv; }
};

// No partial waits for another, so any order would do: descending's, whose tiles of all heads come longest first. Heads
// whose inputs leave the order-free grid too little room are added by these ranks.
template <>
struct Order<Policy::kOrderFree> : Order<Policy::kDescending> {};

template <>
struct Order<Policy::kAtomic> : Order<Policy::kDescending> {};

// Shortest first: KV tiles are claimed last to first and added in that order, q upwards from the first live tile.
template <>
struct Order<Policy::kSpt> {
  static constexpr int kCtaGroup = 1;
  static constexpr bool kHeadsTogether = false;

  DASH_HOST_DEVICE static constexpr int groups(Problem const& problem) { return AscendingGroups::groups(problem); }
  DASH_HOST_DEVICE static constexpr int kv_tile(Problem const& problem, int group, int cta_rank) {
    return max_int(-1, problem.kv_tiles - 1 - (group * problem.cta_group + cta_rank));
  }
  DASH_HOST_DEVICE static constexpr int visit(Problem const& problem, int kv, int step) {
    return problem.first_query_tile(kv) + step;
  }
  DASH_HOST_DEVICE static constexpr int rank(Problem const& problem, int kv, int query_tile) {
    return problem.live_kv_tiles(query_tile) - 1 - kv;
  }
};

// Most KV heads of a sequence in spt's order, the others in descending's. The former wait for nobody and need no other head
// beside them, but end with their longest tiles; the latter are claimed when all the former have been, and end with their
// shortest: enough of them for an even end, a quarter at most. with_order_of_head says which order a head has.
template <>
struct Order<Policy::kSptDescending> {
  static constexpr int kCtaGroup = 1;

  DASH_HOST_DEVICE static constexpr int groups(Problem const& problem) { return AscendingGroups::groups(problem); }
  DASH_HOST_DEVICE static constexpr int spt_heads(Problem const& problem) {
    constexpr int kEnoughForAnEvenEnd =
        512;  // KV tiles; not that of sections.h, which may change without a change of bits
    int const enough = ceil_div(kEnoughForAnEvenEnd, problem.kv_tiles);
    return problem.kv_heads - min_int(enough, ceil_div(problem.kv_heads, 4));
  }
};

// Full mask. The paper's rotation, q = (kv + step) mod n, kept inside each group; groups one after the other.
// With cta_group = n it is the published schedule.
template <>
struct Order<Policy::kShift> : AscendingGroups {
  static constexpr int kCtaGroup = 2;
  static constexpr bool kHeadsTogether = false;

  DASH_HOST_DEVICE static constexpr int visit(Problem const& problem, int kv, int step) {
    int const first = group_start(problem, kv);
    return rotation(problem, first).visit_upwards(kv - first, step);
  }
  DASH_HOST_DEVICE static constexpr int rank(Problem const& problem, int kv, int query_tile) {
    int const first = group_start(problem, kv);
    return first + rotation(problem, first).rank(kv - first, query_tile);
  }

  DASH_HOST_DEVICE static constexpr int group_start(Problem const& problem, int kv) {
    return kv - kv % problem.cta_group;
  }
  DASH_HOST_DEVICE static constexpr Rotation rotation(Problem const& problem, int first) {
    return {problem.query_tiles, min_int(problem.cta_group, problem.kv_tiles - first)};
  }
};

// Causal mask. The first half of the KV tiles, in groups: the rectangle of query tiles that every member sees, rotated,
// blocks from the end of q downwards; then the triangle before it, upwards. The second half, in groups: q downwards,
// as in the descending order, the tiles mirrored within the cluster so that the CTA with the longest tile
// of the first half has the shortest of the second. With cta_group = n/2 and square tiles it is the published schedule.
template <>
struct Order<Policy::kSymmetricShift> {
  static constexpr int kCtaGroup = 2;
  static constexpr bool kHeadsTogether = true;

  // KV tiles of the first half; no group straddles it.
  DASH_HOST_DEVICE static constexpr int half(Problem const& problem) { return (problem.kv_tiles + 1) / 2; }

  DASH_HOST_DEVICE static constexpr int groups(Problem const& problem) {
    int const h = half(problem);
    return ceil_div(h, problem.cta_group) + ceil_div(problem.kv_tiles - h, problem.cta_group);
  }

  DASH_HOST_DEVICE static constexpr int kv_tile(Problem const& problem, int group, int cta_rank) {
    int const h = half(problem);
    int const first_half_groups = ceil_div(h, problem.cta_group);
    if (group < first_half_groups) {
      int const kv = group * problem.cta_group + cta_rank;
      return kv < h ? kv : -1;
    }
    int const start = h + (group - first_half_groups) * problem.cta_group;
    int const kv = min_int(start + problem.cta_group, problem.kv_tiles) - 1 - cta_rank;
    return kv >= start ? kv : -1;
  }

  DASH_HOST_DEVICE static constexpr int visit(Problem const& problem, int kv, int step) {
    if (kv >= half(problem)) return problem.query_tiles - 1 - step;
    FirstHalfGroup const g = first_half_group(problem, kv);
    return step < g.rectangle.length ? g.rectangle_start + g.rectangle.visit_downwards(kv - g.start, step)
                                     : problem.first_query_tile(kv) + step - g.rectangle.length;
  }

  DASH_HOST_DEVICE static constexpr int rank(Problem const& problem, int kv, int query_tile) {
    if (kv >= half(problem)) return kv;
    FirstHalfGroup const g = first_half_group(problem, kv);
    int const l = kv - g.start;
    if (query_tile >= g.rectangle_start) return g.start + g.rectangle.rank(l, query_tile - g.rectangle_start);
    // Members reach a tile of the triangle last first, and only those before the diagonal reach it at all.
    return problem.live_kv_tiles(query_tile) - 1 - l;
  }

  struct FirstHalfGroup {
    int start;            // its first KV tile
    int rectangle_start;  // first query tile that its last KV tile sees
    Rotation rectangle;
  };

  DASH_HOST_DEVICE static constexpr FirstHalfGroup first_half_group(Problem const& problem, int kv) {
    int const start = kv - kv % problem.cta_group;
    int const members = min_int(problem.cta_group, half(problem) - start);
    int const rectangle_start = problem.first_query_tile(start + members - 1);
    return {start, rectangle_start, {problem.query_tiles - rectangle_start, members}};
  }
};

// Calls f with the policy whose order a KV head has, as a type: the policy itself, but for spt_descending.
template <Policy P, class F>
DASH_HOST_DEVICE constexpr decltype(auto) with_order_of_head(Problem const& problem, int kv_head, F&& f) {
  if constexpr (P == Policy::kSptDescending) {
    return kv_head < Order<P>::spt_heads(problem) ? f(PolicyConstant<Policy::kSpt>{})
                                                  : f(PolicyConstant<Policy::kDescending>{});
  } else {
    return f(PolicyConstant<P>{});
  }
}

}  // namespace dash_attn
