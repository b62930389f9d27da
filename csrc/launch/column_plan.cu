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

void launch_column_plan(const AttentionArguments& a, const MaskRule& mask, const Tiling& tiling,
                        const ColumnArrays& arrays, cudaStream_t stream) {
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
  const auto shape = [&](int64_t blocks) {
    return within_margin(blocks, columns::kPlanThreads, 0, a.num_sms, a.sm_margin);
  };
  launch("the plan of the keys of a mask", columns::plan_keys_kernel, params,
         shape(params.mask_heads * arrays.sizes.kv_numbers), stream);
  const int64_t query_tiles = params.mask_heads * arrays.sizes.query_numbers;
  launch("the plan of the queries of a mask", columns::plan_queries_kernel, params,
         shape((query_tiles + columns::kPlanWarps - 1) / columns::kPlanWarps), stream,
         {starts_before_previous_ends(a.sm_margin == 0)});
}

}  // namespace dash_attn
