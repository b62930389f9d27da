// The backward's scratch memory: one allocation cut into the arrays of backward::Workspace.
#pragma once

#include "../backward/params.h"
#include "../config/tile_shapes.h"
#include "../device/gemm.h"
#include "../schedule/policy.h"
#include "../schedule/splits.h"
#include "arguments.h"

namespace dash_attn {

struct WorkspacePlan {
  backward::Workspace arrays;
  int64_t bytes;
};

inline TileGrid backward_grid(const AttentionArguments& a) {
  const TileShape tile = backward_tile_shape(padded_head_dim(a.head_dim));
  return {{tile.query, tile.key, 1}, {a.mask, a.sequence()}};
}

// Of the sums over splits: one for each warpgroup's rows of each KV tile, for dK and for dV.
inline int64_t num_split_semaphores(const BackwardArguments& a) {
  const TileGrid grid = backward_grid(a);
  if (num_splits(a.group_size(), grid) == 1) { return 0; }
  return int64_t(a.batch) * a.kv_heads * grid.kv_tiles() * (grid.tiling.key / kWarpgroupRows) * 2;
}

// With a null `base` only `bytes` means anything.
inline WorkspacePlan plan_workspace(void* base, const BackwardArguments& a) {
  constexpr int64_t kAlignment = 128;  // bulk copies need 16
  const TileShape tile = backward_tile_shape(padded_head_dim(a.head_dim));
  const int64_t query_heads = int64_t(a.batch) * a.heads, kv_heads = int64_t(a.batch) * a.kv_heads;
  const int64_t tiles = query_heads * ceil_div(a.seqlen_q, tile.query);
  const int64_t rows = tiles * tile.query;
  int64_t offset = 0;
  const auto take = [&](int64_t bytes) {
    char* const array = static_cast<char*>(base) + offset;
    offset += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return array;
  };
  WorkspacePlan plan{};
  plan.arrays.dq_accumulator = reinterpret_cast<float*>(take(rows * tile.head_dim * sizeof(float)));
  plan.arrays.delta = reinterpret_cast<float*>(take(rows * sizeof(float)));
  plan.arrays.dq_semaphores = reinterpret_cast<int*>(take(tiles * sizeof(int)));
  plan.arrays.next_work = reinterpret_cast<int*>(take(sizeof(int)));
  if (const int64_t semaphores = num_split_semaphores(a)) {
    const int64_t elements = semaphores * kWarpgroupRows * tile.head_dim;
    plan.arrays.split_sums = reinterpret_cast<float*>(take(elements * sizeof(float)));
    plan.arrays.split_semaphores = reinterpret_cast<int*>(take(semaphores * sizeof(int)));
  }
  if (accumulation(static_cast<Policy>(a.schedule)) == Accumulation::kOrderFree) {
    using backward::KeyStatistics, backward::NeedsOrder, backward::num_chunks;
    plan.arrays.scales = reinterpret_cast<uint8_t*>(take(rows));
    plan.arrays.needs_order = reinterpret_cast<NeedsOrder*>(take(kv_heads * sizeof(NeedsOrder)));
    plan.arrays.query_norms = reinterpret_cast<float*>(take(query_heads * num_chunks(a.seqlen_q) * sizeof(float)));
    plan.arrays.key_statistics =
        reinterpret_cast<KeyStatistics*>(take(kv_heads * num_chunks(a.seqlen_k) * sizeof(KeyStatistics)));
  }
  plan.bytes = offset;
  return plan;
}

}  // namespace dash_attn
