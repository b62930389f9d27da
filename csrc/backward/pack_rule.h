// What the backward makes of a sequence of a pack: its units of work are groups of KV tiles of all KV heads, for each
// split.
#pragma once

#include "../packing/plan.h"
#include "../schedule/head_swizzle.h"
#include "../schedule/splits.h"
#include "../schedule/work_tile.h"
#include "params.h"

namespace dash_attn::backward {

struct PackRule {
  MaskRule mask;
  Tiling tiling;
  Policy policy;
  int group_size, padded_head_dim;

  __device__ packing::Need need(const Sequence& sequence) const {
    const TileGrid grid{tiling, {mask.kind, mask.window, sequence}};
    packing::Need need{};
    need.splits = 1;
    need.query_tiles = grid.query_tiles();
    need.query_chunks = num_chunks(sequence.seqlen_q);
    need.key_chunks = num_chunks(sequence.seqlen_k);
    need.head_swizzle = 1;
    if (grid.kv_tiles() == 0) { return need; }
    need.splits = num_splits(group_size, grid);
    need.split_tiles = need.splits > 1 ? grid.kv_tiles() : 0;
    const int heads = group_size / need.splits;
    const int last = grid.kv_tiles() - 1;
    int longest = 0;  // in the middle of a window, else at an end
    for (const int kv : {0, last / 2, last}) { longest = max_int(longest, grid.query_tiles_of(kv).count); }
    need.longest = 1 + longest * heads;
    AllPolicies::with(policy,
                      [&](auto p) { need.units = TileScheduler::units<decltype(p)::value>(grid, need.splits); });
    if (grid.query_tiles() > 0) { need.head_swizzle = head_swizzle(policy, grid, heads, padded_head_dim); }
    return need;
  }
};

}  // namespace dash_attn::backward
