// What the launch code hands to the kernels of the backward.
#pragma once

#include <cuda.h>

#include <cmath>
#include <cstdint>

#include "../config/fixed_point.h"
#include "../device/dropout_bits.h"
#include "../device/score.h"
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

using fixed_point::KeyStatistics;
constexpr KeyStatistics of_no_rows() { return {0.f, 0.f, INFINITY}; }

// Scratch memory, linear in the number of rows. Rows are padded to whole query tiles, indexed (sequence, head, query
// row); the sequences of a pack are in its plan's order.
struct Workspace {
  float*
      dq_accumulator;  // (sequence, head, query tile, tile elements in the order of dq_layout.h); order-free: integers
  float* delta;        // D = rowsum(dO * O), in the order of statistic_position; 0 in padding
  int* dq_semaphores;  // (sequence, head, query tile, part of dQ): how many KV tiles have added to it
  int* next_work;      // the counter that hands out work

  // Where KV tiles are divided only: whole_tiles.h.
  int* running_ctas;           // how many CTAs have begun
  int* whole_heads;            // by number of work, of the first one of each (sequence, KV head): WholeHead
  float* first_part_sums;      // as split_sums: dK and dV of a first part that another CTA goes on with
  int* first_part_semaphores;  // as split_semaphores: how many have been left there and taken up

  // With more than one split of the query heads only.
  float* split_sums;      // (sequence, KV head, KV tile, consumer, dV and dK, fragment as split_reduction.h has it)
  int* split_semaphores;  // (sequence, KV head, KV tile, consumer, dV and dK): how many splits are in the sum

  float* sink_sums;  // (sequence, head), in the caller's order: gradients of sinks; where they are wanted

  // Order-free accumulation only.
  uint8_t* scales;                // fixed point, of each row (config/fixed_point.h)
  int* needs_order;  // (sequence, KV head), in the caller's order: whether dQ is summed in order all the same
  int* any_needs_order;           // whether any of them does
  int* any_marks;                 // whether any row of the call is marked as not finite
  KeyStatistics* key_statistics;  // (sequence, KV head, chunk)
};

// The sequences of a call, as the kernels beside the main one see them.
struct SequencesOfCall {
  Sequence sequence;  // of a dense batch: every sequence's
  MaskRule mask;
  int batch, heads, kv_heads;
  PackView pack;

  __host__ __device__ int group_size() const { return heads / kv_heads; }
};

// Whose query tile a place of the workspace holds.
struct TileOwner {
  Sequence lengths;
  int number;     // of the sequence
  int batch;      // where its rows lie in a tensor: (batch, first_row + position)
  int first_row;  // of its queries
  int head;
  int query_tile;         // of the head
  int key_chunks_before;  // in other sequences, of the statistics of order-free accumulation

  __device__ int row(int tile_rows) const { return query_tile * tile_rows; }
};

// False where a pack has no such place: their number is known on the device alone.
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
  owner = {sequence.lengths,
           sequence.number,
           0,
           sequence.end_q - sequence.lengths.seqlen_q,
           within / tiles,
           within % tiles,
           sequence.first_key_chunk};
  return true;
}

// Of a call that is a chunk of keys by a chunk of queries: where its sums come from and go to. dQ's are the
// accumulator; those of dK and dV are split_sums, one for each KV tile.
struct CarriedSums {
  const float* total;  // of the splits before, laid out as split_sums; null where there are none
  Range dq_continues;  // the query tiles, of each head, that have a sum to add to
  bool keys_continue;  // whether dK and dV have
  bool keys_end;       // whether dK and dV are complete, and are rounded and stored
  bool heads_together;  // of the call's own mask (order.h), which the kernel treats as a window
};

struct KernelParams {
  CUtensorMap q, dout;  // boxes of a swizzle block's columns x one query tile
  CUtensorMap k, v;     // boxes of a swizzle block's columns x one KV tile
  CUtensorMap dk, dv;   // boxes of a swizzle block's columns x 64 keys
  CUtensorMap dq;       // the same x 64 queries, where finishes_dq
  // (batch, heads, seqlen_q), of a pack (heads, total_q); natural logarithm, +inf or -inf for rows that see no key.
  const float* softmax_lse;
  int64_t lse_batch_stride, lse_head_stride;
  Window window;
  TileScheduler scheduler;
  PackView pack;
  Workspace workspace;
  int num_groups;  // of KV tiles: the numbers that are handed out; of a pack, no fewer than those
  float scale_of_sums;  // dQ and dK are so many times their sums
  ScoreParams score;
  dropout::BitsView dropout;
  CarriedSums carried;  // of a kernel that carries sums
  bool finishes_dq;

  // Without the mask, for find_owner.
  __device__ __forceinline__ SequencesOfCall sequences() const {
    const int heads = scheduler.kv_heads * scheduler.group_size;
    return {scheduler.sequence, {}, scheduler.batch, heads, scheduler.kv_heads, pack};
  }
};

}  // namespace dash_attn::backward
