// One sequence under a mask, cut into tiles: everything that an order of sums may depend on. It excludes the position
// of the sequence's data, the number of other sequences, and the GPU.
#pragma once

#include <type_traits>

#include "../host_device.h"
#include "mask.h"

namespace dash_attn {

// The tile sizes of a kernel.
struct Tiling {
  int query;      // queries in a tile
  int key;        // keys in a tile
  int cta_group;  // CTAs of a cluster, each of which takes one KV tile of a group
};

struct TileGrid {
  Tiling tiling;
  Mask mask;

  DASH_HOST_DEVICE constexpr int query_tiles() const { return ceil_div(mask.sequence.seqlen_q, tiling.query); }
  DASH_HOST_DEVICE constexpr int kv_tiles() const { return ceil_div(mask.sequence.seqlen_k, tiling.key); }

  // The query tiles that KV tile `kv` visits: those with a row that sees one of its keys. May be empty.
  DASH_HOST_DEVICE constexpr Range query_tiles_of(int kv) const {
    int const last_key = min_int((kv + 1) * tiling.key, mask.sequence.seqlen_k) - 1;
    return tiles_between(mask.queries_of(kv * tiling.key).first, mask.queries_of(last_key).end(), tiling.query);
  }

  // The KV tiles whose partials dQ of query tile `q` sums: those with a key that one of its rows sees. May be empty.
  DASH_HOST_DEVICE constexpr Range kv_tiles_of(int q) const {
    return kv_tiles_of_queries(q * tiling.query, (q + 1) * tiling.query);
  }

  // The same for queries first ... end - 1, of which the first must exist.
  DASH_HOST_DEVICE constexpr Range kv_tiles_of_queries(int first, int end) const {
    int const last = min_int(end, mask.sequence.seqlen_q) - 1;
    return tiles_between(mask.keys_of(first).first, mask.keys_of(last).end(), tiling.key);
  }

  // Of those, the tiles of which every one of the queries sees every key. If there is none, the empty range may begin
  // before or after them.
  DASH_HOST_DEVICE constexpr Range kv_tiles_seen_whole(int first, int end) const {
    int const last = min_int(end, mask.sequence.seqlen_q) - 1;
    return Range::between(ceil_div(mask.keys_of(last).first, tiling.key), mask.keys_of(first).end() / tiling.key);
  }

  // Whether elements of the tile must be masked one by one.
  DASH_HOST_DEVICE constexpr bool needs_masking(int q, int kv) const {
    return mask.hides_part_of({q * tiling.query, tiling.query}, {kv * tiling.key, tiling.key});
  }

 private:
  // The tiles of `size` rows that contain rows first ... end - 1.
  DASH_HOST_DEVICE static constexpr Range tiles_between(int first, int end, int size) {
    return end <= first ? Range{first / size, 0} : Range::between(first / size, ceil_div(end, size));
  }
};

static_assert(std::is_trivially_copyable_v<TileGrid> && std::is_standard_layout_v<TileGrid>);

}  // namespace dash_attn
