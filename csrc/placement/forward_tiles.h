// Which query tile of the forward is worked on when, and by whom. This affects speed alone: whoever computes a row
// walks its keys in an order that does not depend on tiles or CTAs. Plain C++: no CUDA or torch.
#pragma once

#include <cstdint>

#include "../contract/mask.h"
#include "../contract/tile_grid.h"
#include "../contract/tile_shapes.h"
#include "../host_device.h"
#include "sequences.h"

namespace dash_attn::forward {

struct QueryTile {
  int index;  // among the tiles of its head group
  int head_group;
  int batch;
};

// Rows of a query tile are (position, head of the group), heads fastest. If sequences are short, the query heads of a
// KV head are packed into a tile; otherwise a group is one head. The last tile ends where the queries end, and the
// first one may be short, so that under the causal mask the rows left empty are those with the fewest keys. CTAs work
// through a list of tiles, head by head, so that the K and V in use stay in L2 and that at any time some CTAs read much
// while others write much. If tiles differ in length, CTAs take the next tile when they are ready for it, and the tiles
// of the last heads are listed together, the longest first, so that little work is left at the end.
// Where fixes_rows_of_tiles (contract/mask.h) says so, heads are not packed and tiles begin at the first query.
struct QueryTileScheduler {
  Sequence sequence;   // of a dense batch; for a pack see `of`; in a step without a plan only the queries
  int tile_positions;  // of a query tile
  int query_tiles;     // of a head group
  int batch;
  int group_shift;        // log2 of the heads in a group
  Divisor groups_per_kv;  // head groups that share a KV head
  Divisor head_groups;    // in a sequence
  bool first_is_short;    // of a head group's query tiles, the first one may be short; else the last
  bool longest_first;     // a head's longest tile comes first; else that of its first query
  int last_groups;        // with longest_first: (batch, head group) pairs whose tiles are listed together
  int num_tiles;
  bool takes_tiles;  // after their first tile, CTAs take tiles from a counter; else every CTA has a fixed share

  // The list of one sequence of a pack.
  DASH_HOST_DEVICE constexpr QueryTileScheduler of(PackedSequence const& s) const {
    QueryTileScheduler alone = *this;
    alone.sequence = s.lengths;
    alone.query_tiles = ceil_div(s.lengths.seqlen_q, tile_positions);
    alone.batch = 1;
    alone.last_groups = s.last_heads;
    return alone;
  }

  // Taking tiles costs a counter and its clearing. If all tiles are equally long it pays only if they are few and one
  // of them is short, which a fixed share does not compensate for.
  constexpr bool taking_pays() const {
    return longest_first || (query_tiles < 32 && sequence.seqlen_q % tile_positions != 0);
  }

  DASH_HOST_DEVICE constexpr QueryTile tile(int place) const {
    if (!longest_first) return make_tile(place % query_tiles, place / query_tiles);
    int const groups_before_last = batch * head_groups - last_groups;
    int const within_last = place - groups_before_last * query_tiles;
    if (within_last < 0) return make_tile(query_tiles - 1 - place % query_tiles, place / query_tiles);
    return make_tile(query_tiles - 1 - within_last / last_groups, groups_before_last + within_last % last_groups);
  }

  DASH_HOST_DEVICE constexpr int positions_in(int rows) const { return rows >> group_shift; }
  // The first position of the tile that ends at `end`.
  DASH_HOST_DEVICE constexpr int first_position(int end) const { return max_int(0, end - tile_positions); }
  // The position at which the next tile begins, or would begin.
  DASH_HOST_DEVICE constexpr int end_position(int index) const {
    return first_is_short ? sequence.seqlen_q - (query_tiles - 1 - index) * tile_positions
                          : (index + 1) * tile_positions;
  }

  DASH_HOST_DEVICE constexpr int kv_head(int head_group) const { return head_group / groups_per_kv; }

 private:
  DASH_HOST_DEVICE constexpr QueryTile make_tile(int index, int batch_group) const {
    return {index, batch_group % head_groups, batch_group / head_groups};
  }
};

// log2 of the query heads that are packed into a tile of `tile_rows`: all heads of a KV head, if that leaves fewer rows
// empty. TMA gathers at most `most` heads, and their number must be a power of two.
constexpr int packed_heads_shift(int group_size, int seqlen_q, int tile_rows, int most) {
  if (group_size > most || (group_size & (group_size - 1)) != 0) return 0;
  int64_t const packed = (int64_t{seqlen_q} * group_size + tile_rows - 1) / tile_rows;
  if (packed >= int64_t{group_size} * ceil_div(seqlen_q, tile_rows)) return 0;
  int shift = 0;
  while (1 << shift < group_size) ++shift;
  return shift;
}

// The number of head groups, at least one, whose K and V fit in L2 together. No more are listed together; for a
// sequence of a pack exactly this many are.
DASH_HOST_DEVICE constexpr int groups_within_l2(int seqlen_k, HeadDims dims, int groups_per_kv, int64_t groups) {
  constexpr int kElementBytes = 2, kBytes = 32 << 20;
  int64_t const kv_bytes_of_head = int64_t{max_int(1, seqlen_k)} * dims.sum() * kElementBytes;
  int64_t const fit = (kBytes < kv_bytes_of_head ? 1 : kBytes / kv_bytes_of_head) * groups_per_kv;
  return static_cast<int>(fit < groups ? fit : groups);
}

inline constexpr int kMostPackedHeads = 64;  // as many as TMA gathers in a box of the rows of one warpgroup

// A dense batch. For packs see pack_needs.h.
struct ForwardProblem {
  Mask mask;
  int batch, heads, kv_heads;
  HeadDims head_dims;
  int ctas;  // at most
  bool drops;
  bool has_equal_lengths = true;  // all sequences have as many queries, in a pack presumably
};

constexpr int64_t num_tiles(QueryTileScheduler const& s) { return int64_t{s.batch} * s.head_groups * s.query_tiles; }

// How long a tile of one, two or three warpgroups' rows takes, in thousandths of the last, measured at head_dim 128;
// and the number of KV tiles that the rest of a query tile's work counts for, which fits the measurements best.
inline constexpr int kCostOfWarpgroups[] = {527, 755, 1000};
inline constexpr int kWarpgroupRowsOfTile = 64, kStepsBesideKeys = 2;

// Estimates how long CTAs take for the tiles of `s` under the mask of `p`, in thousandths of a KV tile.
constexpr int64_t estimated_time(ForwardProblem const& p, QueryTileScheduler const& s, int keys_of_tile) {
  TileGrid const grid{{s.tile_positions, keys_of_tile, 1}, p.mask};
  int64_t of_head = 0, longest = 0;
  int longest_tiles = 0;
  for (int i = 0; i < s.query_tiles; ++i) {
    int const end = s.end_position(i), first = s.first_position(end);
    int const warpgroups = ceil_div(end - first, s.positions_in(kWarpgroupRowsOfTile));
    int64_t const steps = kStepsBesideKeys + grid.kv_tiles_of_queries(first, end).count;
    int64_t const time = steps * kCostOfWarpgroups[warpgroups - 1];
    of_head += time;
    if (time > longest) longest_tiles = 0;
    longest = longest > time ? longest : time;
    longest_tiles += time == longest;
  }
  int64_t const heads = int64_t{s.batch} * s.head_groups, share = heads * of_head / p.ctas;
  if (s.longest_first) return share > longest ? share : longest;
  // Either the shorter tiles fit beside the last round of the longest, or CTAs end anywhere within a tile.
  int64_t const rounds = (heads * longest_tiles + p.ctas - 1) / p.ctas * longest;
  return share <= rounds ? rounds : share + longest / 2;
}

// Gives `s` tiles of so many rows.
constexpr void cut_into_tiles(QueryTileScheduler& s, int rows) {
  s.tile_positions = s.positions_in(rows);
  s.query_tiles = ceil_div(s.sequence.seqlen_q, s.tile_positions);
}

// Gives `s` tiles of the rows of all three warpgroups, or of fewer if that would leave CTAs idle or unevenly loaded, or
// if sequences have no more rows. Two-consumer kernels always use both warpgroups.
constexpr void cut_into_tiles(ForwardProblem const& p, TileShape const& tile, QueryTileScheduler& s) {
  constexpr int kMostWarpgroups = sizeof(kCostOfWarpgroups) / sizeof(int);
  // If each CTA has this many tiles, one more or less matters little; and the host would take long to examine heads
  // with this many tiles.
  constexpr int kManyTilesOfCta = 16, kManyTilesOfHead = 256;
  auto const cut = [](QueryTileScheduler whole, int rows) {
    cut_into_tiles(whole, rows);
    return whole;
  };
  s = cut(s, tile.query);
  // A warpgroup may walk KV tiles for other rows of its query tile, so which rows share one must follow from the
  // sequence.
  if (p.mask.kind == MaskKind::kColumns) return;
  if (tile.query != kMostWarpgroups * kWarpgroupRowsOfTile) return;
  if (p.has_equal_lengths && s.sequence.seqlen_q <= s.positions_in(kWarpgroupRowsOfTile)) {
    s = cut(s, kWarpgroupRowsOfTile);
    return;
  }
  if (num_tiles(s) >= int64_t{kManyTilesOfCta} * p.ctas || s.query_tiles >= kManyTilesOfHead) return;
  int64_t shortest = estimated_time(p, s, tile.key);
  for (int rows = tile.query - kWarpgroupRowsOfTile; rows > 0; rows -= kWarpgroupRowsOfTile) {
    QueryTileScheduler const finer = cut(s, rows);
    int64_t const time = estimated_time(p, finer, tile.key);
    if (time < shortest) {
      shortest = time;
      s = finer;
    }
  }
}

// About how many of a CTA's tiles belong to those that are listed together. 1, 2 and 3 were measured.
inline constexpr int kLastTilesOfCta = 2;

// num_tiles(scheduler) must fit in an int.
constexpr QueryTileScheduler make_scheduler(ForwardProblem const& p) {
  TileShape const tile = forward_tile_shape(padded_head_dims(p.head_dims.qk, p.head_dims.v));
  QueryTileScheduler s{};
  s.sequence = p.mask.sequence;
  s.batch = p.batch;
  int const group_size = p.heads / p.kv_heads;
  bool const from_first_query = fixes_rows_of_tiles(p.mask.kind, p.drops);
  s.first_is_short = !from_first_query;
  s.group_shift =
      from_first_query ? 0 : packed_heads_shift(group_size, s.sequence.seqlen_q, tile.query, kMostPackedHeads);
  int const packed = 1 << s.group_shift;
  s.groups_per_kv = Divisor(group_size / packed);
  s.head_groups = Divisor(p.heads / packed);
  s.longest_first = p.mask.kind != MaskKind::kFull;
  cut_into_tiles(p, tile, s);
  int64_t const tiles = num_tiles(s);
  s.num_tiles = static_cast<int>(tiles);
  int const ctas = tiles < p.ctas ? s.num_tiles : p.ctas;
  int64_t const enough = (int64_t{kLastTilesOfCta} * ctas + s.query_tiles - 1) / s.query_tiles;
  int const fit = groups_within_l2(s.sequence.seqlen_k, tile.head_dims, s.groups_per_kv,
                                   int64_t{s.batch} * s.head_groups);
  s.last_groups = enough < fit ? static_cast<int>(enough) : fit;
  s.takes_tiles = s.num_tiles > ctas && s.taking_pays();
  return s;
}

}  // namespace dash_attn::forward
