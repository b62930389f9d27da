#include "forward_plan.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "../placement/forward_tiles.h"
#include "check.h"
#include "column_plan.h"
#include "pack_plan.h"
#include "scores.h"
#include "self_check.h"
#include "tensor_map.h"

namespace dash_attn {
namespace {

int checked_num_tiles(const ForwardArguments& a, int64_t tiles) {
  if (tiles > INT32_MAX / 2) {
    throw std::runtime_error("dash_attn: batch * heads * seqlen is too large: " + std::to_string(a.batch) + " * " +
                             std::to_string(a.heads) + " * " + std::to_string(a.seqlen_q) + " makes " +
                             std::to_string(tiles) + " tiles");
  }
  return int(tiles);
}

// Keys in a cache: as many as their sequences have room for.
PackRows rows_of_sequences(const ForwardArguments& a) {
  PackRows rows = pack_rows(a);
  if (a.reads_cache()) {
    rows.total_k = int(std::min<int64_t>(int64_t{a.pages.capacity()} * a.batch, kUnbounded));
  }
  return rows;
}

forward::QueryTileScheduler make_scheduler(const ForwardPlan& plan) {
  const ForwardArguments& a = plan.call;
  static_assert(forward::kMostPackedHeads == kWarpgroupRows && forward::kWarpgroupRowsOfTile == kWarpgroupRows);
  if (a.is_pack()) {
    forward::QueryTileScheduler s = plan.pack_rule.scheduler;
    s.num_tiles = checked_num_tiles(a, plan.capacity.units * s.head_groups);
    return s;
  }
  const Mask mask = mask_of(a.mask, a.sequence());
  forward::QueryTileScheduler s =
      forward::make_scheduler({mask, a.batch, a.heads, a.kv_heads, a.head_dims, a.num_sms, a.drops()});
  s.num_tiles = checked_num_tiles(a, num_tiles(s));
  return s;
}

// Whether tiles have rows for one warpgroup and see keys from the first one on, as the kernels of short tiles require.
bool can_be_short(const ForwardPlan& plan) {
  const forward::QueryTileScheduler& s = plan.params.scheduler;
  return s.tile_positions << s.group_shift == kWarpgroupRows && s.first_is_short && !plan.call.needs_column_kernel();
}

// Whether the kernels of short tiles are faster: they take less time for a KV tile, but more to start. They are no
// faster if all SMs read plain caches.
bool short_tiles_pay(const ForwardPlan& plan) {
  constexpr int kEnoughKeys = 2048, kManyTilesOfCta = 3;
  const ForwardArguments& a = plan.call;
  const int mean_keys = a.reads_cache() ? a.pages.capacity() : a.is_pack() ? a.seqlen_k / a.batch : a.seqlen_k;
  return a.pages.exists() || (mean_keys >= kEnoughKeys &&
                              num_tiles(plan.params.scheduler) < kManyTilesOfCta * int64_t{a.num_sms});
}

// The kernel of `call`, whose tiles may have any height. A kernel of short tiles, which serves every mask as a window
// and has the same bits, replaces it if this build has one and short tiles pay. No other kernel reads pages that cut
// boxes.
const ForwardKernel* choose_kernel(const ForwardArguments& call, ForwardPlan& plan) {
  const ForwardKernel* const kernel = &forward_kernel_of(call, plan.call.mask);
  if (can_be_short(plan) && short_tiles_pay(plan)) {
    const MaskRule window{MaskKind::kWindow, plan.call.mask.as_window()};
    if (const ForwardKernel* const of_short_tiles = short_forward_kernel_of(call, window)) {
      plan.call.mask = window;
      return of_short_tiles;
    }
  }
  if (call.pages.cuts_boxes()) {
    throw std::runtime_error("dash_attn: no kernel that serves this call reads pages of " +
                             std::to_string(call.pages.page_rows) + " rows, which is not a multiple of " +
                             std::to_string(PageTable::kBoxRows));
  }
  return kernel;
}

// Whether a pack is a step of decoding whose tiles all run at once. The host then knows everything but the numbers of
// keys, and sorting the sequences would gain nothing.
bool runs_at_once(const ForwardPlan& plan) {
  const ForwardArguments& a = plan.call;
  return a.reads_cache() && a.pack.rows_q > 0 && !a.pack.seqused_q &&
         num_tiles(plan.params.scheduler) <= a.num_sms && plan.kernel->serves_steps[a.pages.exists()];
}

void make_tensor_maps(const ForwardArguments& a, const ForwardKernel& kernel, forward::KernelParams& params) {
  const int group_shift = params.scheduler.group_shift;
  const auto query_map = [&](const TensorView& t, int head_dim) {
    return make_tensor_map(t, a.dtype, a.query_rows(), a.heads, head_dim,
                           {kernel.swizzle_columns, 1 << group_shift, kWarpgroupRows >> group_shift});
  };
  const auto key_map = [&](const TensorView& t, int head_dim) {
    return make_tensor_map(t, a.dtype, a.key_rows(), a.kv_heads, head_dim,
                           {kernel.swizzle_columns, 1, a.pages.exists() ? PageTable::kBoxRows : kernel.key_rows});
  };
  params.q = query_map(a.q, a.head_dims.qk);
  params.out = query_map(a.out, a.head_dims.v);
  params.k = key_map(a.k, a.head_dims.qk);
  params.v = key_map(a.v, a.head_dims.v);
}

}  // namespace

ForwardPlan plan_forward(const ForwardArguments& call) {
  if (call.max_logits && (score_kind(call) != ScoreKind::kPlain || call.pages.exists())) {
    throw std::runtime_error("dash_attn: no kernel finds the largest logits with dropout, a softcap, slopes or pages");
  }
  ForwardPlan plan{};
  ForwardArguments& a = plan.call = call;
  a.mask = kernel_mask(call, call.pages.exists(), call.needs_column_kernel());
  if (a.is_pack()) {
    const PackRows rows = rows_of_sequences(a);
    // Calls with pages have the tiles of the caller's mask, not those of the window that their kernel sees: heads may
    // share a tile (fixes_rows_of_tiles), so that decoding reads K and V once for all of them.
    plan.pack_rule = forward_pack_rule(call.pages.exists() ? call.mask : a.mask, rows, a.heads, a.kv_heads,
                                       a.head_dims, a.num_sms, a.drops());
    if (a.pages.cuts_boxes()) { forward::cut_into_tiles(plan.pack_rule.scheduler, kWarpgroupRows); }
    plan.capacity = plan.pack_rule.most(rows);
  }
  forward::KernelParams& params = plan.params;
  params.scheduler = make_scheduler(plan);
  plan.kernel = choose_kernel(call, plan);
  plan.plans_pack = a.is_pack() && !runs_at_once(plan);
  if (a.is_pack() && !plan.plans_pack) {
    params.seqlens_k = a.pack.seqused_k;
    params.scheduler.num_tiles = int(num_tiles(params.scheduler));
    params.scheduler.takes_tiles = false;
  }
  make_tensor_maps(a, *plan.kernel, params);
  params.softmax_lse = a.softmax_lse;
  params.lse_head_stride = a.seqlen_q;
  params.window = a.mask.window;
  params.score = make_score_params(a);
  params.sinks = a.sinks;
  params.dropout = make_bits_view(a);
  params.pages = a.pages;
  params.rows_of_k = {a.k.data, a.k.stride_seqlen, a.k.stride_head, a.head_dims.qk};
  params.rows_of_v = {a.v.data, a.v.stride_seqlen, a.v.stride_head, a.head_dims.v};
  params.largest = {a.max_logits, a.softmax_scale, a.heads};
  if (call.needs_column_kernel()) { check_column_sizes(call, plan.tiling()); }
  plan.ctas = std::min(params.scheduler.num_tiles, a.num_sms);
  return plan;
}

int64_t place_workspace(ForwardPlan& plan, void* base) {
  WorkspaceAllocator allocator(base);
  if (plan.params.scheduler.takes_tiles) { allocator.take(plan.params.tiles_taken, 1); }
  if (plan.plans_pack) {
    plan.pack = take_pack_arrays(allocator, plan.call.batch, plan.capacity);
    plan.params.pack = plan.pack.view();
  }
  if (plan.call.needs_column_kernel()) {
    plan.columns = take_column_arrays(allocator, plan.call, plan.tiling());
    plan.params.columns = plan.columns.view();
  }
  return allocator.bytes;
}

void run_forward(const ForwardArguments& call, const AllocateWorkspace& allocate, cudaStream_t stream) {
  if (call.is_pack()) { require_self_check(); }
  ForwardPlan plan = plan_forward(call);
  if (const int64_t bytes = place_workspace(plan, nullptr)) { place_workspace(plan, allocate(bytes)); }
  if (plan.plans_pack) { launch_pack_plan(plan, stream); }
  if (call.needs_column_kernel()) {
    launch_column_plan(plan, stream);
  } else if (!call.is_pack() && plan.params.tiles_taken) {
    check_cuda(cudaMemsetAsync(plan.params.tiles_taken, 0, sizeof(int), stream), "clearing the count of tiles");
  }
  // With fewer CTAs than SMs, starting beside the plan of a pack made some decoding calls up to 8% slower.
  const bool follows_plan = call.needs_column_kernel() || (plan.plans_pack && plan.ctas == call.num_sms);
  plan.kernel->launch(plan.params, plan.ctas, follows_plan && call.sm_margin == 0, stream);
  if (call.is_pack() && !plan.plans_pack) { launch_cache_check(plan, stream); }
}

}  // namespace dash_attn
