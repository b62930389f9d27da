// Whether the main kernel of the backward makes dQ of its sums (backward/finish_dq.h), or a kernel behind it does
// (backward/convert.h). For speed alone, and measured (docs/engineering_log.md): the bits are the same. A sum that is
// finished at once is read from L2 and never written back; but the KV tile that adds last waits for the others, where
// else it would go on.
#pragma once

#include <cstdint>

#include "../config/tile_shapes.h"
#include "../host_device.h"
#include "policy.h"
#include "tile_grid.h"

namespace dash_attn {

// Of a call with as many (sequence, KV head, split)s.
DASH_HOST_DEVICE constexpr bool pays_to_finish_dq(Policy policy, TileGrid const& grid, HeadDims padded,
                                                  int64_t heads) {
  if (divides(policy)) {
    // Each KV tile adds last to query tiles of its own, where it ends: when the others have been there, if they run at
    // its side. At head_dim 64, where steps are short, that is of few work tiles, or the wait is one of many steps.
    constexpr int kSideBySide = 128, kManySteps = 16;
    return padded.qk > 64 || heads * grid.kv_tiles() <= kSideBySide || grid.kv_tiles() >= kManySteps;
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
