// Before the main kernel: D = rowsum(dO * O), LSE in base 2, and the turns and the claim counter set to zero.
#pragma once

#include "../device/fragment.h"
#include "params.h"

namespace dash_attn::backward {

constexpr int kPreprocessThreads = 256;

template <typename Element>
struct PreprocessParams {
  StridedView<const Element> out, dout;
  const float* softmax_lse;  // (batch, heads, seqlen_q), natural logarithm
  Workspace workspace;
  int heads, seqlen_q, padded_seqlen_q, head_dim;
  int blocks_per_head;
  int num_turns;
};

template <int kHeadDim>
constexpr int kPreprocessRows = kPreprocessThreads / (kHeadDim / 8);  // of a block: kHeadDim / 8 threads share a row

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

// Grid: batch x heads x blocks_per_head.
template <typename Element, int kHeadDim>
__global__ void __launch_bounds__(kPreprocessThreads) preprocess_kernel(const PreprocessParams<Element> params) {
  constexpr int kThreadsPerRow = kHeadDim / 8;
  const int batch_head = blockIdx.x / params.blocks_per_head;
  const int batch = batch_head / params.heads, head = batch_head % params.heads;
  const int row = blockIdx.x % params.blocks_per_head * kPreprocessRows<kHeadDim> + threadIdx.x / kThreadsPerRow;
  const int column = threadIdx.x % kThreadsPerRow * 8;

  const int64_t thread = int64_t(blockIdx.x) * kPreprocessThreads + threadIdx.x;
  if (thread < params.num_turns) { params.workspace.turns[thread] = 0; }
  if (thread == 0) { *params.workspace.next_claim = 0; }

  float sum = 0.f;
  if (row < params.seqlen_q && column < params.head_dim) {
    sum = dot8<Element>(*reinterpret_cast<const uint4*>(params.out.row(batch, row, head) + column),
                        *reinterpret_cast<const uint4*>(params.dout.row(batch, row, head) + column));
  }
#pragma unroll
  for (int offset = kThreadsPerRow / 2; offset > 0; offset /= 2) { sum += __shfl_xor_sync(0xffffffff, sum, offset); }

  if (column == 0 && row < params.padded_seqlen_q) {
    const int64_t stat_row = int64_t(batch_head) * params.padded_seqlen_q + statistic_position(row);
    float lse = INFINITY;
    if (row < params.seqlen_q) {
      lse = params.softmax_lse[int64_t(batch_head) * params.seqlen_q + row];
      lse = lse == -INFINITY ? INFINITY : lse * float(M_LOG2E);
    }
    params.workspace.lse_log2[stat_row] = lse;
    params.workspace.delta[stat_row] = sum;
  }
}

}  // namespace dash_attn::backward
