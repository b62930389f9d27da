// Host side of one variant of the backward: the work, descriptors, parameters and the launch of the main kernel,
// between those of the stages before and after it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "../backward/kernel.h"
#include "../backward/preprocess.h"
#include "../schedule/head_swizzle.h"
#include "../schedule/splits.h"
#include "arguments.h"
#include "launch.h"
#include "stages.h"
#include "tensor_map.h"
#include "workspace.h"

namespace dash_attn {

template <typename Variant>
TileScheduler make_backward_scheduler(const BackwardArguments& a) {
  const TileGrid grid = Variant::grid(a.sequence());
  TileScheduler s;
  s.sequence = a.sequence();
  s.policy = static_cast<Policy>(a.schedule);
  s.splits = num_splits(a.group_size(), grid);
  s.batch = a.batch;
  s.kv_heads = a.kv_heads;
  s.group_size = a.group_size();
  s.head_swizzle = head_swizzle(s.policy, grid, s.group_size / s.splits, Variant::kHeadDim);
  return s;
}

template <typename Variant>
int64_t num_groups(const TileScheduler& scheduler) {
  int64_t groups = 0;
  Variant::Policies::with(scheduler.policy, [&](auto policy) {
    groups = scheduler.num_groups<decltype(policy)::value>(Variant::grid(scheduler.sequence));
  });
  return groups;
}

// What the kernels count in 32 bits, and what a cluster needs. Before anything is launched.
template <typename Variant>
void check_launchable(const BackwardArguments& a, const TileScheduler& scheduler) {
  const TileGrid grid = Variant::grid(a.sequence());
  const int64_t heads = int64_t(a.batch) * a.heads;
  const int64_t rows = ceil_div(grid.query_tiles() * Variant::kQuery, backward::kPreprocessRows<Variant::kHeadDim>);
  const int64_t chunks = heads * 2 * backward::kMaxChunks;  // of query heads and of at most as many KV heads
  if (heads * std::max<int64_t>(rows, grid.query_tiles()) > INT32_MAX || chunks > INT32_MAX ||
      num_groups<Variant>(scheduler) > INT32_MAX / 2) {
    throw std::runtime_error("dash_attn: batch * heads * seqlen is too large: " + std::to_string(a.batch) + " * " +
                             std::to_string(a.heads) + " * " + std::to_string(std::max(a.seqlen_q, a.seqlen_k)) +
                             " makes more than 2^31 tiles");
  }
  if (a.num_sms < Variant::kClusterSize) {
    throw std::runtime_error("dash_attn: sm_margin leaves " + std::to_string(a.num_sms) + " SM, schedule " +
                             kPolicyNames[a.schedule] + " runs clusters of " + std::to_string(Variant::kClusterSize) +
                             ": leave at least as many");
  }
}

template <typename Variant>
void launch_main(const BackwardArguments& a, const TileScheduler& scheduler, const backward::Workspace& workspace,
                 cudaStream_t stream) {
  const auto query_map = [&](const TensorView& t) {
    return make_tensor_map(t, a.dtype, a.batch, a.seqlen_q, a.heads, a.head_dim, Variant::kQuery);
  };
  const auto key_map = [&](const TensorView& t, int rows) {
    return make_tensor_map(t, a.dtype, a.batch, a.seqlen_k, a.kv_heads, a.head_dim, rows);
  };
  backward::KernelParams params;
  params.q = query_map(a.q);
  params.dout = query_map(a.dout);
  params.k = key_map(a.k, Variant::kKey);
  params.v = key_map(a.v, Variant::kKey);
  params.dk = key_map(a.dk, kWarpgroupRows);
  params.dv = key_map(a.dv, kWarpgroupRows);
  params.softmax_lse = a.softmax_lse;
  params.scheduler = scheduler;
  params.workspace = workspace;
  params.num_groups = int(num_groups<Variant>(scheduler));
  params.softmax_scale = a.softmax_scale;
  params.softmax_scale_log2 = float(a.softmax_scale * M_LOG2E);

  const int clusters = min_int(params.num_groups, a.num_sms / Variant::kClusterSize);
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {Variant::kClusterSize, 1, 1};
  launch("the backward kernel", backward::backward_kernel<Variant>, params,
         {unsigned(clusters * Variant::kClusterSize), Variant::kThreads, sizeof(backward::SharedStorage<Variant>)},
         stream, {starts_before_previous_ends(a.sm_margin == 0), cluster});
}

// One call of the backward. Explicitly instantiated, a variant a line, by the translation units that setup.py writes.
template <typename Variant>
void launch_backward(const BackwardArguments& a, cudaStream_t stream) {
  const TileScheduler scheduler = make_backward_scheduler<Variant>(a);
  check_launchable<Variant>(a, scheduler);
  const backward::Workspace workspace = plan_workspace(a.workspace, a).arrays;
  if constexpr (Variant::kOrderFree) { launch_statistics(a, workspace, stream); }
  launch_preprocess(a, workspace, stream);
  launch_main<Variant>(a, scheduler, workspace, stream);
  launch_convert(a, workspace, stream);
}

}  // namespace dash_attn
