// What the forward makes of a sequence of a pack: its units of work are query tiles of all head groups.
#pragma once

#include "../packing/plan.h"
#include "../schedule/forward_tiles.h"
#include "../schedule/tile_grid.h"

namespace dash_attn::forward {

struct PackRule {
  MaskRule mask;
  TileShape tile;
  QueryTileScheduler scheduler;

  __device__ packing::Need need(const Sequence& sequence) const {
    packing::Need need{};
    need.units = ceil_div(sequence.seqlen_q, scheduler.tile_positions);
    if (need.units > 0) {
      // The last query sees no fewer keys than any other, but for those that a window hides at its end.
      const TileGrid grid{{scheduler.tile_positions, tile.key, 1}, {mask.kind, mask.window, sequence}};
      const int last = max_int(0, sequence.seqlen_q - scheduler.tile_positions);
      need.longest = 1 + grid.kv_tiles_of_queries(last, sequence.seqlen_q).count;
    }
    need.head_swizzle =
        head_swizzle_of_sequence(sequence, tile.head_dim, scheduler.groups_per_kv, scheduler.head_groups);
    return need;
  }
};

}  // namespace dash_attn::forward
