// Host side of one variant of the forward: descriptors, the order of tiles, the launch.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>

#include "../forward/kernel.h"
#include "forward.h"
#include "launch.h"
#include "tensor_map.h"

namespace dash_attn {

// log2 of the query heads that are packed into a tile: all heads of a KV head where that leaves fewer rows empty, which
// lengths and heads decide, never the batch. TMA gathers them, which takes a power of two.
template <typename Config>
int group_shift(const ForwardArguments& a) {
  const int group = a.heads / a.kv_heads;
  if (group > kWarpgroupRows || (group & (group - 1)) != 0) { return 0; }
  if (ceil_div(a.seqlen_q * group, Config::kQuery) >= group * ceil_div(a.seqlen_q, Config::kQuery)) { return 0; }
  int shift = 0;
  while (1 << shift < group) { ++shift; }
  return shift;
}

// Head groups of a section: about as many as have their K and V in L2 together, and such that the tiles of a section
// give every CTA as much to do: they are dealt to and fro, so in lots of twice the CTAs.
template <typename Config>
int section_groups(const ForwardArguments& a, const forward::TileOrder& order, int ctas) {
  constexpr int64_t kBytes = 16 << 20;
  const int64_t head_bytes = int64_t(a.seqlen_k) * Config::kHeadDim * 2 * sizeof(typename Config::Element);
  const int64_t fit = std::max<int64_t>(1, kBytes / head_bytes) * order.groups_per_kv;
  const int64_t even = 2 * ctas / std::gcd(2 * ctas, order.problem.query_tiles);
  return static_cast<int>(std::min<int64_t>((fit + even - 1) / even * even, int64_t(a.batch) * order.head_groups));
}

template <typename Config>
forward::TileOrder make_tile_order(const ForwardArguments& a) {
  forward::TileOrder order;
  order.group_shift = group_shift<Config>(a);
  const int group = 1 << order.group_shift;
  order.groups_per_kv = a.heads / a.kv_heads / group;
  order.head_groups = a.heads / group;
  order.problem = make_problem(a.batch, a.kv_heads, order.groups_per_kv, a.seqlen_q, a.seqlen_k, Config::kQuery / group,
                               Config::kKey, 1, Config::kCausal);
  const int64_t tiles = int64_t(a.batch) * order.head_groups * order.problem.query_tiles;
  if (tiles > INT32_MAX / 2) {
    throw std::runtime_error("dash_attn: batch * heads * seqlen is too large: " + std::to_string(a.batch) + " * " +
                             std::to_string(a.heads) + " * " + std::to_string(a.seqlen_q) + " makes " +
                             std::to_string(tiles) + " tiles");
  }
  order.num_tiles = static_cast<int>(tiles);
  order.section_groups = section_groups<Config>(a, order, std::min(order.num_tiles, a.num_sms));
  return order;
}

// One call of the forward. Explicitly instantiated, a variant a line, by the translation units that setup.py writes.
template <typename Config>
void launch_forward(const ForwardArguments& a, cudaStream_t stream) {
  forward::KernelParams params;
  params.order = make_tile_order<Config>(a);
  const auto query_map = [&](const TensorView& t) {
    return make_grouped_tensor_map(t, a.dtype, a.batch, a.seqlen_q, a.heads, a.head_dim, 1 << params.order.group_shift,
                                   kWarpgroupRows);
  };
  const auto key_map = [&](const TensorView& t) {
    return make_tensor_map(t, a.dtype, a.batch, a.seqlen_k, a.kv_heads, a.head_dim, Config::kKey);
  };
  params.q = query_map(a.q);
  params.out = query_map(a.out);
  params.k = key_map(a.k);
  params.v = key_map(a.v);
  params.softmax_lse = a.softmax_lse;
  params.softmax_scale_log2 = float(a.softmax_scale * M_LOG2E);

  const unsigned ctas = std::min(params.order.num_tiles, a.num_sms);
  launch("the forward kernel", forward::forward_kernel<Config>, params,
         {ctas, Config::kThreads, sizeof(forward::SharedStorage<Config>)}, stream);
}

}  // namespace dash_attn
