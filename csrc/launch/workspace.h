// The scratch memory of both passes: one allocation each, cut into arrays.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../backward/params.h"
#include "../config/tile_shapes.h"
#include "../device/gemm.h"
#include "../schedule/policy.h"
#include "../schedule/splits.h"
#include "arguments.h"

namespace dash_attn {

// Cuts memory into arrays; of a null base only `bytes` means anything.
class Cutter {
 public:
  explicit Cutter(void* base) : base_(static_cast<char*>(base)) {}

  template <typename T>
  void take(T*& array, int64_t count) {
    constexpr int64_t kAlignment = 128;  // bulk copies need 16
    array = reinterpret_cast<T*>(base_ + bytes);
    bytes += (count * int64_t(sizeof(T)) + kAlignment - 1) / kAlignment * kAlignment;
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

inline PackArrays take_pack_arrays(Cutter& cutter, int batch, const PackTotals& most) {
  PackArrays arrays{};
  cutter.take(arrays.sequences, batch);
  cutter.take(arrays.of_unit, most.units);
  if (most.query_tiles > 0) { cutter.take(arrays.of_query_tile, most.query_tiles); }
  cutter.take(arrays.totals, 1);
  return arrays;
}

inline TileGrid backward_grid(const AttentionArguments& a) {
  const TileShape tile = backward_tile_shape(padded_head_dim(a.head_dim));
  return {{tile.query, tile.key, 1}, {a.mask.kind, a.mask.window, a.sequence()}};
}

// Of a dense batch what its work takes; of a pack, whose lengths the host does not know, no less than that for any
// lengths: a sequence's last tile may be short.
inline PackTotals most_of_backward(const BackwardArguments& a) {
  using backward::num_chunks;
  const TileGrid grid = backward_grid(a);
  const int64_t batch = a.batch;
  PackTotals most{};
  if (!a.is_pack()) {
    most.query_tiles = int(batch * grid.query_tiles());
    most.split_tiles = num_splits(a.group_size(), grid) > 1 ? int(batch * grid.kv_tiles()) : 0;
    most.query_chunks = int(batch * num_chunks(a.seqlen_q));
    most.key_chunks = int(batch * num_chunks(a.seqlen_k));
    return most;
  }
  const auto parts = [&](int64_t rows, int64_t size, int64_t sequences) {
    return int(std::min(rows, rows / size + std::min(rows, sequences)));
  };
  const int64_t split_sequences = a.seqlen_q / fewest_queries_of_splits(a.group_size(), grid.tiling);
  most.query_tiles = parts(a.seqlen_q, grid.tiling.query, batch);
  most.split_tiles =
      split_sequences == 0 ? 0 : parts(a.seqlen_k, grid.tiling.key, std::min<int64_t>(batch, split_sequences));
  most.query_chunks = parts(a.seqlen_q, backward::kMinChunkRows, batch);
  most.key_chunks = parts(a.seqlen_k, backward::kMinChunkRows, batch);
  most.units = parts(a.seqlen_k, grid.tiling.key, batch) * a.group_size();
  return most;
}

struct BackwardWorkspace {
  backward::Workspace arrays;
  PackArrays pack;
  PackTotals most;
  int64_t split_semaphores;
  int64_t bytes;
};

inline BackwardWorkspace plan_workspace(void* base, const BackwardArguments& a) {
  using backward::KeyStatistics, backward::NeedsOrder;
  const TileGrid grid = backward_grid(a);
  BackwardWorkspace w{};
  w.most = most_of_backward(a);
  const int64_t tiles = int64_t(w.most.query_tiles) * a.heads, rows = tiles * grid.tiling.query;
  const int head_dim = padded_head_dim(a.head_dim);
  // One for each warpgroup's rows of each KV tile, for dK and for dV.
  w.split_semaphores = int64_t(w.most.split_tiles) * a.kv_heads * (grid.tiling.key / kWarpgroupRows) * 2;
  Cutter cutter(base);
  cutter.take(w.arrays.dq_accumulator, rows * head_dim);
  cutter.take(w.arrays.delta, rows);
  cutter.take(w.arrays.dq_semaphores, tiles);
  cutter.take(w.arrays.next_work, 1);
  if (w.split_semaphores > 0) {
    cutter.take(w.arrays.split_sums, w.split_semaphores * kWarpgroupRows * head_dim);
    cutter.take(w.arrays.split_semaphores, w.split_semaphores);
  }
  if (accumulation(static_cast<Policy>(a.schedule)) == Accumulation::kOrderFree) {
    cutter.take(w.arrays.scales, rows);
    cutter.take(w.arrays.needs_order, int64_t(a.batch) * a.kv_heads);
    cutter.take(w.arrays.query_norms, int64_t(w.most.query_chunks) * a.heads);
    cutter.take(w.arrays.key_statistics, int64_t(w.most.key_chunks) * a.kv_heads);
  }
  if (a.is_pack()) { w.pack = take_pack_arrays(cutter, a.batch, w.most); }
  w.bytes = cutter.bytes;
  return w;
}

}  // namespace dash_attn
