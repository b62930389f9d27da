// The work of one call of the forward, and the workspace that it takes.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "../device/gemm.h"
#include "../schedule/forward_tiles.h"
#include "../schedule/pack_needs.h"
#include "arguments.h"
#include "workspace.h"

namespace dash_attn {

inline ForwardPackRule make_forward_pack_rule(const ForwardArguments& a) {
  return forward_pack_rule(a.mask, pack_rows(a), a.heads, a.kv_heads, a.head_dims, a.num_sms, a.drops());
}

inline forward::QueryTileScheduler make_forward_scheduler(const ForwardArguments& a) {
  static_assert(forward::kMostPackedHeads == kWarpgroupRows && forward::kWarpgroupRowsOfTile == kWarpgroupRows);
  forward::QueryTileScheduler s;
  int64_t tiles;
  if (a.is_pack()) {
    const ForwardPackRule rule = make_forward_pack_rule(a);
    s = rule.scheduler;
    tiles = rule.most(pack_rows(a)).units * s.head_groups;  // no fewer than there are
  } else {
    const Mask mask = mask_of(a.mask, a.sequence());
    s = forward::make_scheduler({mask, a.batch, a.heads, a.kv_heads, a.head_dims, a.num_sms, a.drops()});
    tiles = num_tiles(s);
  }
  if (tiles > INT32_MAX / 2) {
    throw std::runtime_error("dash_attn: batch * heads * seqlen is too large: " + std::to_string(a.batch) + " * " +
                             std::to_string(a.heads) + " * " + std::to_string(a.seqlen_q) + " makes " +
                             std::to_string(tiles) + " tiles");
  }
  s.num_tiles = int(tiles);
  return s;
}

struct ForwardWorkspace {
  int* tiles_taken;  // null where CTAs have fixed shares
  PackArrays pack;
  int64_t bytes;
};

inline ForwardWorkspace plan_workspace(void* base, const ForwardArguments& a,
                                       const forward::QueryTileScheduler& scheduler) {
  ForwardWorkspace w{};
  Cutter cutter(base);
  if (scheduler.takes_tiles) { cutter.take(w.tiles_taken, 1); }
  if (a.is_pack()) {
    PackCapacity most{};
    most.units = scheduler.num_tiles / scheduler.head_groups;
    w.pack = take_pack_arrays(cutter, a.batch, most);
  }
  w.bytes = cutter.bytes;
  return w;
}

}  // namespace dash_attn
