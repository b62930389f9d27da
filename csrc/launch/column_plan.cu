#include "column_plan.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "../columns/plan.h"
#include "launch.h"

namespace dash_attn {
namespace {

int mask_heads(const AttentionArguments& a) { return a.columns.head_stride == 0 ? 1 : a.kv_heads; }
int64_t all_rows(const AttentionArguments& a, int seqlen) { return a.is_pack() ? seqlen : int64_t{a.batch} * seqlen; }

ColumnSizes sizes_of(const AttentionArguments& a, const Tiling& tiling) {
  return column_sizes(a.batch, all_rows(a, a.seqlen_q), all_rows(a, a.seqlen_k), a.seqlen_k, tiling);
}

// `mask`: the mask that the pass's kernel sees.
template <Pass kPass>
void launch_plan(const AttentionArguments& a, const MaskRule& mask, const Tiling& tiling, const ColumnArrays& arrays,
                 int* counter, cudaStream_t stream) {
  const ColumnMask& given = a.columns;
  columns::PlanParams params;
  params.bounds = given.bounds;
  params.per_key = given.per_key;
  params.causal = given.causal;
  params.batch_stride = given.batch_stride;
  params.head_stride = given.head_stride;
  params.q = {a.pack.cu_seqlens_q, a.pack.seqused_q, a.seqlen_q};
  params.k = {a.pack.cu_seqlens_k, a.pack.seqused_k, a.seqlen_k};
  params.batch = a.batch;
  params.mask_heads = mask_heads(a);
  params.tiling = tiling;
  params.window = mask.window;
  params.arrays = arrays;
  params.counter = counter;
  const int64_t places = int64_t{a.batch} * params.mask_heads;
  const int tiles = int(all_rows(a, a.seqlen_k) / a.batch) / tiling.key;  // of the mean sequence
  constexpr int kManyTiles = 3 * columns::kPlanWarps;  // one CTA plans fewer in less time than a second launch takes
  const bool share = tiles >= kManyTiles && 2 * places <= a.num_sms && a.sm_margin == 0;
  params.ctas = share ? min_int(a.num_sms / int(places), ceil_div(tiles, columns::kPlanWarps)) : 1;
  const auto launch_part = [&](bool keys, bool queries) {
    params.plans_keys = keys;
    params.plans_queries = queries;
    launch("the plan of a mask", columns::plan_kernel<kPass>, params,
           within_margin(places * params.ctas, columns::kPlanThreads, 0, a.num_sms, a.sm_margin), stream,
           {starts_before_previous_ends(!keys)});
  };
  launch_part(true, !share);
  if (share) { launch_part(false, true); }
}

}  // namespace

void check_column_sizes(const AttentionArguments& a, const Tiling& tiling) {
  const ColumnSizes sizes = sizes_of(a, tiling);
  const int64_t rows = std::max(all_rows(a, a.seqlen_q), mask_heads(a) * sizes.key_rows);
  if (std::max(rows, mask_heads(a) * sizes.query_numbers * sizes.words_of_tile) > INT32_MAX) {
    const std::string name = a.has_columns() ? "startend_row_indices" : "a call with return_max_logits";
    throw std::runtime_error("dash_attn: " + name + " is too large: " + std::to_string(a.batch) + " * " +
                             std::to_string(mask_heads(a)) + " * " + std::to_string(a.seqlen_q) + " * " +
                             std::to_string(a.seqlen_k) + " makes more than 2^31 rows or tiles");
  }
}

ColumnArrays take_column_arrays(WorkspaceAllocator& allocator, const AttentionArguments& a, const Tiling& tiling) {
  ColumnArrays arrays{};
  arrays.sizes = sizes_of(a, tiling);
  arrays.heads_share = mask_heads(a) == 1;
  arrays.hide_keys = a.has_columns();
  const int64_t heads = mask_heads(a), query_tiles = heads * arrays.sizes.query_numbers;
  allocator.take(arrays.hidden, heads * arrays.sizes.key_rows);
  allocator.take(arrays.kv_tiles, heads * arrays.sizes.kv_numbers);
  allocator.take(arrays.query_tiles, query_tiles);
  allocator.take(arrays.words, query_tiles * arrays.sizes.words_of_tile);
  return arrays;
}

void launch_column_plan(const ForwardPlan& plan, cudaStream_t stream) {
  const ForwardArguments& a = plan.call;
  int* const counter = a.is_pack() ? nullptr : plan.params.tiles_taken;  // the plan of a pack clears it
  launch_plan<Pass::kForward>(a, a.mask, plan.tiling(), plan.columns, counter, stream);
}

void launch_column_plan(const BackwardPlan& plan, cudaStream_t stream) {
  launch_plan<Pass::kBackward>(plan.call, plan.kernel_mask, plan.grid.tiling, plan.columns, nullptr, stream);
}

}  // namespace dash_attn
