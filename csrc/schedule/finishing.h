// Whether the main kernel of the backward makes dQ of its sums (backward/finish_dq.h), or a kernel behind it does
// (backward/convert.h). For speed alone, and measured (docs/design_decisions.md): the bits are the same. A sum that is
// finished at once is read from L2 and never written back; but the KV tile that adds last waits for the others, where
// else it would go on.
#pragma once

#include <cstdint>

#include "../config/tile_shapes.h"
#include "../host_device.h"
#include "policy.h"
#include "tile_grid.h"

namespace dash_attn {

// Of a call with as many (sequence, KV head, split)s, on as many CTAs.
DASH_HOST_DEVICE constexpr bool pays_to_finish_dq(Policy policy, TileGrid const& grid, HeadDims padded, int64_t heads,
                                                  int ctas) {
  if (divides(policy)) {
    // Most KV tiles add last to query tiles of their own, where they end, when the others have been there if all run
    // side by side. If not, a short step at head_dim 64 is worth that wait where it is one of many: of as many as there
    // are KV tiles.
    constexpr int kManyKvTiles = 16;
    return padded.qk > 64 || heads * grid.kv_tiles() <= ctas || grid.kv_tiles() >= kManyKvTiles;
  }
  // With fewer work tiles there are no others to fill the wait.
  constexpr int64_t kFewestWorkTiles = 1024;
  if (heads * grid.kv_tiles() < kFewestWorkTiles) return false;
  // What is saved is a share of a query tile's work, smaller the more KV tiles it sees. Where the mask cuts at its end,
  // the last step of each work tile is the one that waits, one of half as many at head_dim 64, whose query tiles are
  // longer.
  bool const is_full = grid.mask.kind == MaskKind::kFull;
  int const most = padded.qk <= 64 && !is_full ? 8 : 64;
  return grid.kv_tiles() <= most;
}

}  // namespace dash_attn
