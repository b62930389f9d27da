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

// `key_rows`: no sequence has more, nor, where they follow each other, all of them together.
template <typename Rule>
void launch_plan(const Rule& rule, const AttentionArguments& a, int key_rows, const PackArrays& arrays, int* counter,
                 const packing::ClearedRows& cleared, cudaStream_t stream) {
  packing::PlanParams<Rule> params;
  params.rule = rule;
  const auto longest = [&](int blocks, int rows) { return a.drops() ? blocks * dropout::kBlockRows : rows; };
  params.q = {false, a.pack.cu_seqlens_q, a.pack.seqused_q, a.seqlen_q, longest(a.dropout.query_blocks, a.seqlen_q)};
  params.k = {true, a.pack.cu_seqlens_k, a.pack.seqused_k, key_rows, longest(a.dropout.key_blocks, key_rows)};
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
  const int key_rows = a.pages.exists() ? a.pages.capacity() : a.seqlen_k;
  launch_plan(plan.pack_rule, a, key_rows, plan.pack, plan.params.tiles_taken, rows, stream);
}

void launch_pack_plan(const BackwardPlan& plan, cudaStream_t stream) {
  const BackwardArguments& a = plan.call;
  packing::ClearedRows rows{};
  rows.tensors[0] = cleared(a.dq, a, false, a.head_dims.qk);
  rows.tensors[1] = cleared(a.dk, a, true, a.head_dims.qk);
  rows.tensors[2] = cleared(a.dv, a, true, a.head_dims.v);
  launch_plan(plan.pack_rule, a, a.seqlen_k, plan.pack, nullptr, rows, stream);
}

}  // namespace dash_attn
