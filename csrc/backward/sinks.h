// The gradient of the sinks, ds = -sum of e^(s - LSE) (D - dLSE) over a head's rows. Runs after preprocess.h, whose D
// includes the gradient of LSE.
//
// Determinism contract: a block takes one head of one sequence and adds its rows in a fixed tree, and a second kernel
// adds the sequences in order. So the bits do not depend on how sequences are packed.
#pragma once

#include "../device/fragment.h"
#include "params.h"

namespace dash_attn::backward {

constexpr int kSinkThreads = 256;

struct SinkParams {
  const float* sinks;        // (heads)
  const float* softmax_lse;  // the caller's, which includes the sink
  int64_t lse_batch_stride, lse_head_stride;
  Workspace workspace;
  SequencesOfCall call;
  float* dsinks;  // (heads)
  float scale;    // 1 / (1 - p), which D leaves out
  int tile_rows;  // of a query tile
};

// Returns the sum over the block in thread 0. `scratch` may be reused after the next barrier.
__device__ __forceinline__ float sum_of_block(float value, float* scratch) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) { value += __shfl_xor_sync(0xffffffff, value, offset); }
  if (threadIdx.x % 32 == 0) { scratch[threadIdx.x / 32] = value; }
  __syncthreads();
  float sum = 0.f;
#pragma unroll
  for (int warp = 0; warp < kSinkThreads / 32; ++warp) { sum += scratch[warp]; }
  return sum;
}

// Sums the rows of `block`: a place in the call or in the pack's plan, and a head.
__device__ __forceinline__ void sum_rows_of_sink(const SinkParams& params, int block, float* scratch) {
  const SequencesOfCall& call = params.call;
  const int place = block / call.heads, head = block % call.heads;
  int number = place, seqlen_q = call.sequence.seqlen_q;
  int64_t lse = place * params.lse_batch_stride, tile = int64_t(block) * ceil_div(seqlen_q, params.tile_rows);
  if (call.pack.is_pack()) {
    const PackedSequence& sequence = call.pack.sequences[place];
    number = sequence.number;
    seqlen_q = sequence.lengths.seqlen_q;
    lse = sequence.end_q - seqlen_q;
    tile = int64_t(sequence.first_query_tile) * call.heads + head * ceil_div(seqlen_q, params.tile_rows);
  }
  const float sink = params.sinks[head];
  const float* const lse_rows = params.softmax_lse + lse + head * params.lse_head_stride;
  const float* const delta_rows = params.workspace.delta + tile * params.tile_rows;
  static_assert(kProductDepth == 16);  // rows of a tile are a multiple, and statistic_position permutes 16 at a time
  float sum = 0.f;
  for (int row = threadIdx.x; row < seqlen_q; row += kSinkThreads) {
    if (isinf(lse_rows[row])) { continue; }
    sum = fmaf(-expf(sink - lse_rows[row]), delta_rows[statistic_position(row)], sum);
  }
  sum = sum_of_block(sum, scratch);
  if (threadIdx.x == 0) {
    params.workspace.sink_sums[int64_t(number) * call.heads + head] = sink == -INFINITY ? 0.f : sum * params.scale;
  }
}

static __global__ void __launch_bounds__(kSinkThreads) sink_rows_kernel(const SinkParams params) {
  __shared__ float scratch[kSinkThreads / 32];
  for (int block = blockIdx.x; block < params.call.batch * params.call.heads; block += gridDim.x) {
    __syncthreads();
    sum_rows_of_sink(params, block, scratch);
  }
}

// Sums over the sequences, one after the other.
static __global__ void __launch_bounds__(kSinkThreads) sink_sequences_kernel(const SinkParams params) {
  __shared__ float sums[kSinkThreads];
  for (int head = blockIdx.x; head < params.call.heads; head += gridDim.x) {
    float sum = 0.f;
    for (int first = 0; first < params.call.batch; first += kSinkThreads) {
      const int number = first + threadIdx.x;
      __syncthreads();
      if (number < params.call.batch) {
        sums[threadIdx.x] = params.workspace.sink_sums[int64_t(number) * params.call.heads + head];
      }
      __syncthreads();
      if (threadIdx.x > 0) { continue; }
      for (int i = 0; i < min_int(kSinkThreads, params.call.batch - first); ++i) { sum += sums[i]; }
    }
    if (threadIdx.x == 0) { params.dsinks[head] = sum; }
  }
}

}  // namespace dash_attn::backward
