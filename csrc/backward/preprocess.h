// Before the main kernel: D = rowsum(dO * O), and all turns and the claim counter set to zero. Where dQ is added without
// turns its accumulator is cleared too, and order-free each row gets its grid.
#pragma once

#include "../config/fixed_point.h"
#include "../device/fragment.h"
#include "dq_layout.h"
#include "params.h"
#include "statistics.h"

namespace dash_attn::backward {

constexpr int kPreprocessThreads = 256;

template <typename Element>
struct PreprocessParams {
  StridedView<const Element> out, dout;
  Workspace workspace;
  int heads, seqlen_q, padded_seqlen_q, head_dim;
  int blocks_per_head;
  int num_turns;  // no more than the grid has threads
  int num_carry_turns;
  Problem problem;      // of order-free accumulation
  float softmax_scale;  // of order-free accumulation
};

// Of a block: kHeadDim / 8 threads share a row, and take several at a time.
constexpr int kPreprocessPasses = 2;
template <int kHeadDim>
constexpr int kPreprocessRows = kPreprocessPasses * kPreprocessThreads / (kHeadDim / 8);

// Eight 16-bit products in fp32.
template <typename Element>
__device__ __forceinline__ float dot8(uint4 a, uint4 b) {
  const Element* x = reinterpret_cast<const Element*>(&a);
  const Element* y = reinterpret_cast<const Element*>(&b);
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) { sum = fmaf(float(x[i]), float(y[i]), sum); }
  return sum;
}

// Whether a KV head's group needs the order whatever its rows are, from its statistics. Called by a whole warp.
template <typename Element>
__device__ __forceinline__ void decide_order(const PreprocessParams<Element>& params, int batch_kv_head,
                                             const KeyStatistics& keys) {
  const Problem& problem = params.problem;
  const int lane = threadIdx.x % 32;
  const int64_t chunks = int64_t(problem.queries_per_kv) * num_chunks(params.seqlen_q);
  float max_query_norm = 0.f;
  for (int64_t i = lane; i < chunks; i += 32) {
    max_query_norm = larger(max_query_norm, params.workspace.query_norms[batch_kv_head * chunks + i]);
  }
  max_query_norm = largest_of_warp(max_query_norm);
  const fixed_point::HeadStatistics head{max_query_norm, keys.max_norm, keys.max_product, keys.min_step_product};
  if (lane == 0) {
    params.workspace.needs_order[batch_kv_head].by_head =
        fixed_point::needs_order(head, params.softmax_scale, problem.seqlen_k);
  }
}

// The keys that a query sees.
__device__ __forceinline__ int visible_keys(const Problem& problem, int query) {
  const int keys = query + problem.seqlen_k - problem.seqlen_q + 1;
  return problem.causal ? max_int(0, min_int(keys, problem.seqlen_k)) : problem.seqlen_k;
}

// The scale of a row of the group `batch_kv_head`, whose keys have the largest elements and products and the smallest
// steps given.
template <typename Element>
__device__ __forceinline__ uint8_t row_scale(const PreprocessParams<Element>& params, int batch_kv_head, int row,
                                             float dout_norm, float delta, const KeyStatistics& keys) {
  const Problem& problem = params.problem;
  const double bound = fixed_point::row_bound(dout_norm, delta, keys.max_product, keys.max_element, problem.seqlen_k,
                                              std::is_same_v<Element, cutlass::half_t>);
  const int exponent = fixed_point::row_exponent(bound), visible = visible_keys(problem, row);
  if (fixed_point::row_needs_order(exponent, dout_norm, keys.min_step_product, params.head_dim, visible,
                                   ceil_div(visible, problem.tile_k))) {
    params.workspace.needs_order[batch_kv_head].by_row = 1;
  }
  return fixed_point::stored_scale(max_int(exponent, fixed_point::kMinExponent));
}

// Grid: batch x heads x blocks_per_head.
template <typename Element, int kHeadDim, Accumulation kAccumulation>
__global__ void __launch_bounds__(kPreprocessThreads) preprocess_kernel(const PreprocessParams<Element> params) {
  constexpr int kThreadsPerRow = kHeadDim / 8;
  const int batch_head = blockIdx.x / params.blocks_per_head;
  const int batch = batch_head / params.heads, head = batch_head % params.heads;
  const int first_row = blockIdx.x % params.blocks_per_head * kPreprocessRows<kHeadDim>;
  const int column = threadIdx.x % kThreadsPerRow * 8;

  ptx::launch_dependents();
  const int64_t thread = int64_t(blockIdx.x) * kPreprocessThreads + threadIdx.x;
  if (thread < params.num_turns) { params.workspace.turns[thread] = 0; }
  for (int64_t i = thread; i < params.num_carry_turns; i += int64_t(gridDim.x) * kPreprocessThreads) {
    params.workspace.carry_turns[i] = 0;
  }
  if (thread == 0) { *params.workspace.next_claim = 0; }

  uint4 out[kPreprocessPasses], dout[kPreprocessPasses];
#pragma unroll
  for (int pass = 0; pass < kPreprocessPasses; ++pass) {
    const int row = first_row + (pass * kPreprocessThreads + threadIdx.x) / kThreadsPerRow;
    const bool inside = row < params.seqlen_q && column < params.head_dim;
    dout[pass] = load8(params.dout, batch, row, head, column, inside);
    out[pass] = load8(params.out, batch, row, head, column, inside);
  }

  KeyStatistics keys;
  const int batch_kv_head = batch_head / params.problem.queries_per_kv;
  if constexpr (kAccumulation == Accumulation::kOrderFree) {
    keys = combine_warp(chunk_key_statistics(params.workspace, batch_kv_head, params.problem.seqlen_k));
    if (blockIdx.x % (params.problem.queries_per_kv * params.blocks_per_head) == 0 && threadIdx.x < 32) {
      decide_order(params, batch_kv_head, keys);
    }
  }

#pragma unroll
  for (int pass = 0; pass < kPreprocessPasses; ++pass) {
    const int row = first_row + (pass * kPreprocessThreads + threadIdx.x) / kThreadsPerRow;
    const float delta = sum_of_row<kThreadsPerRow>(dot8<Element>(out[pass], dout[pass]));
    float squares = 0.f, largest = 0.f, dout_norm = 0.f;
    if constexpr (kAccumulation == Accumulation::kOrderFree) {
      measure8<Element>(dout[pass], squares, largest);
      dout_norm = norm_bound<kHeadDim>(sum_of_row<kThreadsPerRow>(squares), largest);
    }
    if (row >= params.padded_seqlen_q) { continue; }
    const int64_t padded_row = int64_t(batch_head) * params.padded_seqlen_q;
    if constexpr (kAccumulation != Accumulation::kOrdered) {
      float4* const accumulator =
          reinterpret_cast<float4*>(params.workspace.dq_accumulator + (padded_row + row) * kHeadDim + column);
      accumulator[0] = accumulator[1] = make_float4(0.f, 0.f, 0.f, 0.f);
    }
    if (column != 0) { continue; }
    params.workspace.delta[padded_row + statistic_position(row)] = delta;
    if constexpr (kAccumulation == Accumulation::kOrderFree) {
      params.workspace.scales[padded_row + scale_position(row)] =
          row_scale(params, batch_kv_head, row, dout_norm, delta, keys);
    }
  }
}

}  // namespace dash_attn::backward
