// Host side of one variant of the forward: descriptors, the work, the launch.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "../forward/kernel.h"
#include "arguments.h"
#include "launch.h"
#include "tensor_map.h"

namespace dash_attn {

template <typename Variant>
forward::QueryTileScheduler make_forward_scheduler(const ForwardArguments& a) {
  forward::QueryTileScheduler s;
  s.sequence = a.sequence();
  s.batch = a.batch;
  s.group_shift = forward::packed_heads_shift(a.group_size(), a.seqlen_q, Variant::kQuery, kWarpgroupRows);
  const int group = 1 << s.group_shift;
  s.tile_positions = Variant::kQuery / group;
  s.query_tiles = ceil_div(a.seqlen_q, s.tile_positions);
  s.groups_per_kv = a.group_size() / group;
  s.head_groups = a.heads / group;
  s.longest_first = a.mask != MaskKind::kFull;
  const int64_t tiles = int64_t(a.batch) * s.head_groups * s.query_tiles;
  if (tiles > INT32_MAX / 2) {
    throw std::runtime_error("dash_attn: batch * heads * seqlen is too large: " + std::to_string(a.batch) + " * " +
                             std::to_string(a.heads) + " * " + std::to_string(a.seqlen_q) + " makes " +
                             std::to_string(tiles) + " tiles");
  }
  s.num_tiles = static_cast<int>(tiles);
  const int64_t kv_bytes = int64_t(a.seqlen_k) * Variant::kHeadDim * 2 * sizeof(typename Variant::Element);
  s.head_swizzle = forward::head_swizzle(s, kv_bytes);
  return s;
}

// One call of the forward. Explicitly instantiated, a variant a line, by the translation units that setup.py writes.
template <typename Variant>
void launch_forward(const ForwardArguments& a, cudaStream_t stream) {
  forward::KernelParams params;
  params.scheduler = make_forward_scheduler<Variant>(a);
  const auto query_map = [&](const TensorView& t) {
    return make_grouped_tensor_map(t, a.dtype, a.batch, a.seqlen_q, a.heads, a.head_dim,
                                   1 << params.scheduler.group_shift, kWarpgroupRows);
  };
  const auto key_map = [&](const TensorView& t) {
    return make_tensor_map(t, a.dtype, a.batch, a.seqlen_k, a.kv_heads, a.head_dim, Variant::kKey);
  };
  params.q = query_map(a.q);
  params.out = query_map(a.out);
  params.k = key_map(a.k);
  params.v = key_map(a.v);
  params.softmax_lse = a.softmax_lse;
  params.softmax_scale_log2 = float(a.softmax_scale * M_LOG2E);

  const unsigned ctas = std::min(params.scheduler.num_tiles, a.num_sms);
  params.tiles_taken = params.scheduler.num_tiles > a.num_sms ? static_cast<int*>(a.workspace) : nullptr;
  if (params.tiles_taken) {
    check_cuda(cudaMemsetAsync(params.tiles_taken, 0, kForwardWorkspaceBytes, stream), "clearing the count of tiles");
  }
  launch("the forward kernel", forward::forward_kernel<Variant>, params,
         {ctas, Variant::kThreads, sizeof(forward::SharedStorage<Variant>)}, stream);
}

}  // namespace dash_attn
