// What the launch code hands to the kernels of the backward.
#pragma once

#include <cuda.h>

#include <cmath>
#include <cstdint>

#include "../config/fixed_point.h"
#include "../schedule/work_tile.h"

namespace dash_attn::backward {

// A (batch, seqlen, heads, head_dim) tensor; strides in elements, the last dimension contiguous.
template <typename T>
struct StridedView {
  T* data;
  int64_t stride_batch, stride_seqlen, stride_head;

  __host__ __device__ T* row(int batch, int position, int head) const {
    return data + batch * stride_batch + position * stride_seqlen + head * stride_head;
  }
};

// Of some rows of K and V. Norms are upper bounds of those of whole rows.
struct KeyStatistics {
  float max_element;       // of K
  float max_product;       // of a key's |V row| and its largest element of K
  float max_norm;          // of K
  float min_step_product;  // as fixed_point::HeadStatistics has it
};
constexpr KeyStatistics of_no_rows() { return {0.f, 0.f, 0.f, INFINITY}; }

// The rows of a head are measured in chunks: at most kMaxChunks, one for each lane of a warp.
constexpr int kMaxChunks = 32;
constexpr int kMinChunkRows = 64;
constexpr int chunk_rows(int seqlen) {
  return max_int(kMinChunkRows, ceil_div(seqlen, kMaxChunks * fixed_point::kWindow) * fixed_point::kWindow);
}
constexpr int num_chunks(int seqlen) { return ceil_div(seqlen, chunk_rows(seqlen)); }

// Whether dQ of a KV head's query heads is summed in fp32 in the order of ranks after all. Two words, because two
// kernels write them.
struct NeedsOrder {
  int by_head;  // its statistics alone say so
  int by_row;   // the units of a row are too coarse for it, or it has none

  __device__ __forceinline__ bool any() const { return (by_head | by_row) != 0; }
};

// Scratch memory, linear in the sequence length. Rows are padded to whole query tiles, indexed (batch, head, query
// row).
struct Workspace {
  float* dq_accumulator;  // (batch, head, query tile, tile elements in the order of dq_layout.h); order-free: integers
  float* delta;           // D = rowsum(dO * O), in the order of statistic_position; 0 in padding
  int* dq_semaphores;     // (batch, head, query tile): how many KV tiles have added to dQ
  int* next_work;         // the counter that hands out work

  // With more than one split of the query heads only.
  float* split_sums;      // (batch, KV head, KV tile, consumer, dV and dK, fragment in the order of split_reduction.h)
  int* split_semaphores;  // (batch, KV head, KV tile, consumer, dV and dK): how many splits are in the sum

  // Order-free accumulation only.
  uint8_t* scales;                // fixed point, of each row (config/fixed_point.h), in the order of scale_position
  NeedsOrder* needs_order;        // (batch, KV head)
  float* query_norms;             // (batch, head, chunk): largest norm of a row of Q
  KeyStatistics* key_statistics;  // (batch, KV head, chunk)
};

struct KernelParams {
  CUtensorMap q, dout;       // boxes of 64 columns x one query tile
  CUtensorMap k, v;          // boxes of 64 columns x one KV tile
  CUtensorMap dk, dv;        // boxes of 64 columns x 64 keys
  const float* softmax_lse;  // (batch, heads, seqlen_q), natural logarithm; +inf or -inf for rows that see no key
  TileScheduler scheduler;
  Workspace workspace;
  int num_groups;  // of KV tiles: the numbers that are handed out
  float softmax_scale;
  float softmax_scale_log2;  // log2(e) * softmax_scale
};

}  // namespace dash_attn::backward
