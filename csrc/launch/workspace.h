// The scratch memory of both passes: one allocation each, cut into arrays.
#pragma once

#include <cstdint>

#include "../backward/config.h"
#include "../backward/params.h"
#include "../config/fixed_point.h"
#include "../config/tile_shapes.h"
#include "../device/gemm.h"
#include "../schedule/finishing.h"
#include "../schedule/pack_needs.h"
#include "../schedule/policy.h"
#include "../schedule/splits.h"
#include "../schedule/work_tile.h"
#include "arguments.h"

namespace dash_attn {

// Cuts memory into arrays; of a null base only `bytes` means anything.
class Cutter {
 public:
  explicit Cutter(void* base) : base_(static_cast<char*>(base)) {}

  template <typename T>
  void take(T*& array, int64_t count) {
    constexpr int64_t kAlignment = 128;  // bulk copies need 16
    bytes = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    array = reinterpret_cast<T*>(base_ + bytes);
    bytes += count * int64_t(sizeof(T));
  }

  int64_t bytes = 0;

 private:
  char* base_;
};

// What packing/plan.h writes.
struct PackArrays {
  PackedSequence* sequences;
  int* of_unit;
  int* of_query_tile;
  PackTotals* totals;

  PackView view() const { return {sequences, of_unit, of_query_tile, totals}; }
};

inline PackArrays take_pack_arrays(Cutter& cutter, int batch, const PackCapacity& most) {
  PackArrays arrays{};
  cutter.take(arrays.sequences, batch);
  cutter.take(arrays.of_unit, most.units);
  if (most.query_tiles > 0) { cutter.take(arrays.of_query_tile, most.query_tiles); }
  cutter.take(arrays.totals, 1);
  return arrays;
}

inline TileGrid backward_grid(const AttentionArguments& a) {
  const TileShape tile = backward_tile_shape(a.padded_head_dims());
  return {{tile.query, tile.key, 1}, mask_of(a.mask, a.sequence())};
}

// Of a dense batch. A call that carries sums has one split's query heads.
inline int splits_of_call(const BackwardArguments& a, const TileGrid& grid) {
  return a.carries() ? 1 : num_splits(a.group_size(), grid);
}

inline PackRows pack_rows(const AttentionArguments& a) { return {a.batch, a.seqlen_q, a.seqlen_k}; }

inline BackwardPackRule make_backward_pack_rule(const BackwardArguments& a) {
  return backward_pack_rule(a.mask, static_cast<Policy>(a.schedule), a.group_size(), a.head_dims);
}

// Of a dense batch what its work takes; of a pack, whose lengths the host does not know, no less than that for any
// lengths.
inline PackCapacity most_of_backward(const BackwardArguments& a) {
  if (a.is_pack()) { return make_backward_pack_rule(a).most(pack_rows(a)); }
  const TileGrid grid = backward_grid(a);
  const int64_t batch = a.batch;
  PackCapacity most{};
  most.query_tiles = batch * grid.query_tiles();
  const auto policy = static_cast<Policy>(a.schedule);
  const bool has_sums = TileScheduler::has_sums_in_memory(policy, grid, splits_of_call(a, grid));
  most.split_tiles = has_sums ? batch * grid.kv_tiles() : 0;
  most.key_chunks = batch * fixed_point::num_chunks(a.seqlen_k);
  return most;
}

// Whether the main kernel makes dQ of its sums.
inline bool finishes_dq(const BackwardArguments& a) {
  // The yardstick that adds in no order has no lots for it.
  const auto policy = static_cast<Policy>(a.schedule);
  if (accumulation(policy) == Accumulation::kUnordered) { return false; }
  const int64_t heads = int64_t{a.batch} * a.kv_heads;
  if (!a.is_pack()) {
    const TileGrid grid = backward_grid(a);
    return pays_to_finish_dq(policy, grid, a.padded_head_dims(), heads * splits_of_call(a, grid),
                             a.num_sms);
  }
  // As of a batch of sequences of the pack's mean length, which the host knows.
  BackwardArguments mean = a;
  mean.pack = {};
  mean.seqlen_q = ceil_div(a.seqlen_q, a.batch);
  mean.seqlen_k = ceil_div(a.seqlen_k, a.batch);
  return finishes_dq(mean);
}

struct BackwardWorkspace {
  backward::Workspace arrays;
  PackArrays pack;
  PackCapacity most;
  int64_t split_semaphores;  // and those of first parts
  int64_t work_counters;     // next_work and what lies behind it
  int64_t bytes;
};

// The numbers that a call's work has: no fewer, of a pack.
inline int64_t most_numbers(const BackwardArguments& a, const PackCapacity& most) {
  if (a.is_pack()) { return most.units * a.kv_heads; }
  const TileGrid grid = backward_grid(a);
  int units = 0;
  AllPolicies::with(static_cast<Policy>(a.schedule), [&](auto policy) {
    units = TileScheduler::units<decltype(policy)::value>(grid, splits_of_call(a, grid));
  });
  return int64_t{a.batch} * a.kv_heads * units;
}

inline BackwardWorkspace plan_workspace(void* base, const BackwardArguments& a) {
  const TileGrid grid = backward_grid(a);
  BackwardWorkspace w{};
  w.most = most_of_backward(a);
  const int64_t tiles = w.most.query_tiles * a.heads, rows = tiles * grid.tiling.query;
  const HeadDims padded = a.padded_head_dims();
  const bool is_divided = divides(static_cast<Policy>(a.schedule));
  // One for each warpgroup's rows of each KV tile, for dK and for dV.
  const int64_t sums = w.most.split_tiles * a.kv_heads * (grid.tiling.key / kWarpgroupRows) * 2;
  const int64_t floats_of_sums = w.most.split_tiles * a.kv_heads * grid.tiling.key * padded.sum();
  Cutter cutter(base);
  if (a.carries()) {
    w.arrays.dq_accumulator = a.carried.dq;
    w.arrays.split_sums = a.carried.keys;
  } else {
    cutter.take(w.arrays.dq_accumulator, rows * padded.qk);
  }
  cutter.take(w.arrays.delta, rows);
  cutter.take(w.arrays.dq_semaphores, tiles * backward::dq_parts(padded.qk));
  w.work_counters = is_divided ? 2 + most_numbers(a, w.most) : 1;
  cutter.take(w.arrays.next_work, w.work_counters);
  if (is_divided) {
    w.arrays.running_ctas = w.arrays.next_work + 1;
    w.arrays.whole_heads = w.arrays.next_work + 2;
    cutter.take(w.arrays.first_part_sums, floats_of_sums);
  }
  if (sums > 0) {
    const bool has_splits = a.is_pack() ? a.group_size() > 1 : splits_of_call(a, grid) > 1;
    if (has_splits) { cutter.take(w.arrays.split_sums, floats_of_sums); }
    w.split_semaphores = is_divided ? 2 * sums : sums;
    cutter.take(w.arrays.split_semaphores, w.split_semaphores);
    if (is_divided) { w.arrays.first_part_semaphores = w.arrays.split_semaphores + sums; }
  }
  if (a.dsinks) { cutter.take(w.arrays.sink_sums, int64_t(a.batch) * a.heads); }
  if (accumulation(static_cast<Policy>(a.schedule)) == Accumulation::kOrderFree) {
    cutter.take(w.arrays.scales, rows);
    cutter.take(w.arrays.needs_order, int64_t(a.batch) * a.kv_heads);
    cutter.take(w.arrays.any_needs_order, 1);
    cutter.take(w.arrays.any_marks, 1);
    cutter.take(w.arrays.key_statistics, w.most.key_chunks * a.kv_heads);
  }
  if (a.is_pack()) { w.pack = take_pack_arrays(cutter, a.batch, w.most); }
  w.bytes = cutter.bytes;
  return w;
}

}  // namespace dash_attn
