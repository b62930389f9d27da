// Before the main kernel: D = rowsum(dO * O), and all semaphores and the counter of work set to zero. Where dQ is added in no
// order its accumulator is cleared too, and order-free each row gets its unit.
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
  int num_blocks;  // of the whole call; a grid of fewer takes several each
  int num_dq_semaphores, num_split_semaphores;
  bool clear_dq;  // its partials are added in no order
  // Of order-free accumulation.
  int group_size, seqlen_k, kv_tiles;
  float softmax_scale;
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

// Whether a KV head's group needs the order, from its statistics. Called by a whole warp.
template <typename Element>
__device__ __forceinline__ void decide_order(const PreprocessParams<Element>& params, int batch_kv_head) {
  const int lane = threadIdx.x % 32;
  const int64_t chunks = int64_t(params.group_size) * num_chunks(params.seqlen_q);
  KeyStatistics keys = chunk_key_statistics(params.workspace, batch_kv_head, params.seqlen_k);
  float max_query_norm = 0.f;
  for (int64_t i = lane; i < chunks; i += 32) {
    max_query_norm = larger(max_query_norm, params.workspace.query_norms[batch_kv_head * chunks + i]);
  }
  keys = combine_warp(keys);
  max_query_norm = largest_of_warp(max_query_norm);
  const fixed_point::HeadStatistics head{max_query_norm, keys.max_norm, keys.max_product, keys.sum_of_key_steps,
                                         keys.sum_of_value_steps};
  if (lane == 0) {
    params.workspace.needs_order[batch_kv_head].by_head =
        fixed_point::needs_order(head, params.softmax_scale, params.head_dim, params.seqlen_k, params.kv_tiles,
                                 std::is_same_v<Element, cutlass::half_t>);
  }
}

// The scale of a row whose partials sum to at most `bound` in magnitude.
template <typename Element>
__device__ __forceinline__ uint8_t row_scale(double bound, NeedsOrder& needs_order) {
  if (!isfinite(bound)) { return fixed_point::kNotFinite; }
  const int exponent = fixed_point::row_exponent(bound, std::is_same_v<Element, cutlass::half_t>);
  if (exponent < fixed_point::kMinExponent) {
    needs_order.by_row = 1;
    return fixed_point::stored_scale(fixed_point::kMinExponent);
  }
  return fixed_point::stored_scale(exponent);
}

// Sets `count` integers to zero, with all threads of the grid.
__device__ __forceinline__ void clear_integers(int* integers, int count) {
  for (int64_t i = int64_t(blockIdx.x) * kPreprocessThreads + threadIdx.x; i < count;
       i += int64_t(gridDim.x) * kPreprocessThreads) {
    integers[i] = 0;
  }
}

template <typename Element, int kHeadDim, bool kOrderFree>
__device__ __forceinline__ void preprocess_block(const PreprocessParams<Element>& params, int block) {
  constexpr int kThreadsPerRow = kHeadDim / 8;
  const int batch_head = block / params.blocks_per_head;
  const int batch = batch_head / params.heads, head = batch_head % params.heads;
  const int first_row = block % params.blocks_per_head * kPreprocessRows<kHeadDim>;
  const int column = threadIdx.x % kThreadsPerRow * 8;

  uint4 out[kPreprocessPasses], dout[kPreprocessPasses];
#pragma unroll
  for (int pass = 0; pass < kPreprocessPasses; ++pass) {
    const int row = first_row + (pass * kPreprocessThreads + threadIdx.x) / kThreadsPerRow;
    const bool inside = row < params.seqlen_q && column < params.head_dim;
    dout[pass] = load8(params.dout, batch, row, head, column, inside);
    out[pass] = load8(params.out, batch, row, head, column, inside);
  }

  float max_element = 0.f, max_product = 0.f;
  const int batch_kv_head = batch_head / params.group_size;
  if constexpr (kOrderFree) {
    const KeyStatistics keys = chunk_key_statistics(params.workspace, batch_kv_head, params.seqlen_k);
    max_element = largest_of_warp(keys.max_element);
    max_product = largest_of_warp(keys.max_product);
    if (block % (params.group_size * params.blocks_per_head) == 0 && threadIdx.x < 32) {
      decide_order(params, batch_kv_head);
    }
  }

#pragma unroll
  for (int pass = 0; pass < kPreprocessPasses; ++pass) {
    const int row = first_row + (pass * kPreprocessThreads + threadIdx.x) / kThreadsPerRow;
    const float delta = sum_of_row<kThreadsPerRow>(dot8<Element>(out[pass], dout[pass]));
    float squares = 0.f, largest = 0.f, dout_norm = 0.f;
    if constexpr (kOrderFree) {
      measure8<Element>(dout[pass], squares, largest);
      dout_norm = norm_bound<kHeadDim>(sum_of_row<kThreadsPerRow>(squares), largest);
    }
    if (row >= params.padded_seqlen_q) { continue; }
    const int64_t padded_row = int64_t(batch_head) * params.padded_seqlen_q;
    if (kOrderFree || params.clear_dq) {
      float4* const accumulator =
          reinterpret_cast<float4*>(params.workspace.dq_accumulator + (padded_row + row) * kHeadDim + column);
      accumulator[0] = accumulator[1] = make_float4(0.f, 0.f, 0.f, 0.f);
    }
    if (column != 0) { continue; }
    params.workspace.delta[padded_row + statistic_position(row)] = delta;
    if constexpr (kOrderFree) {
      const double bound = double(dout_norm) * double(max_product) + fabs(double(delta)) * double(max_element);
      params.workspace.scales[padded_row + scale_position(row)] =
          row_scale<Element>(bound, params.workspace.needs_order[batch_kv_head]);
    }
  }
}

template <typename Element, int kHeadDim, bool kOrderFree>
__global__ void __launch_bounds__(kPreprocessThreads) preprocess_kernel(const PreprocessParams<Element> params) {
  ptx::launch_dependents();
  clear_integers(params.workspace.dq_semaphores, params.num_dq_semaphores);
  clear_integers(params.workspace.split_semaphores, params.num_split_semaphores);
  clear_integers(params.workspace.next_work, 1);
  for (int block = blockIdx.x; block < params.num_blocks; block += gridDim.x) {
    preprocess_block<Element, kHeadDim, kOrderFree>(params, block);
  }
}

}  // namespace dash_attn::backward
