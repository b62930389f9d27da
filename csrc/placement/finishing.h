// Whether the main kernel of the backward finishes dQ (backward/finish_dq.h), or a later kernel converts it
// (backward/convert.h). This affects speed alone, and the rules are measured (docs/design_decisions.md): the bits are
// the same. A sum that is finished at once is read from L2 and never written back, but the KV tile that adds last waits
// for the others instead of going on.
#pragma once

#include <cstdint>

#include "../contract/policy.h"
#include "../contract/tile_grid.h"
#include "../contract/tile_shapes.h"
#include "../host_device.h"

namespace dash_attn {

// For a call with `heads` (sequence, KV head, split)s on `ctas` CTAs.
DASH_HOST_DEVICE constexpr bool pays_to_finish_dq(Policy policy, TileGrid const& grid, HeadDims padded, int64_t heads,
                                                  int ctas) {
  if (divides(policy)) {
    // Most KV tiles add last to query tiles where they end, after the others have been there if all run side by side.
    // If they do not, a short step at head_dim 64 is worth the wait if it is one of many steps, which are as many as
    // there are KV tiles.
    constexpr int kManyKvTiles = 16;
    return padded.qk > 64 || heads * grid.kv_tiles() <= ctas || grid.kv_tiles() >= kManyKvTiles;
  }
  // With fewer work tiles there is no other work to fill the wait.
  constexpr int64_t kFewestWorkTiles = 1024;
  if (heads * grid.kv_tiles() < kFewestWorkTiles) return false;
  // The saving is a share of a query tile's work, and is smaller the more KV tiles it sees. If the mask cuts off the
  // end, the last step of each work tile is the one that waits, which at head_dim 64 is one of half as many, because
  // query tiles are longer.
  bool const is_full = grid.mask.kind == MaskKind::kFull;
  int const most = padded.qk <= 64 && !is_full ? 8 : 64;
  return grid.kv_tiles() <= most;
}

}  // namespace dash_attn
