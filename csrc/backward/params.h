// The parameters of the backward's kernels.
#pragma once

#include <cuda.h>

#include <cmath>
#include <cstdint>

#include "../contract/fixed_point.h"
#include "../device/dropout_bits.h"
#include "../device/score.h"
#include "../placement/columns.h"
#include "../placement/work_tile.h"

namespace dash_attn::backward {

// A (batch, seqlen, heads, head_dim) tensor. Strides are in elements, and the last dimension is contiguous.
template <typename T>
struct StridedView {
  T* data;
  int64_t stride_batch, stride_seqlen, stride_head;

  __host__ __device__ T* row(int batch, int position, int head) const {
    return data + batch * stride_batch + position * stride_seqlen + head * stride_head;
  }
};

using fixed_point::KeyStatistics;
constexpr KeyStatistics of_no_rows() { return {0.f, 0.f, INFINITY}; }

// Scratch memory, whose size is linear in the number of rows. Rows are padded to whole query tiles and indexed
// (sequence, head, query row). The sequences of a pack are in the order of its plan.
struct Workspace {
  float*
      dq_accumulator;  // (sequence, head, query tile, tile elements in the order of dq_layout.h); order-free: integers
  float* delta;        // D = rowsum(dO * O), in the order of statistic_position; 0 in padding
  int* dq_semaphores;  // (sequence, head, query tile, part of dQ): how many KV tiles have added to it
  int* next_work;      // the counter from which work is taken

  // Only if KV tiles are divided: whole_tiles.h.
  int* running_ctas;           // how many CTAs have started
  int* whole_heads;            // a WholeHead for each (sequence, KV head), at its first work number
  float* first_part_sums;      // like split_sums: dK and dV of a first part that another CTA continues
  int* first_part_semaphores;  // like split_semaphores: how often sums have been published and consumed

  // Only if the query heads are split.
  float* split_sums;      // (sequence, KV head, KV tile, consumer, dV and dK, fragment as split_reduction.h has it)
  int* split_semaphores;  // (sequence, KV head, KV tile, consumer, dV and dK): how many splits are in the sum

  float* sink_sums;  // (sequence, head), in the caller's order: gradients of sinks, if wanted

  // Only for order-free accumulation.
  uint8_t* scales;                // the fixed-point scale of each row (contract/fixed_point.h)
  int* needs_order;               // (sequence, KV head), in the caller's order: whether dQ is summed in order after all
  int* any_needs_order;           // whether any head needs the order
  int* any_marks;                 // whether any row of the call is marked as not finite
  KeyStatistics* key_statistics;  // (sequence, KV head, chunk)

  __device__ bool is_order_free() const { return scales != nullptr; }
};

// The sequences of a call, as the kernels other than the main one see them.
struct SequencesOfCall {
  Sequence sequence;  // in a dense batch, that of every sequence
  MaskRule mask;
  int batch, heads, kv_heads;
  PackView pack;
  ColumnsView columns;  // if there are any

  __host__ __device__ int group_size() const { return heads / kv_heads; }
};

// The owner of a query tile in the workspace.
struct TileOwner {
  Sequence lengths;
  int number;     // of the sequence
  int batch;      // its rows in a tensor are (batch, first_row + position)
  int first_row;  // of its queries
  int head;
  int query_tile;         // of the head
  int key_chunks_before;  // chunks of order-free statistics of other sequences

  __device__ int row(int tile_rows) const { return query_tile * tile_rows; }
};

// The KV tiles that add to dQ of a query tile.
__device__ __forceinline__ int adds_to_query_tile(const SequencesOfCall& call, Tiling tiling,
                                                  const TileOwner& owner) {
  if (call.columns.exist()) {
    const int first_row = owner.first_row + (call.pack.is_pack() ? 0 : owner.batch * call.sequence.seqlen_q);
    const int number = TileNumbers{tiling.query}.first(owner.number, first_row) + owner.query_tile;
    return call.columns.live_tiles(owner.head / call.group_size(), number).count;
  }
  const TileGrid grid{tiling, mask_of(call.mask, owner.lengths)};
  return grid.kv_tiles_of(owner.query_tile).count;
}

// Returns false if a pack has no such tile, because only the device knows how many there are.
template <int kTileRows>
__device__ __forceinline__ bool find_owner(const SequencesOfCall& call, int place, TileOwner& owner) {
  const PackView& pack = call.pack;
  if (!pack.is_pack()) {
    const int tiles = ceil_div(call.sequence.seqlen_q, kTileRows);
    const int batch_head = place / tiles, batch = batch_head / call.heads;
    owner = {call.sequence,
             batch,
             batch,
             0,
             batch_head % call.heads,
             place % tiles,
             batch * fixed_point::num_chunks(call.sequence.seqlen_k)};
    return true;
  }
  if (place >= pack.totals->query_tiles * call.heads) { return false; }
  const PackedSequence& sequence = pack.sequences[pack.of_query_tile[place / call.heads]];
  const int tiles = ceil_div(sequence.lengths.seqlen_q, kTileRows);
  const int within = place - sequence.first_query_tile * call.heads;
  owner = {sequence.lengths, sequence.number,         0, sequence.end_q - sequence.lengths.seqlen_q, within / tiles,
           within % tiles,   sequence.first_key_chunk};
  return true;
}

// For a call of a chunk of keys and a chunk of queries: where its sums come from and go to. The accumulator holds those
// of dQ, and split_sums those of dK and dV, one for each KV tile.
struct CarriedSums {
  bool exist;           // false: the call is for whole sequences, and nothing else here means anything
  const float* total;   // of the previous splits, laid out like split_sums; null if there are none
  Range dq_continues;   // the query tiles of each head that continue a sum
  bool keys_continue;   // whether dK and dV continue a sum
  bool keys_end;        // whether dK and dV are complete, and so are rounded and stored
};

struct KernelParams {
  CUtensorMap q, dout;  // boxes of a swizzle block's columns x one query tile
  CUtensorMap k, v;     // boxes of a swizzle block's columns x one KV tile
  CUtensorMap dk, dv;   // boxes of a swizzle block's columns x 64 keys
  CUtensorMap dq;       // the same x 64 queries, if finishes_dq
  // (batch, heads, seqlen_q), of a pack (heads, total_q); natural logarithm, +inf or -inf for rows that see no key.
  const float* softmax_lse;
  int64_t lse_batch_stride, lse_head_stride;
  Window window;
  TileScheduler scheduler;
  PackView pack;
  Workspace workspace;
  int num_groups;       // of KV tiles: the numbers that CTAs take; for a pack an upper bound
  float scale_of_sums;  // the factor by which dQ and dK differ from their sums
  ScoreParams score;
  dropout::BitsView dropout;
  CarriedSums carried;
  bool finishes_dq;
  // Of the call's own mask (order.h), which is a window to kernels of calls that carry sums or have columns.
  bool heads_together;
  ColumnsView columns;  // for kColumns

  // Without the mask, for find_owner.
  __device__ __forceinline__ SequencesOfCall sequences() const {
    const int heads = scheduler.kv_heads * scheduler.group_size;
    return {scheduler.sequence, {}, scheduler.batch, heads, scheduler.kv_heads, pack, {}};
  }
};

}  // namespace dash_attn::backward
