#include "pack_plan.h"

#include "../dropout/mask.h"
#include "../packing/check.h"
#include "../packing/plan.h"
#include "../placement/pack_needs.h"
#include "launch.h"

namespace dash_attn {
namespace {

packing::ClearedTensor cleared(const TensorView& tensor, const AttentionArguments& a, bool of_keys, int head_dim) {
  constexpr int kElementBytes = 2, kVectorElements = 8;
  return {tensor.data,
          tensor.stride_seqlen * kElementBytes,
          tensor.stride_head * kElementBytes,
          of_keys ? a.kv_heads : a.heads,
          head_dim / kVectorElements,
          of_keys};
}

// The longest that a sequence may be: with dropout there are bits for so many rows.
int longest(const AttentionArguments& a, int blocks, int rows) {
  return a.drops() ? blocks * dropout::kBlockRows : rows;
}

packing::Lengths lengths_of_keys(const AttentionArguments& a, const PageTable& pages) {
  const PackLengths& pack = a.pack;
  if (pack.cu_seqlens_k) {
    return {true, pack.cu_seqlens_k, pack.seqused_k, a.seqlen_k, longest(a, a.dropout.key_blocks, a.seqlen_k), 0};
  }
  // A table places the keys of any sequence.
  const int most = pages.capacity();
  if (pages.exists()) { return {true, nullptr, pack.seqused_k, most, most, 0}; }
  return {true, nullptr, pack.seqused_k, a.seqlen_k, most, pages.page_distance};
}

template <typename Rule>
void launch_plan(const Rule& rule, const AttentionArguments& a, const PageTable& pages, const PackArrays& arrays,
                 int* counter, const packing::ClearedRows& cleared, cudaStream_t stream) {
  packing::PlanParams<Rule> params{};
  params.rule = rule;
  const PackLengths& pack = a.pack;
  params.q = {false, pack.cu_seqlens_q, pack.seqused_q, a.seqlen_q,
              pack.cu_seqlens_q ? longest(a, a.dropout.query_blocks, a.seqlen_q) : pack.rows_q, pack.rows_q};
  params.k = lengths_of_keys(a, pages);
  params.pages = pages;
  params.batch = a.batch;
  params.sequences = arrays.sequences;
  params.of_unit = arrays.of_unit;
  params.of_query_tile = arrays.of_query_tile;
  params.totals = arrays.totals;
  params.counter = counter;
  params.cleared = cleared;
  // One plans, the others clear; on a single SM they do so one after the other.
  constexpr int kMostClearing = 128;
  const int blocks = min_int(a.num_sms, 1 + kMostClearing);
  launch("the plan of a pack", packing::plan_kernel<Rule>, params, {unsigned(blocks), packing::kPlanThreads, 0},
         stream);
}

}  // namespace

void launch_pack_plan(const ForwardPlan& plan, cudaStream_t stream) {
  const ForwardArguments& a = plan.call;
  packing::ClearedRows rows{};
  rows.tensors[0] = cleared(a.out, a, false, a.head_dims.v);
  rows.softmax_lse = a.softmax_lse;
  rows.heads = a.heads;
  launch_plan(plan.pack_rule, a, a.pages, plan.pack, plan.params.tiles_taken, rows, stream);
}

void launch_cache_check(const ForwardPlan& plan, cudaStream_t stream) {
  const ForwardArguments& a = plan.call;
  constexpr int kMostBlocks = 128;
  const int blocks = min_int(a.batch, min_int(kMostBlocks, a.num_sms));
  launch("the check of a cache", packing::check_kernel, {lengths_of_keys(a, a.pages), a.pages, a.batch},
         {unsigned(blocks), packing::kCheckThreads, 0}, stream,
         {starts_before_previous_ends(a.sm_margin == 0)});
}

void launch_pack_plan(const BackwardPlan& plan, cudaStream_t stream) {
  const BackwardArguments& a = plan.call;
  packing::ClearedRows rows{};
  rows.tensors[0] = cleared(a.dq, a, false, a.head_dims.qk);
  rows.tensors[1] = cleared(a.dk, a, true, a.head_dims.qk);
  rows.tensors[2] = cleared(a.dv, a, true, a.head_dims.v);
  launch_plan(plan.pack_rule, a, {}, plan.pack, nullptr, rows, stream);
}

}  // namespace dash_attn
