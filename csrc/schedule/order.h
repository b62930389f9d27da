// The orders: for each policy, which KV tiles a group takes, in which order a KV tile visits its query tiles, and the
// rank of each (KV tile, query tile) in the sum of dQ. Decided here and nowhere else.
//
// Determinism contract: visit and rank are functions of (seqlen_q, seqlen_k, tile sizes, mask, policy, cta_group)
// alone. Not of the batch, the heads, the number of SMs or who runs what, when.
//
// Forward-progress contract: the groups of a head are taken in the order of their numbers, and every tile of lower rank
// at a query tile belongs to an earlier group, or to the same group and, on the clock of steps that all its CTAs share,
// to a step that is not later. So a wait for the previous rank can never close a cycle: docs/schedules.md. Of divided
// KV tiles that are worked on whole, backward/whole_tiles.h says it.
//
// A work tile also walks the query heads of its split of the KV head, in ascending order: next_step. That is part of
// both contracts. So is the sum of dK and dV over the splits, for which the end of a work tile waits for the same KV
// tile's work tile of the split before: taken earlier (work_tile.h). How many splits there are is decided in splits.h.
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
//   kHeadsTogether             whether all query heads of a work tile take a step before any takes the next, but for
//                              windows (heads_together)
template <Policy P>
struct Order;

// Of a KV tile: all its visits, or, where it is divided, the first ones, of all query heads, or the ones after them.
// Who works on both parts goes from the one to the other: no sum is made otherwise than by two work tiles.
enum class Visits : int { kAll, kFirst, kSecond };
inline constexpr const char* kVisitsNames[] = {"all", "first", "second"};

// Where a work tile is: the step of query head `head` of those that it walks.
struct WorkStep {
  int step, head;  // head: of the split's
};

// One head after the other makes a KV tile with few steps, as the causal mask leaves some, wait at each head for those
// with many. All heads together do not, where all KV tiles start at the same query tile. Where they start at their own,
// it only lengthens the wait for the first. Under a window they do, and have as many steps; there two neighbours come
// to a query tile one after the other, and all that is read and added in between should stay in L2: of one head only.
template <Policy P>
DASH_HOST_DEVICE constexpr bool heads_together(MaskKind mask) {
  return Order<P>::kHeadsTogether && mask != MaskKind::kWindow;
}

DASH_HOST_DEVICE constexpr WorkStep next_step(bool heads_together, WorkStep at, int heads, int steps_of_head) {
  if (heads_together) return at.head + 1 < heads ? WorkStep{at.step, at.head + 1} : WorkStep{at.step + 1, 0};
  return at.step + 1 < steps_of_head ? WorkStep{at.step + 1, at.head} : WorkStep{0, at.head + 1};
}

// The same where KV tiles are divided: from the last head's first part to the second part of the first head.
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

// Of a sequence whose KV tiles are divided, each way, so that a product of both has 32 bits: the loader has no
// registers for a division of 64.
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

// Partials of dQ added in ascending KV.
struct AscendingRanks {
  DASH_HOST_DEVICE static constexpr int rank(TileGrid const& grid, int kv, int query_tile) {
    return kv - grid.kv_tiles_of(query_tile).first;
  }
};

// q upwards from the first live tile.
template <>
struct Order<Policy::kAscending> : AscendingGroups, AscendingRanks {
  static constexpr int kCtaGroup = 1;
  static constexpr bool kHeadsTogether = false;

  DASH_HOST_DEVICE static constexpr int visit(TileGrid const& grid, int kv, int step) {
    return grid.query_tiles_of(kv).first + step;
  }
};

// q downwards from the last live tile: under the causal mask all KV tiles start at the same one, none waits for the
// diagonal of a longer one (DASH, arXiv 2601.21824). The paper mirrors every second head onto the SMs; a counter of
// work tiles does as much by itself, since the SM that had the shortest tile is the first to come for the next head's
// longest.
template <>
struct Order<Policy::kDescending> : AscendingGroups, AscendingRanks {
  static constexpr int kCtaGroup = 1;
  static constexpr bool kHeadsTogether = true;

  DASH_HOST_DEVICE static constexpr int visit(TileGrid const& grid, int kv, int step) {
    return grid.query_tiles_of(kv).end() - 1 - step;
  }
};

// Partials wait for that of rank 0 alone, and heads whose inputs leave order-free accumulation too little room are
// added by all ranks: descending's, whose tiles of all heads come longest first.
template <>
struct Order<Policy::kOrderFree> : Order<Policy::kDescending> {};

template <>
struct Order<Policy::kAtomic> : Order<Policy::kDescending> {};

// Shortest first: KV tiles are taken last to first and added in that order, q upwards from the first live tile.
template <>
struct Order<Policy::kSpt> : Undivided {
  static constexpr int kCtaGroup = 1;
  static constexpr bool kHeadsTogether = false;

  DASH_HOST_DEVICE static constexpr int groups(TileGrid const& grid) { return AscendingGroups::groups(grid); }
  DASH_HOST_DEVICE static constexpr int kv_tile(TileGrid const& grid, int group, int cta_rank) {
    return max_int(-1, grid.kv_tiles() - 1 - (group * grid.tiling.cta_group + cta_rank));
  }
  DASH_HOST_DEVICE static constexpr int visit(TileGrid const& grid, int kv, int step) {
    return grid.query_tiles_of(kv).first + step;
  }
  DASH_HOST_DEVICE static constexpr int rank(TileGrid const& grid, int kv, int query_tile) {
    return grid.kv_tiles_of(query_tile).end() - 1 - kv;
  }
};

// Full mask. The paper's shift: a KV tile begins at its own query tile, goes on to the last one and then from the
// first: with as many of both, q = (kv + step) mod n. The KV tiles that have begun at a query tile or before add there
// first, the nearest one first; then the others. As one work tile each would wait for the next in a circle. So the
// visits are divided where they go on from the first query tile: the first parts are taken from the last KV tile to the
// first, then the second parts, and every wait points back.
template <>
struct Order<Policy::kShift> {
  static constexpr int kCtaGroup = 1;
  static constexpr bool kHeadsTogether = false;
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

  // Where a KV tile begins: spread evenly over the query tiles, the first one at the first.
  DASH_HOST_DEVICE static constexpr int first_visited(TileGrid const& grid, int kv) {
    return static_cast<int>(uint32_t(kv) * uint32_t(grid.query_tiles()) / uint32_t(grid.kv_tiles()));
  }
  // The last KV tile that has begun at a query tile or before: its inverse.
  DASH_HOST_DEVICE static constexpr int last_begun(TileGrid const& grid, int query_tile) {
    uint32_t const end = uint32_t(query_tile + 1) * uint32_t(grid.kv_tiles());
    return static_cast<int>((end - 1) / uint32_t(grid.query_tiles()));
  }
};

// Causal mask. The first half of the KV tiles, in groups: the rectangle of query tiles that every member sees, rotated,
// blocks from the end of q downwards; then the triangle before it, upwards. The second half, in groups: q downwards,
// as in the descending order, the tiles mirrored within the cluster so that the CTA with the longest tile
// of the first half has the shortest of the second. With cta_group = n/2 and square tiles it is the published schedule.
template <>
struct Order<Policy::kSymmetricShift> : Undivided {
  static constexpr int kCtaGroup = 2;
  static constexpr bool kHeadsTogether = true;

  // KV tiles of the first half; no group straddles it.
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
    int rectangle_start;  // first query tile that its last KV tile sees
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
