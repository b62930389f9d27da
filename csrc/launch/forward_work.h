// The work of one call of the forward, and the workspace that it takes.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "../device/gemm.h"
#include "../schedule/forward_tiles.h"
#include "arguments.h"
#include "workspace.h"

namespace dash_attn {

// Of a pack as of a batch of its sequences' mean length, which the host knows: how rows are laid in tiles may depend on
// it, for no bit does.
inline forward::QueryTileScheduler make_forward_scheduler(const ForwardArguments& a) {
  static_assert(forward::kMostPackedHeads == kWarpgroupRows);
  Sequence sequence = a.sequence();
  if (a.is_pack()) { sequence = {ceil_div(a.seqlen_q, a.batch), ceil_div(a.seqlen_k, a.batch)}; }
  const Mask mask{a.mask.kind, a.mask.window, sequence};
  forward::QueryTileScheduler s = forward::make_scheduler({mask, a.batch, a.heads, a.kv_heads, a.head_dim, a.num_sms});
  const int64_t tiles = a.is_pack() ? (int64_t(a.seqlen_q) / s.tile_positions + a.batch) * s.head_groups : num_tiles(s);
  if (tiles > INT32_MAX / 2) {
    throw std::runtime_error("dash_attn: batch * heads * seqlen is too large: " + std::to_string(a.batch) + " * " +
                             std::to_string(a.heads) + " * " + std::to_string(a.seqlen_q) + " makes " +
                             std::to_string(tiles) + " tiles");
  }
  if (a.is_pack()) {
    s.num_tiles = int(tiles);  // no fewer than there are
    s.takes_tiles = true;
  }
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
    PackTotals most{};
    most.units = scheduler.num_tiles / scheduler.head_groups;
    w.pack = take_pack_arrays(cutter, a.batch, most);
  }
  w.bytes = cutter.bytes;
  return w;
}

}  // namespace dash_attn
