#include "pack_plan.h"

#include "../dropout/mask.h"
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

template <typename Rule>
void launch_plan(const Rule& rule, const AttentionArguments& a, const PageTable& pages, const PackArrays& arrays,
                 int* counter, const packing::ClearedRows& cleared, cudaStream_t stream) {
  packing::PlanParams<Rule> params{};
  params.rule = rule;
  const auto longest = [&](int blocks, int rows) { return a.drops() ? blocks * dropout::kBlockRows : rows; };
  const PackLengths& pack = a.pack;
  params.q = {false, pack.cu_seqlens_q, pack.seqused_q, a.seqlen_q,
              pack.cu_seqlens_q ? longest(a.dropout.query_blocks, a.seqlen_q) : pack.rows_q, pack.rows_q};
  params.k = {true, pack.cu_seqlens_k, pack.seqused_k, a.seqlen_k, longest(a.dropout.key_blocks, a.seqlen_k), 0};
  if (!pack.cu_seqlens_k) {
    params.k.longest = pages.capacity();
    if (pages.exists()) {
      params.k.total = pages.capacity();  // of any sequence: a table places its keys
    } else {
      params.k.step = pages.page_distance;
    }
    params.pages = pages;
    params.num_pages = (a.seqlen_k - pages.page_rows) / pages.page_distance + 1;
  }
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

void launch_pack_plan(const BackwardPlan& plan, cudaStream_t stream) {
  const BackwardArguments& a = plan.call;
  packing::ClearedRows rows{};
  rows.tensors[0] = cleared(a.dq, a, false, a.head_dims.qk);
  rows.tensors[1] = cleared(a.dk, a, true, a.head_dims.qk);
  rows.tensors[2] = cleared(a.dv, a, true, a.head_dims.v);
  launch_plan(plan.pack_rule, a, {}, plan.pack, nullptr, rows, stream);
}

}  // namespace dash_attn
