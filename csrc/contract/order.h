// The orders: for each policy, which KV tiles a group takes, in which order a KV tile visits its query tiles, and the
// rank of each (KV tile, query tile) in the sum of dQ. They are decided only here.
//
// Determinism contract: visit and rank are functions of (seqlen_q, seqlen_k, tile sizes, mask, policy, cta_group)
// alone, and not of the batch, the heads, the number of SMs, or which CTA runs what and when.
//
// Forward-progress contract: the groups of a head are taken in the order of their numbers. Every tile of lower rank at
// a query tile belongs to an earlier group, or to the same group and, on the clock of steps that all its CTAs share, to
// a step that is not later. So waits for the previous rank never form a cycle: docs/schedules.md. For divided KV tiles
// that are worked on whole, backward/whole_tiles.h gives the argument.
//
// A work tile also walks the query heads of its split of the KV head, in ascending order: next_step. That is part of
// both contracts. So is the sum of dK and dV over the splits, for which the end of a work tile waits for the same KV
// tile's work tile of the previous split, which was taken earlier (work_tile.h). splits.h decides the number of splits.
#pragma once

#include <cstdint>

#include "../host_device.h"
#include "policy.h"
#include "rotation.h"
#include "tile_grid.h"

namespace dash_attn {

// Order<P> has
//   kCtaGroup                  the cluster size the kernel launches; the functions read grid.tiling.cta_group
//   groups(grid)               groups that the KV tiles of one (sequence, KV head, split) are cut into
//   kv_tile(grid, group, r)    KV tile of CTA r of the cluster that took `group`; -1 when the group has no such tile
//   kDivided                   whether a KV tile is in two groups, each with a part of its visits
//   visits(grid, group)        which part the group takes
//   steps(grid, kv, visits)    and the steps of a head that these are
//   visit(grid, kv, step)      query tile at `step`, 0 <= step < grid.query_tiles_of(kv).count
//   rank(grid, kv, q)          place of KV tile `kv` in dQ_q, 0 <= rank < grid.kv_tiles_of(q).count, q live for kv
//   kFollowsRanges             whether visit and rank need only grid.query_tiles_of(kv) and grid.kv_tiles_of(q). The
//                              order then has visit_among and rank_among, which the planner calls with these ranges
//   kHeadsTogether             whether all query heads of a work tile take a step before any takes the next, but for
//                              windows (heads_together)
template <Policy P>
struct Order;

// The visits of a KV tile: all of them or, if it is divided, the first ones, of all query heads, or the ones after
// those. A CTA that works on both parts goes from the one to the other, so that every sum is the same as with two work
// tiles.
enum class Visits : int { kAll, kFirst, kSecond };
inline constexpr const char* kVisitsNames[] = {"all", "first", "second"};

// The position of a work tile: a step of query head `head` of those that it walks.
struct WorkStep {
  int step, head;  // head: within the split
};

// If heads follow one another, a KV tile with few steps, as under the causal mask, waits at each head for those with
// many. If all heads take a step together it does not, provided that all KV tiles start at the same query tile. If they
// start at their own, heads together only lengthen the wait for the first. Under a window KV tiles start at their own
// query tile and have equally many steps. There two neighbours reach a query tile one after the other, and what is read
// and added in between should stay in L2, which it does for one head.
template <Policy P>
DASH_HOST_DEVICE constexpr bool heads_together(MaskKind mask) {
  return Order<P>::kHeadsTogether && mask != MaskKind::kWindow;
}

DASH_HOST_DEVICE constexpr WorkStep next_step(bool heads_together, WorkStep at, int heads, int steps_of_head) {
  if (heads_together) return at.head + 1 < heads ? WorkStep{at.step, at.head + 1} : WorkStep{at.step + 1, 0};
  return at.step + 1 < steps_of_head ? WorkStep{at.step + 1, at.head} : WorkStep{0, at.head + 1};
}

// The same for divided KV tiles: the first head's second part follows the last head's first part.
template <Policy P>
DASH_HOST_DEVICE constexpr WorkStep next_divided_step(TileGrid const& grid, int kv, Visits visits, WorkStep at,
                                                      int heads) {
  Range const first = Order<P>::steps(grid, kv, Visits::kFirst);
  bool const is_first = at.step < first.end();
  int const end = is_first ? first.end() : grid.query_tiles();
  if (at.step + 1 < end) return {at.step + 1, at.head};
  bool const goes_on = is_first && visits == Visits::kAll && at.head + 1 == heads && end < grid.query_tiles();
  return goes_on ? WorkStep{end, 0} : WorkStep{is_first ? 0 : first.end(), at.head + 1};
}

// Whether `at` is past the last step.
DASH_HOST_DEVICE constexpr bool is_end(bool heads_together, WorkStep at, int heads, int steps_of_head) {
  return heads_together ? at.step == steps_of_head : at.head == heads;
}

// The limit on query tiles and on KV tiles of a sequence whose KV tiles are divided: the product of both then has 32
// bits, because the loader has no registers for a 64-bit division.
inline constexpr int kMostTilesOfDivided = (1 << 16) - 1;

struct Undivided {
  static constexpr bool kDivided = false;
  DASH_HOST_DEVICE static constexpr Visits visits(TileGrid const&, int /*group*/) { return Visits::kAll; }
  DASH_HOST_DEVICE static constexpr Range steps(TileGrid const& grid, int kv, Visits) {
    return {0, grid.query_tiles_of(kv).count};
  }
};

// KV tiles in groups of cta_group from tile 0 upwards.
struct AscendingGroups : Undivided {
  DASH_HOST_DEVICE static constexpr int groups(TileGrid const& grid) {
    return ceil_div(grid.kv_tiles(), grid.tiling.cta_group);
  }
  DASH_HOST_DEVICE static constexpr int kv_tile(TileGrid const& grid, int group, int cta_rank) {
    int const kv = group * grid.tiling.cta_group + cta_rank;
    return kv < grid.kv_tiles() ? kv : -1;
  }
};

// The order whose visit_among and rank_among these are.
template <typename Order>
struct FollowsRanges {
  static constexpr bool kFollowsRanges = true;
  DASH_HOST_DEVICE static constexpr int visit(TileGrid const& grid, int kv, int step) {
    return Order::visit_among(grid.query_tiles_of(kv), step);
  }
  DASH_HOST_DEVICE static constexpr int rank(TileGrid const& grid, int kv, int query_tile) {
    return Order::rank_among(grid.kv_tiles_of(query_tile), kv);
  }
};

// Partials of dQ are added in ascending order of KV tiles.
struct AscendingRanks {
  DASH_HOST_DEVICE static constexpr int rank_among(Range kv_tiles, int kv) { return kv - kv_tiles.first; }
};

// Query tiles upwards from the first live tile.
struct UpwardVisits {
  DASH_HOST_DEVICE static constexpr int visit_among(Range query_tiles, int step) { return query_tiles.first + step; }
};

template <>
struct Order<Policy::kAscending> : AscendingGroups, AscendingRanks, UpwardVisits,
                                   FollowsRanges<Order<Policy::kAscending>> {
  static constexpr int kCtaGroup = 1;
  static constexpr bool kHeadsTogether = false;
};

// Query tiles downwards from the last live tile: under the causal mask all KV tiles start at the same one, and none
// waits for the diagonal of a longer one (DASH, arXiv 2601.21824). The paper mirrors every second head onto the SMs. A
// counter of work tiles achieves the same, because the SM that had the shortest tile is the first to come for the next
// head's longest.
template <>
struct Order<Policy::kDescending> : AscendingGroups, AscendingRanks, FollowsRanges<Order<Policy::kDescending>> {
  static constexpr int kCtaGroup = 1;
  static constexpr bool kHeadsTogether = true;

  DASH_HOST_DEVICE static constexpr int visit_among(Range query_tiles, int step) {
    return query_tiles.end() - 1 - step;
  }
};

// Partials wait only for that of rank 0. Heads whose inputs leave order-free accumulation too little room are added by
// rank, in the order of descending, whose tiles of all heads come longest first.
template <>
struct Order<Policy::kOrderFree> : Order<Policy::kDescending> {};

template <>
struct Order<Policy::kAtomic> : Order<Policy::kDescending> {};

// Shortest first: KV tiles are taken and added from the last to the first, with query tiles upwards from the first live
// tile.
template <>
struct Order<Policy::kSpt> : Undivided, UpwardVisits, FollowsRanges<Order<Policy::kSpt>> {
  static constexpr int kCtaGroup = 1;
  static constexpr bool kHeadsTogether = false;

  DASH_HOST_DEVICE static constexpr int groups(TileGrid const& grid) { return AscendingGroups::groups(grid); }
  DASH_HOST_DEVICE static constexpr int kv_tile(TileGrid const& grid, int group, int cta_rank) {
    return max_int(-1, grid.kv_tiles() - 1 - (group * grid.tiling.cta_group + cta_rank));
  }
  DASH_HOST_DEVICE static constexpr int rank_among(Range kv_tiles, int kv) { return kv_tiles.end() - 1 - kv; }
};

// For the full mask: the paper's shift. A KV tile begins at its own query tile, continues to the last one, and then
// from the first. With equally many of both, q = (kv + step) mod n. At a query tile the KV tiles that have begun there
// or before add first, the nearest one first, and then the others. With one work tile each, they would wait for each
// other in a circle. So the visits are divided where they continue from the first query tile: the first parts are taken
// from the last KV tile to the first, and then the second parts, so that every wait points back.
template <>
struct Order<Policy::kShift> {
  static constexpr int kCtaGroup = 1;
  static constexpr bool kHeadsTogether = false, kFollowsRanges = false;
  static constexpr bool kDivided = divides(Policy::kShift);

  DASH_HOST_DEVICE static constexpr int groups(TileGrid const& grid) { return 2 * grid.kv_tiles(); }
  DASH_HOST_DEVICE static constexpr Visits visits(TileGrid const& grid, int group) {
    return group < grid.kv_tiles() ? Visits::kFirst : Visits::kSecond;
  }
  DASH_HOST_DEVICE static constexpr int kv_tile(TileGrid const& grid, int group, int cta_rank) {
    int const place = visits(grid, group) == Visits::kFirst ? group : group - grid.kv_tiles();
    return cta_rank > 0 ? -1 : grid.kv_tiles() - 1 - place;
  }
  DASH_HOST_DEVICE static constexpr Range steps(TileGrid const& grid, int kv, Visits visits) {
    int const begin = first_visited(grid, kv), before_end = grid.query_tiles() - begin;
    return visits == Visits::kAll ? Range{0, grid.query_tiles()}
                                  : visits == Visits::kFirst ? Range{0, before_end} : Range{before_end, begin};
  }
  DASH_HOST_DEVICE static constexpr int visit(TileGrid const& grid, int kv, int step) {
    int const query_tile = first_visited(grid, kv) + step;
    return query_tile < grid.query_tiles() ? query_tile : query_tile - grid.query_tiles();
  }
  DASH_HOST_DEVICE static constexpr int rank(TileGrid const& grid, int kv, int query_tile) {
    int const distance = last_begun(grid, query_tile) - kv;
    return distance < 0 ? distance + grid.kv_tiles() : distance;
  }

  // The query tile at which a KV tile begins. Beginnings are spread evenly over the query tiles, the first one at the
  // first.
  DASH_HOST_DEVICE static constexpr int first_visited(TileGrid const& grid, int kv) {
    return static_cast<int>(uint32_t(kv) * uint32_t(grid.query_tiles()) / uint32_t(grid.kv_tiles()));
  }
  // The last KV tile that has begun at a query tile or before it: the inverse of first_visited.
  DASH_HOST_DEVICE static constexpr int last_begun(TileGrid const& grid, int query_tile) {
    uint32_t const end = uint32_t(query_tile + 1) * uint32_t(grid.kv_tiles());
    return static_cast<int>((end - 1) / uint32_t(grid.query_tiles()));
  }
};

// For the causal mask. The groups of the first half of the KV tiles visit the rectangle of query tiles that every
// member sees, rotated, in blocks from the end downwards, and then the triangle before it, upwards. The groups of the
// second half visit query tiles downwards, as in the descending order, with tiles mirrored within the cluster so that
// the CTA with the longest tile of the first half has the shortest of the second. With cta_group = n/2 and square tiles
// this is the published schedule.
template <>
struct Order<Policy::kSymmetricShift> : Undivided {
  static constexpr int kCtaGroup = 2;
  static constexpr bool kHeadsTogether = true, kFollowsRanges = false;

  // The number of KV tiles in the first half. No group straddles the middle.
  DASH_HOST_DEVICE static constexpr int half(TileGrid const& grid) { return (grid.kv_tiles() + 1) / 2; }

  DASH_HOST_DEVICE static constexpr int groups(TileGrid const& grid) {
    int const h = half(grid);
    return ceil_div(h, grid.tiling.cta_group) + ceil_div(grid.kv_tiles() - h, grid.tiling.cta_group);
  }

  DASH_HOST_DEVICE static constexpr int kv_tile(TileGrid const& grid, int group, int cta_rank) {
    int const h = half(grid);
    int const first_half_groups = ceil_div(h, grid.tiling.cta_group);
    if (group < first_half_groups) {
      int const kv = group * grid.tiling.cta_group + cta_rank;
      return kv < h ? kv : -1;
    }
    int const start = h + (group - first_half_groups) * grid.tiling.cta_group;
    int const kv = min_int(start + grid.tiling.cta_group, grid.kv_tiles()) - 1 - cta_rank;
    return kv >= start ? kv : -1;
  }

  DASH_HOST_DEVICE static constexpr int visit(TileGrid const& grid, int kv, int step) {
    if (kv >= half(grid)) return grid.query_tiles() - 1 - step;
    FirstHalfGroup const g = first_half_group(grid, kv);
    return step < g.rectangle.length ? g.rectangle_start + g.rectangle.visit_downwards(kv - g.start, step)
                                     : grid.query_tiles_of(kv).first + step - g.rectangle.length;
  }

  DASH_HOST_DEVICE static constexpr int rank(TileGrid const& grid, int kv, int query_tile) {
    if (kv >= half(grid)) return kv;
    FirstHalfGroup const g = first_half_group(grid, kv);
    int const l = kv - g.start;
    if (query_tile >= g.rectangle_start) return g.start + g.rectangle.rank(l, query_tile - g.rectangle_start);
    // Members reach a tile of the triangle last first, and only those before the diagonal reach it at all.
    return grid.kv_tiles_of(query_tile).end() - 1 - l;
  }

  struct FirstHalfGroup {
    int start;            // its first KV tile
    int rectangle_start;  // the first query tile that its last KV tile sees
    Rotation rectangle;
  };

  DASH_HOST_DEVICE static constexpr FirstHalfGroup first_half_group(TileGrid const& grid, int kv) {
    int const start = kv - kv % grid.tiling.cta_group;
    int const members = min_int(grid.tiling.cta_group, half(grid) - start);
    int const rectangle_start = grid.query_tiles_of(start + members - 1).first;
    return {start, rectangle_start, {grid.query_tiles() - rectangle_start, members}};
  }
};

}  // namespace dash_attn
