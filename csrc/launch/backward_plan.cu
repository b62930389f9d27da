#include "backward_plan.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "../backward/config.h"
#include "../contract/splits.h"
#include "../placement/finishing.h"
#include "../placement/head_swizzle.h"
#include "column_plan.h"
#include "pack_plan.h"
#include "scores.h"
#include "self_check.h"
#include "stages.h"
#include "tensor_map.h"

namespace dash_attn {
namespace {

TileShape tile_of(const AttentionArguments& a) { return backward_tile_shape(a.padded_head_dims()); }

// Of a dense batch. A call that carries sums has one split's query heads.
int splits_of(const BackwardArguments& a, const TileGrid& grid) {
  return a.carries() ? 1 : num_splits(a.group_size(), grid);
}

TileScheduler make_scheduler(const BackwardArguments& a, const TileGrid& grid) {
  TileScheduler s{};
  s.policy = a.policy;
  s.kv_heads = a.kv_heads;
  s.group_size = a.group_size();
  if (a.is_pack()) { return s; }  // the rest is in the pack's plan, for each sequence
  const HeadDims padded = a.padded_head_dims();
  s.sequence = a.sequence();
  s.batch = a.batch;
  s.splits = splits_of(a, grid);
  const int heads_of_work_tile = s.group_size / s.splits;
  s.head_swizzle = divides(s.policy) ? divided_head_swizzle(grid, int64_t{a.batch} * a.kv_heads, a.num_sms)
                                     : head_swizzle(s.policy, grid, heads_of_work_tile, padded);
  s.swizzle_with_turns = swizzle_with_turns(s.policy, grid, heads_of_work_tile, padded);
  s.last_heads = last_heads(s.policy, grid, padded);
  return s;
}

PackCapacity capacity_of(const BackwardArguments& a, const TileGrid& grid, const TileScheduler& scheduler) {
  PackCapacity capacity{};
  capacity.query_tiles = int64_t{a.batch} * grid.query_tiles();
  const bool has_sums = TileScheduler::has_sums_in_memory(a.policy, grid, scheduler.splits);
  capacity.split_tiles = has_sums ? int64_t{a.batch} * grid.kv_tiles() : 0;
  capacity.key_chunks = int64_t{a.batch} * fixed_point::num_chunks(a.seqlen_k);
  return capacity;
}

int64_t num_groups(const BackwardPlan& plan) {
  if (plan.call.is_pack()) { return plan.capacity.units * plan.call.kv_heads; }
  return AllPolicies::with(plan.call.policy, [&](auto policy) {
    return plan.params.scheduler.num_groups<decltype(policy)::value>(plan.grid);
  });
}

// Whether the main kernel makes dQ of its sums. A pack is judged as a batch of sequences of its mean length, which the
// host knows: no bit depends on the answer.
bool pays_to_finish_dq(const BackwardArguments& a, const TileGrid& grid) {
  // A yardstick that adds in no order has no sums to finish.
  if (accumulation(a.policy) == Accumulation::kUnordered) { return false; }
  TileGrid mean = grid;
  if (a.is_pack()) {
    mean.mask = mask_of(a.mask, {ceil_div(a.seqlen_q, a.batch), ceil_div(a.seqlen_k, a.batch)});
  }
  const int64_t heads = int64_t{a.batch} * a.kv_heads * splits_of(a, mean);
  return pays_to_finish_dq(a.policy, mean, a.padded_head_dims(), heads, a.num_sms);
}

// What the kernels count in 32 bits, and what a cluster needs.
void check_launchable(const BackwardPlan& plan) {
  const BackwardArguments& a = plan.call;
  const TileShape tile = tile_of(a);
  const int64_t blocks = plan.capacity.query_tiles * plan.kernel->preprocess_blocks;
  // Each KV tile of a group has at most so many semaphores of sums.
  const int64_t semaphores = plan.num_groups * plan.kernel->cluster_size * (divides(a.policy) ? 8 : 2);
  if (blocks * a.heads > INT32_MAX || plan.capacity.key_chunks * a.kv_heads > INT32_MAX || semaphores > INT32_MAX) {
    throw std::runtime_error("dash_attn: batch * heads * seqlen is too large: " + std::to_string(a.batch) + " * " +
                             std::to_string(a.heads) + " * " + std::to_string(std::max(a.seqlen_q, a.seqlen_k)) +
                             " makes more than 2^31 tiles");
  }
  const std::string schedule = std::string("schedule ") + kPolicyNames[int(a.policy)];
  const int tiles = std::max(ceil_div(a.seqlen_q, tile.query), ceil_div(a.seqlen_k, tile.key));
  if (divides(a.policy) && tiles > kMostTilesOfDivided) {
    throw std::runtime_error("dash_attn: " + schedule + " is for at most " + std::to_string(kMostTilesOfDivided) +
                             " query tiles and KV tiles, got " + std::to_string(tiles) +
                             (a.is_pack() ? " of the rows of the pack" : ""));
  }
  const int cluster_size = plan.kernel->cluster_size;
  if (a.num_sms < cluster_size) {
    throw std::runtime_error("dash_attn: sm_margin leaves " + std::to_string(a.num_sms) + " SM, " + schedule +
                             " runs clusters of " + std::to_string(cluster_size) + ": leave at least as many");
  }
}

// A kernel for masks by key columns serves one policy of its set.
void check_policy_of_columns(const BackwardArguments& a) {
  if (!has_kernel(a.policy, {a.mask.kind, a.padded_head_dims(), false, false, /*has_columns=*/true})) {
    throw std::runtime_error(std::string("dash_attn: no kernel has startend_row_indices under schedule ") +
                             kPolicyNames[int(a.policy)]);
  }
}

void make_tensor_maps(const BackwardPlan& plan, backward::KernelParams& params) {
  const BackwardArguments& a = plan.call;
  const TileShape tile = tile_of(a);
  const auto query_map = [&](const TensorView& t, int head_dim, int rows) {
    return make_tensor_map(t, a.dtype, a.query_rows(), a.heads, head_dim, {plan.kernel->swizzle_columns, 1, rows});
  };
  const auto key_map = [&](const TensorView& t, int head_dim, int rows) {
    return make_tensor_map(t, a.dtype, a.key_rows(), a.kv_heads, head_dim, {plan.kernel->swizzle_columns, 1, rows});
  };
  params.q = query_map(a.q, a.head_dims.qk, tile.query);
  params.dout = query_map(a.dout, a.head_dims.v, tile.query);
  params.k = key_map(a.k, a.head_dims.qk, tile.key);
  params.v = key_map(a.v, a.head_dims.v, tile.key);
  if (!a.carries() || a.carried.keys_end) {
    params.dk = key_map(a.dk, a.head_dims.qk, plan.kernel->stored_rows);
    params.dv = key_map(a.dv, a.head_dims.v, plan.kernel->stored_rows);
  }
  if (params.finishes_dq) { params.dq = query_map(a.dq, a.head_dims.qk, kWarpgroupRows); }
}

}  // namespace

BackwardPlan plan_backward(const BackwardArguments& call) {
  BackwardPlan plan{};
  BackwardArguments& a = plan.call = call;
  // Calls that carry sums, and kernels of a mask by key columns, take the rest of the mask as a window. Those beside
  // them see it as it is.
  const MaskRule mask = plan.kernel_mask = kernel_mask(call, call.carries(), call.has_columns());
  if (!call.carries() && !call.has_columns()) { a.mask = mask; }
  if (call.has_columns()) { check_policy_of_columns(a); }
  plan.kernel = &backward_kernel_of(call, mask);
  const TileShape tile = tile_of(a);
  plan.grid = {{tile.query, tile.key, plan.kernel->cluster_size},
               mask_of(call.has_columns() ? a.mask : mask, a.sequence())};

  backward::KernelParams& params = plan.params;
  params.scheduler = make_scheduler(a, plan.grid);
  if (a.is_pack()) {
    plan.pack_rule = backward_pack_rule(a.mask, a.policy, a.group_size(), a.head_dims);
    plan.capacity = plan.pack_rule.most(pack_rows(a));
  } else {
    plan.capacity = capacity_of(a, plan.grid, params.scheduler);
  }
  plan.num_groups = num_groups(plan);
  check_launchable(plan);
  if (call.has_columns()) { check_column_sizes(a, plan.grid.tiling); }
  params.num_groups = int(plan.num_groups);
  // With a margin, a kernel that starts early would take SMs beside those of the kernel before it.
  plan.starts_early = a.sm_margin == 0;
  plan.ctas = min_int(params.num_groups, a.num_sms / plan.kernel->cluster_size) * plan.kernel->cluster_size;

  params.finishes_dq = plan.kernel->may_finish_dq && !a.carries() && pays_to_finish_dq(a, plan.grid);
  make_tensor_maps(plan, params);
  params.softmax_lse = a.softmax_lse;
  params.lse_batch_stride = int64_t(a.heads) * a.seqlen_q;
  params.lse_head_stride = a.seqlen_q;
  params.window = mask.window;
  params.dropout = make_bits_view(a);
  params.scale_of_sums = a.softmax_scale * params.dropout.scale;
  params.score = make_score_params(a);
  params.carried = {a.carries(), a.carried.total, a.carried.dq_continues, a.carried.keys_continue, a.carried.keys_end};
  AllPolicies::with(a.policy, [&](auto policy) {
    params.heads_together = heads_together<decltype(policy)::value>(a.mask.kind);
  });
  return plan;
}

int64_t place_workspace(BackwardPlan& plan, void* base) {
  const BackwardArguments& a = plan.call;
  const TileShape tile = tile_of(a);
  const PackCapacity& capacity = plan.capacity;
  const int64_t tiles = capacity.query_tiles * a.heads, rows = tiles * tile.query;
  const HeadDims padded = tile.head_dims;
  const bool is_divided = divides(a.policy);
  // One for each warpgroup's rows of each KV tile, for dK and for dV.
  const int64_t sums = capacity.split_tiles * a.kv_heads * (tile.key / kWarpgroupRows) * 2;
  const int64_t floats_of_sums = capacity.split_tiles * a.kv_heads * tile.key * padded.sum();
  backward::Workspace& arrays = plan.params.workspace = {};
  WorkspaceAllocator allocator(base);
  if (a.carries()) {
    arrays.dq_accumulator = a.carried.dq;
    arrays.split_sums = a.carried.keys;
  } else {
    allocator.take(arrays.dq_accumulator, rows * padded.qk);
  }
  allocator.take(arrays.delta, rows);
  allocator.take(arrays.dq_semaphores, tiles * backward::dq_parts(padded.qk));
  const int64_t work_counters = is_divided ? 2 + plan.num_groups : 1;
  plan.num_work_counters = int(work_counters);
  allocator.take(arrays.next_work, work_counters);
  if (is_divided) {
    arrays.running_ctas = arrays.next_work + 1;
    arrays.whole_heads = arrays.next_work + 2;
    allocator.take(arrays.first_part_sums, floats_of_sums);
  }
  plan.num_split_semaphores = 0;
  if (sums > 0) {
    const bool has_splits = a.is_pack() ? a.group_size() > 1 : plan.params.scheduler.splits > 1;
    if (has_splits) { allocator.take(arrays.split_sums, floats_of_sums); }
    plan.num_split_semaphores = int(is_divided ? 2 * sums : sums);
    allocator.take(arrays.split_semaphores, plan.num_split_semaphores);
    if (is_divided) { arrays.first_part_semaphores = arrays.split_semaphores + sums; }
  }
  if (a.dsinks) { allocator.take(arrays.sink_sums, int64_t(a.batch) * a.heads); }
  if (plan.is_order_free()) {
    allocator.take(arrays.scales, rows);
    allocator.take(arrays.needs_order, int64_t(a.batch) * a.kv_heads);
    allocator.take(arrays.any_needs_order, 1);
    allocator.take(arrays.any_marks, 1);
    allocator.take(arrays.key_statistics, capacity.key_chunks * a.kv_heads);
  }
  if (a.is_pack()) {
    plan.pack = take_pack_arrays(allocator, a.batch, capacity);
    plan.params.pack = plan.pack.view();
  }
  if (a.has_columns()) {
    plan.columns = take_column_arrays(allocator, a, plan.grid.tiling);
    plan.params.columns = plan.columns.view();
  }
  return allocator.bytes;
}

void run_backward(const BackwardArguments& call, const AllocateWorkspace& allocate, cudaStream_t stream) {
  require_self_check();
  BackwardPlan plan = plan_backward(call);
  place_workspace(plan, allocate(place_workspace(plan, nullptr)));
  if (call.is_pack()) { launch_pack_plan(plan, stream); }
  if (call.has_columns()) { launch_column_plan(plan, stream); }
  if (plan.is_order_free()) { launch_statistics(plan, stream); }
  launch_preprocess(plan, stream);
  plan.kernel->launch(plan.params, plan.ctas, plan.starts_early, stream);
  if (!plan.finishes_dq() && (!call.carries() || call.carried.dq_ends)) { launch_convert(plan, stream); }
  if (call.dsinks) { launch_sinks(plan, stream); }
}

int64_t carried_dq_floats(const AttentionArguments& a) {
  const TileShape tile = tile_of(a);
  return int64_t{a.batch} * a.heads * ceil_div(a.seqlen_q, tile.query) * tile.query * tile.head_dims.qk;
}

int64_t carried_key_floats(const AttentionArguments& a) {
  const TileShape tile = tile_of(a);
  return int64_t{a.batch} * a.kv_heads * ceil_div(a.seqlen_k, tile.key) * tile.key * tile.head_dims.sum();
}

}  // namespace dash_attn
