// Random masks by key columns: what csrc/contract/columns.h says of tiles and of their parts, against every element.
// Prints what is wrong.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "placement/columns.h"
#include "placement/work_tile.h"

using namespace dash_attn;

namespace {

std::mt19937 random_numbers(5);
int below(int end) { return int(random_numbers() % unsigned(end)); }

[[noreturn]] void fail(const char* what, const TileGrid& grid, int query_tile, int kv) {
  const Sequence& s = grid.mask.sequence;
  std::printf("%s: query tile %d, KV tile %d of %d x %d, tiles of %d x %d\n", what, query_tile, kv, s.seqlen_q,
              s.seqlen_k, grid.tiling.query, grid.tiling.key);
  std::exit(1);
}

// The meaning of FlashMask's numbers, element by element.
bool is_hidden(const std::vector<int>& bounds, bool causal, int query) {
  const auto within = [&](int first, int end) { return first <= query && query < end; };
  switch (bounds.size()) {
    case 1:
      return query >= bounds[0];
    case 2:
      return causal ? within(bounds[0], bounds[1]) : query >= bounds[0] || query < bounds[1];
    default:
      return within(bounds[0], bounds[1]) || within(bounds[2], bounds[3]);
  }
}

// The tiles of the forward and their parts, which are in no two tiles. `hidden`: what the keys of each KV tile hide.
void check_parts(const TileGrid& grid, const std::vector<HiddenByTile>& hidden,
                 const std::vector<HiddenQueries>& of_keys) {
  const Sequence& s = grid.mask.sequence;
  int next_query = 0;
  for (int q = 0; q < grid.query_tiles(); ++q) {
    const QueryInterval of_tile = queries_of_tile(Pass::kForward, q, grid.tiling.query, s.seqlen_q);
    if (of_tile.first != next_query || of_tile.first % kPartRows != 0) { fail("a tile's first query", grid, q, 0); }
    next_query = of_tile.end;
    for (int part = 0; part < kMostParts; ++part) {
      const TilePart of_part = TilePart::of(grid, of_tile, part);
      const QueryInterval queries = of_part.queries;
      if (queries.first >= queries.end) { continue; }
      for (int kv = 0; kv < grid.kv_tiles(); ++kv) {
        const int first_key = kv * grid.tiling.key, end_key = min_int(first_key + grid.tiling.key, s.seqlen_k);
        bool shows = false, hides = false, rest_shows = false, hides_all[kHiddenIntervals] = {true, true};
        for (int query = queries.first; query < queries.end; ++query) {
          for (int key = first_key; key < end_key; ++key) {
            const bool rest = grid.mask.keys_of(query).contains(key);
            rest_shows |= rest;
            shows |= rest && !of_keys[key].contains(query);
            hides |= of_keys[key].contains(query);
            for (int i = 0; i < kHiddenIntervals; ++i) { hides_all[i] &= of_keys[key].of[i].contains(query); }
          }
        }
        const bool is_live = of_part.sees(kv, hidden[kv]);
        if (shows && !is_live) { fail("a tile with visible elements is skipped by a part", grid, q, kv); }
        if (is_live && (!rest_shows || hides_all[0] || hides_all[1])) {
          fail("a tile without visible elements is walked by a part", grid, q, kv);
        }
        if (is_live && hidden[kv].hides_all(of_tile)) {
          fail("a tile that is not live is live for a part", grid, q, kv);
        }
        if (hides && !hidden[kv].hides_any(queries)) { fail("a tile is not masked for a part", grid, q, kv); }
      }
    }
  }
  if (next_query != s.seqlen_q) { fail("the last tile's end", grid, next_query, 0); }
}

void check(const TileGrid& grid, const std::vector<std::vector<int>>& bounds, bool causal) {
  const Sequence& s = grid.mask.sequence;
  std::vector<HiddenByTile> of_tiles;
  std::vector<HiddenQueries> of_keys;
  for (int kv = 0; kv < grid.kv_tiles(); ++kv) {
    const int first_key = kv * grid.tiling.key, end_key = min_int(first_key + grid.tiling.key, s.seqlen_k);
    HiddenByTile hidden = HiddenByTile::of_no_keys();
    for (int key = first_key; key < end_key; ++key) {
      const HiddenQueries of_key = hidden_queries(bounds[key].data(), int(bounds[key].size()), causal, s.seqlen_q);
      const HiddenQueries from_9 = of_key.counted_from(9);
      for (int query = 0; query < s.seqlen_q; ++query) {
        const bool expected = is_hidden(bounds[key], causal, query);
        if (of_key.contains(query) != expected) { fail("an element", grid, query, key); }
        if (from_9.contains(query - 9) != expected) { fail("an element counted from a query", grid, query, key); }
      }
      hidden = hidden.with(HiddenByTile::of_key(of_key));
      of_keys.push_back(of_key);
    }
    of_tiles.push_back(hidden);
    const ColumnTile tile = column_tile(grid, kv, hidden);
    const Range visited = grid.query_tiles_of(kv);
    std::vector<int> live;
    for (int q = visited.end() - 1; q >= visited.first; --q) {
      bool shows = false, hides = false, interval_hides_all[kHiddenIntervals] = {true, true};
      const int end_query = min_int((q + 1) * grid.tiling.query, s.seqlen_q);
      for (int query = q * grid.tiling.query; query < end_query; ++query) {
        for (int key = first_key; key < end_key; ++key) {
          const HiddenQueries of_key = hidden_queries(bounds[key].data(), int(bounds[key].size()), causal, s.seqlen_q);
          const bool is_seen = !of_key.contains(query) && grid.mask.keys_of(query).contains(key);
          shows |= is_seen;
          hides |= !is_seen;
          for (int i = 0; i < kHiddenIntervals; ++i) { interval_hides_all[i] &= of_key.of[i].contains(query); }
        }
      }
      const bool skips = tile.visits.skips(q);
      if (skips && shows) { fail("a tile with visible elements is skipped", grid, q, kv); }
      if (!skips && (interval_hides_all[0] || interval_hides_all[1])) {
        fail("a tile that an interval hides is not skipped", grid, q, kv);
      }
      const QueryInterval queries = queries_of_tile(Pass::kBackward, q, grid.tiling.query, s.seqlen_q);
      if (!skips && hides && !needs_masking(grid, q, kv, queries, hidden)) {
        fail("a tile is not masked", grid, q, kv);
      }
      if (!skips) { live.push_back(q); }
      if (tile.hidden.hides_all(queries) != skips) { fail("the plans of visits and of sums differ", grid, q, kv); }
    }
    if (tile.visits.count != int(live.size())) { fail("the count of visits", grid, tile.visits.count, kv); }
    if (live.empty()) { continue; }
    if (tile.visits.last != live.front()) { fail("the last visit", grid, live.front(), kv); }
    if (tile.visits.first != live.back()) { fail("the first visit", grid, live.back(), kv); }
    for (size_t i = 1; i < live.size(); ++i) {
      if (tile.visits.last_before(live[i - 1]) != live[i]) { fail("the order of visits", grid, live[i], kv); }
    }
  }
  if (grid.tiling.query % kPartRows == 0 && grid.tiling.query <= kMostParts * kPartRows) {
    check_parts(grid, of_tiles, of_keys);
  }
}

// Every work tile has one number, and all that it may wait for have lower numbers.
void check_places(int kv_tiles, int long_tiles) {
  const TileGrid grid{{1, 1, 1}, mask_of(mask_rule(true, -1, -1, 0), {kv_tiles, kv_tiles})};
  TileScheduler s{};
  s.policy = Policy::kDescending;
  s.sequence = grid.mask.sequence;
  s.batch = 1;
  s.kv_heads = 1 + below(5);
  s.splits = 1 + below(3);
  s.group_size = s.splits;
  s.head_swizzle = 1 + below(6);
  const int heads = s.kv_heads, all = heads * s.splits;
  std::vector<int> next(all);  // KV tile of a head and split
  for (int number = 0; number < all * kv_tiles; ++number) {
    const WorkPlace place = s.place_long_tiles_first(grid, number, long_tiles);
    if (long_tiles == 0) {
      const WorkPlace plain = s.place<Policy::kDescending>(grid, number, 0);
      if (plain.kv_tile != place.kv_tile || plain.kv_head != place.kv_head || plain.split != place.split) {
        fail("the place without long tiles", grid, number, place.kv_tile);
      }
    }
    int& of_head = next[place.split * heads + place.kv_head];
    if (place.kv_tile != of_head++) { fail("a work tile before one that it waits for", grid, number, place.kv_tile); }
    if (place.split > 0 && next[(place.split - 1) * heads + place.kv_head] < of_head) {
      fail("a split before the one that it waits for", grid, number, place.kv_tile);
    }
    if ((number < all * long_tiles) != (place.kv_tile < long_tiles)) {
      fail("a long tile comes late", grid, number, place.kv_tile);
    }
  }
}

}  // namespace

int main() {
  constexpr Tiling kTilings[] = {{128, 128, 1}, {64, 80, 1}, {192, 80, 1}, {16, 16, 1}};
  for (int round = 0; round < 300; ++round) {
    const Tiling tiling = kTilings[round % 4];
    const int seqlen_q = 1 + below(500), seqlen_k = below(2) ? seqlen_q : 1 + below(500);
    const bool causal = below(2) != 0;
    const MaskRule rule = mask_rule(causal, below(3) ? -1 : below(200), causal || below(3) ? -1 : below(200),
                                    below(4) ? 0 : 1 + below(300));
    const TileGrid grid{tiling, {MaskKind::kColumns, rule.as_window(), {seqlen_q, seqlen_k}}};
    const int per_key = below(2) ? 2 : causal ? 1 : 4;
    const int run = 1 + below(150);  // keys in a row that say about the same
    std::vector<std::vector<int>> bounds;
    for (int key = 0; key < seqlen_k; ++key) {
      std::vector<int> numbers;
      for (int i = 0; i < per_key; ++i) {
        const int of_run = below(2 * seqlen_q) - seqlen_q / 2;
        numbers.push_back(key % run == 0 ? of_run : bounds[key - 1][i] + (below(8) == 0 ? below(7) - 3 : 0));
      }
      bounds.push_back(numbers);
    }
    check(grid, bounds, causal);
  }
  for (int round = 0; round < 300; ++round) {
    const int kv_tiles = 1 + below(9);
    check_places(kv_tiles, below(3) ? below(kv_tiles + 1) : 0);
  }
  std::puts("tiles agree with elements");
}
