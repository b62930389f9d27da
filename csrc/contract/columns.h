// Masks by key columns: each key names up to two intervals of queries that do not see it, as in FlashMask (arXiv
// 2410.01359). They hide keys that the rest of the mask shows. This file decides which tiles are live under such a mask
// and which elements of a tile are hidden.
//
// A tile that is not live contributes nothing, and the others keep their order, so no bit depends on which tiles are
// skipped. But the forward, the backward and the count of partials of dQ must agree on them, or a rank never comes.
#pragma once

#include <type_traits>

#include "../host_device.h"
#include "mask.h"
#include "tile_grid.h"

namespace dash_attn {

// Queries first ... end - 1. An empty one is kEmpty, so that extremes over several intervals may ignore it.
struct QueryInterval {
  int first, end;

  DASH_HOST_DEVICE static constexpr QueryInterval between(int first, int end) {
    return first < end ? QueryInterval{first, end} : QueryInterval{kUnbounded, 0};
  }
  DASH_HOST_DEVICE constexpr bool contains(int query) const { return first <= query && query < end; }
  DASH_HOST_DEVICE constexpr bool contains(QueryInterval const& other) const {
    return first <= other.first && other.end <= end;
  }
  DASH_HOST_DEVICE constexpr bool overlaps(QueryInterval const& other) const {
    return first < other.end && other.first < end;
  }
};

inline constexpr int kHiddenIntervals = 2;

// The queries that do not see a key.
struct alignas(16) HiddenQueries {
  QueryInterval of[kHiddenIntervals];

  DASH_HOST_DEVICE constexpr bool contains(int query) const { return of[0].contains(query) || of[1].contains(query); }
  // The same, with queries counted from `query` on.
  DASH_HOST_DEVICE constexpr HiddenQueries counted_from(int query) const {
    return {{{of[0].first - query, of[0].end - query}, {of[1].first - query, of[1].end - query}}};
  }
};

// FlashMask's startend_row_indices of a key: `per_key` bounds, to which the flag `causal` gives their meaning. Without
// bounds, a key hides no query.
DASH_HOST_DEVICE constexpr HiddenQueries hidden_queries(const int* bounds, int per_key, bool causal, int seqlen_q) {
  const auto interval = [=](int first, int end) {
    return QueryInterval::between(max_int(0, first), min_int(end, seqlen_q));
  };
  if (per_key == 0) return {{interval(0, 0), interval(0, 0)}};
  if (per_key == 1) return {{interval(bounds[0], seqlen_q), interval(0, 0)}};
  if (per_key == 4) return {{interval(bounds[0], bounds[1]), interval(bounds[2], bounds[3])}};
  if (causal) return {{interval(bounds[0], bounds[1]), interval(0, 0)}};
  return {{interval(bounds[0], seqlen_q), interval(0, bounds[1])}};
}

// What the keys of a tile hide: with each of its two intervals, queries that every key hides, and a range of queries
// outside of which no key hides any.
struct HiddenByTile {
  QueryInterval all[kHiddenIntervals], some[kHiddenIntervals];

  DASH_HOST_DEVICE static constexpr HiddenByTile of_no_keys() {
    return {{{0, kUnbounded}, {0, kUnbounded}}, {{kUnbounded, 0}, {kUnbounded, 0}}};
  }
  DASH_HOST_DEVICE static constexpr HiddenByTile of_key(HiddenQueries const& key) {
    return {{key.of[0], key.of[1]}, {key.of[0], key.of[1]}};
  }
  // Whether an interval of every key contains all of these queries, which exist.
  DASH_HOST_DEVICE constexpr bool hides_all(QueryInterval const& queries) const {
    return all[0].contains(queries) || all[1].contains(queries);
  }
  // Whether an interval of some key may contain one of the queries.
  DASH_HOST_DEVICE constexpr bool hides_any(QueryInterval const& queries) const {
    return some[0].overlaps(queries) || some[1].overlaps(queries);
  }
  // Of the keys of both.
  DASH_HOST_DEVICE constexpr HiddenByTile with(HiddenByTile const& other) const {
    HiddenByTile both = *this;
    for (int i = 0; i < kHiddenIntervals; ++i) {
      both.all[i] = {max_int(all[i].first, other.all[i].first), min_int(all[i].end, other.all[i].end)};
      both.some[i] = {min_int(some[i].first, other.some[i].first), max_int(some[i].end, other.some[i].end)};
    }
    return both;
  }
};

// The visits of a KV tile: of the query tiles that it would visit without the columns, all but two runs. The runs are
// in ascending order and do not overlap; empty ones come last.
struct LiveVisits {
  Range skipped[kHiddenIntervals];
  int count, first, last;  // query tiles; if there are none, only `count` means anything

  DASH_HOST_DEVICE constexpr bool skips(int query_tile) const {
    return skipped[0].contains(query_tile) || skipped[1].contains(query_tile);
  }
  // The last live query tile before `query_tile`, if there is one.
  DASH_HOST_DEVICE constexpr int last_before(int query_tile) const {
    int last = query_tile - 1;
    if (skipped[1].contains(last)) last = skipped[1].first - 1;
    if (skipped[0].contains(last)) last = skipped[0].first - 1;
    return last;
  }
};

DASH_HOST_DEVICE constexpr LiveVisits live_visits(TileGrid const& grid, int kv, HiddenByTile const& hidden) {
  Range const visited = grid.query_tiles_of(kv);
  Range skipped[kHiddenIntervals] = {};
  for (int i = 0; i < kHiddenIntervals; ++i) {
    QueryInterval const all = hidden.all[i];
    int const first = ceil_div(min_int(all.first, grid.mask.sequence.seqlen_q), grid.tiling.query);
    int const end = all.end >= grid.mask.sequence.seqlen_q ? grid.query_tiles() : all.end / grid.tiling.query;
    skipped[i] = Range::between(max_int(first, visited.first), min_int(end, visited.end()));
  }
  // In ascending order.
  bool const swaps = skipped[1].count > 0 && (skipped[0].count == 0 || skipped[1].first < skipped[0].first);
  Range low = swaps ? skipped[1] : skipped[0], high = swaps ? skipped[0] : skipped[1];
  if (high.count > 0 && high.first < low.end()) {  // they overlap
    low = Range::between(low.first, max_int(low.end(), high.end()));
    high = {0, 0};
  }
  LiveVisits visits{{low, high}, visited.count - low.count - high.count, visited.first, 0};
  if (low.contains(visits.first)) visits.first = low.end();
  if (high.contains(visits.first)) visits.first = high.end();
  visits.last = visits.last_before(visited.end());
  return visits;
}

// A KV tile under the mask, as the plan of a pass knows it.
struct alignas(16) ColumnTile {
  LiveVisits visits;
  HiddenByTile hidden;
  int long_tiles;  // of the sequence's first tile: TileScheduler::place_long_tiles_first
};

// Whether elements of a live tile must be masked one by one. `queries`: those of the query tile.
DASH_HOST_DEVICE constexpr bool needs_masking(TileGrid const& grid, int query_tile, int kv,
                                              QueryInterval const& queries, HiddenByTile const& hidden) {
  return hidden.hides_any(queries) || grid.needs_masking(query_tile, kv);
}

DASH_HOST_DEVICE constexpr ColumnTile column_tile(TileGrid const& grid, int kv, HiddenByTile const& hidden) {
  return {live_visits(grid, kv, hidden), hidden, 0};
}

static_assert(std::is_trivially_copyable_v<ColumnTile> && sizeof(HiddenQueries) == 16 && sizeof(ColumnTile) == 64);

}  // namespace dash_attn
