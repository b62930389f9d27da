// One sequence under a mask, cut into tiles: all that an order of sums may look at. Where the sequence's data lies, how
// many others there are and what the GPU is are not in here.
#pragma once

#include <type_traits>

#include "../host_device.h"
#include "mask.h"

namespace dash_attn {

// Constants of a kernel.
struct Tiling {
  int query;      // queries in a tile
  int key;        // keys in a tile
  int cta_group;  // C: CTAs of a cluster, each taking one KV tile of a group
};

struct TileGrid {
  Tiling tiling;
  Mask mask;

  DASH_HOST_DEVICE constexpr int query_tiles() const { return ceil_div(mask.sequence.seqlen_q, tiling.query); }
  DASH_HOST_DEVICE constexpr int kv_tiles() const { return ceil_div(mask.sequence.seqlen_k, tiling.key); }

  // Query tiles with a row that sees a key of KV tile `kv`: those it visits. None is legal.
  DASH_HOST_DEVICE constexpr Range query_tiles_of(int kv) const {
    int const last_key = min_int((kv + 1) * tiling.key, mask.sequence.seqlen_k) - 1;
    return tiles_between(mask.queries_of(kv * tiling.key).first, mask.queries_of(last_key).end(), tiling.query);
  }

  // KV tiles with a key that a row of query tile `q` sees: those whose partials its dQ sums. None is legal.
  DASH_HOST_DEVICE constexpr Range kv_tiles_of(int q) const {
    return kv_tiles_of_queries(q * tiling.query, (q + 1) * tiling.query);
  }

  // The same for the queries first ... end - 1, of which the first exists.
  DASH_HOST_DEVICE constexpr Range kv_tiles_of_queries(int first, int end) const {
    int const last = min_int(end, mask.sequence.seqlen_q) - 1;
    return tiles_between(mask.keys_of(first).first, mask.keys_of(last).end(), tiling.key);
  }

  // Of those, the tiles of which every one of the queries sees every key. Where there is none, the empty range may
  // begin before or behind them.
  DASH_HOST_DEVICE constexpr Range kv_tiles_seen_whole(int first, int end) const {
    int const last = min_int(end, mask.sequence.seqlen_q) - 1;
    return Range::between(ceil_div(mask.keys_of(last).first, tiling.key), mask.keys_of(first).end() / tiling.key);
  }

  // Whether elements of the tile must be masked one by one.
  DASH_HOST_DEVICE constexpr bool needs_masking(int q, int kv) const {
    return mask.hides_part_of({q * tiling.query, tiling.query}, {kv * tiling.key, tiling.key});
  }

 private:
  // Tiles of `size` rows that hold a row of first ... end - 1.
  DASH_HOST_DEVICE static constexpr Range tiles_between(int first, int end, int size) {
    return end <= first ? Range{first / size, 0} : Range::between(first / size, ceil_div(end, size));
  }
};

static_assert(std::is_trivially_copyable_v<TileGrid> && std::is_standard_layout_v<TileGrid>);

}  // namespace dash_attn
