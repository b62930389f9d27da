// Host side of one variant of the backward: the work, descriptors, parameters and the launch of the main kernel,
// between those of the stages before and after it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "../backward/kernel.h"
#include "../backward/rows.h"
#include "../schedule/head_swizzle.h"
#include "arguments.h"
#include "launch.h"
#include "scores.h"
#include "stages.h"
#include "tensor_map.h"
#include "workspace.h"

namespace dash_attn {

// The kernels that carry sums treat every mask as a window: one kernel then serves all, and their calls are so long
// that the planner's extra arithmetic does not show.
template <typename Variant>
Window window_of_kernel(const BackwardArguments& a) {
  return Variant::kCarries ? a.mask.as_window() : a.mask.window;
}

template <typename Variant>
TileScheduler make_backward_scheduler(const BackwardArguments& a) {
  TileScheduler s{};
  s.policy = static_cast<Policy>(a.schedule);
  s.kv_heads = a.kv_heads;
  s.group_size = a.group_size();
  if (a.is_pack()) { return s; }  // the rest is in the plan, for each sequence
  const TileGrid grid = Variant::grid(a.sequence(), window_of_kernel<Variant>(a));
  s.sequence = a.sequence();
  s.batch = a.batch;
  s.splits = splits_of_call(a, grid);
  s.head_swizzle = Variant::kDivided
                       ? divided_head_swizzle(grid, int64_t{a.batch} * a.kv_heads, a.num_sms)
                       : head_swizzle(s.policy, grid, s.group_size / s.splits, Variant::kTile.head_dims);
  s.swizzle_with_turns = swizzle_with_turns(s.policy, grid, s.group_size / s.splits, Variant::kTile.head_dims);
  s.last_heads = last_heads(s.policy, grid, Variant::kTile.head_dims);
  return s;
}

// Of a pack no fewer than there are.
template <typename Variant>
int64_t num_groups(const BackwardArguments& a, const TileScheduler& scheduler, const PackCapacity& most) {
  if (a.is_pack()) { return most.units * a.kv_heads; }
  int64_t groups = 0;
  Variant::Policies::with(scheduler.policy, [&](auto policy) {
    const auto grid = Variant::grid(scheduler.sequence, window_of_kernel<Variant>(a));
    groups = scheduler.num_groups<decltype(policy)::value>(grid);
  });
  return groups;
}

// What the kernels count in 32 bits, and what a cluster needs. Before anything is launched.
template <typename Variant>
void check_launchable(const BackwardArguments& a, const PackCapacity& most, int64_t groups) {
  const int64_t blocks = most.query_tiles * backward::PreprocessTile<Variant>::kBlocks;
  // Each has at most so many semaphores of sums.
  const int64_t semaphores = groups * (Variant::kDivided ? 8 : 2);
  if (blocks * a.heads > INT32_MAX || most.key_chunks * a.kv_heads > INT32_MAX || semaphores > INT32_MAX) {
    throw std::runtime_error("dash_attn: batch * heads * seqlen is too large: " + std::to_string(a.batch) + " * " +
                             std::to_string(a.heads) + " * " + std::to_string(std::max(a.seqlen_q, a.seqlen_k)) +
                             " makes more than 2^31 tiles");
  }
  const int tiles = std::max(ceil_div(a.seqlen_q, Variant::kQuery), ceil_div(a.seqlen_k, Variant::kKey));
  if (Variant::kDivided && tiles > kMostTilesOfDivided) {
    throw std::runtime_error(std::string("dash_attn: schedule ") + kPolicyNames[a.schedule] + " is for at most " +
                             std::to_string(kMostTilesOfDivided) + " query tiles and KV tiles, got " +
                             std::to_string(tiles) + (a.is_pack() ? " of the rows of the pack" : ""));
  }
  if (a.num_sms < Variant::kClusterSize) {
    throw std::runtime_error("dash_attn: sm_margin leaves " + std::to_string(a.num_sms) + " SM, schedule " +
                             kPolicyNames[a.schedule] + " runs clusters of " + std::to_string(Variant::kClusterSize) +
                             ": leave at least as many");
  }
}

template <typename Variant>
void launch_main(const BackwardArguments& a, const TileScheduler& scheduler, const BackwardWorkspace& workspace,
                 int num_groups, bool finishes_dq, cudaStream_t stream) {
  const auto query_map = [&](const TensorView& t, int head_dim) {
    return make_tensor_map(t, a.dtype, a.query_rows(), a.heads, head_dim,
                           {Variant::Swizzle::kColumns, 1, Variant::kQuery});
  };
  const auto key_map = [&](const TensorView& t, int head_dim, int rows) {
    return make_tensor_map(t, a.dtype, a.key_rows(), a.kv_heads, head_dim, {Variant::Swizzle::kColumns, 1, rows});
  };
  backward::KernelParams params;
  params.q = query_map(a.q, a.head_dims.qk);
  params.dout = query_map(a.dout, a.head_dims.v);
  params.k = key_map(a.k, a.head_dims.qk, Variant::kKey);
  params.v = key_map(a.v, a.head_dims.v, Variant::kKey);
  if (!a.carries() || a.carried.keys_end) {
    params.dk = key_map(a.dk, a.head_dims.qk, Variant::kStoredRows);
    params.dv = key_map(a.dv, a.head_dims.v, Variant::kStoredRows);
  }
  params.finishes_dq = finishes_dq;
  if (finishes_dq) {
    params.dq = make_tensor_map(a.dq, a.dtype, a.query_rows(), a.heads, a.head_dims.qk,
                                {Variant::Swizzle::kColumns, 1, kWarpgroupRows});
  }
  params.softmax_lse = a.softmax_lse;
  params.lse_batch_stride = int64_t(a.heads) * a.seqlen_q;
  params.lse_head_stride = a.seqlen_q;
  params.window = window_of_kernel<Variant>(a);
  params.scheduler = scheduler;
  params.pack = workspace.pack.view();
  params.workspace = workspace.arrays;
  params.num_groups = num_groups;
  params.dropout = make_bits_view(a);
  params.scale_of_sums = a.softmax_scale * params.dropout.scale;
  params.score = make_score_params(a);
  params.carried = {a.carried.total, a.carried.dq_continues, a.carried.keys_continue, a.carried.keys_end};
  Variant::Policies::with(scheduler.policy, [&](auto policy) {
    params.carried.heads_together = heads_together<decltype(policy)::value>(a.mask.kind);
  });

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
  const BackwardWorkspace workspace = plan_workspace(a.workspace, a);
  const int64_t groups = num_groups<Variant>(a, scheduler, workspace.most);
  check_launchable<Variant>(a, workspace.most, groups);
  if (a.is_pack()) { launch_backward_plan(a, workspace, stream); }
  if constexpr (Variant::kOrderFree) { launch_statistics(a, workspace, stream); }
  const bool finishes = Variant::kMayFinishDq && finishes_dq(a);
  launch_preprocess(a, workspace, finishes, stream);
  launch_main<Variant>(a, scheduler, workspace, int(groups), finishes, stream);
  if (!finishes && (!a.carries() || a.carried.dq_ends)) { launch_convert(a, workspace, stream); }
  if (a.dsinks) { launch_sinks(a, workspace, stream); }
}

}  // namespace dash_attn
