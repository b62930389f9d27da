// Runs before the main kernel. D = rowsum(dO * O), minus the gradient of LSE if there is one, times 1 - p with dropout.
// All semaphores and the work counter are cleared and, for order-free sums, each row gets its unit.
#pragma once

#include "../device/fragment.h"
#include "order_free/scale.h"
#include "order_free/statistics.h"
#include "params.h"
#include "rows.h"

namespace dash_attn::backward {

struct PreprocessParams {
  StridedView<const uint16_t> out, dout;
  bool is_bf16;
  StridedView<uint16_t> dq;  // rows that see no key are zeroed here; null if dQ is converted
  Workspace workspace;
  SequencesOfCall call;
  HeadDims head_dims;
  int num_blocks;  // of the whole call; a smaller grid loops over them
  int num_dq_semaphores, num_split_semaphores, num_work_counters;
  const float *softmax_lse, *dsoftmax_lse;  // the caller's; the second is null if LSE has no gradient
  int64_t lse_batch_stride, lse_head_stride;
  float kept;  // 1 - p; dS leaves out the factor 1 / (1 - p), which multiplies the sums
};

// Clears `count` integers, with all threads of the grid.
__device__ __forceinline__ void clear_integers(int* integers, int count) {
  for (int64_t i = int64_t(blockIdx.x) * kPreprocessThreads + threadIdx.x; i < count;
       i += int64_t(gridDim.x) * kPreprocessThreads) {
    integers[i] = 0;
  }
}

// The index of a row's LSE.
__device__ __forceinline__ int64_t lse_index(const PreprocessParams& params, const TileOwner& owner, int row) {
  return owner.batch * params.lse_batch_stride + owner.head * params.lse_head_stride + owner.first_row + row;
}

// D minus the gradient of LSE, which is read only where LSE is finite.
__device__ __forceinline__ float with_gradient_of_lse(const PreprocessParams& params, const TileOwner& owner, int row,
                                                      float delta) {
  if (!params.dsoftmax_lse || row >= owner.lengths.seqlen_q) { return delta; }
  const int64_t index = lse_index(params, owner, row);
  return isinf(params.softmax_lse[index]) ? delta : delta - params.dsoftmax_lse[index];
}

// Whether the threads of this warp write rows, one each.
template <typename Tile>
__device__ __forceinline__ bool writes_rows() {
  return threadIdx.x / 32 * 32 < Tile::kRows;
}

// For order-free sums: writes D and the unit of each row of a block. Its dO * O sums to `products`, and its dO * dO to
// `squares`.
template <typename Tile>
__device__ __forceinline__ void write_rows(const PreprocessParams& params, int tile, const TileOwner& owner,
                                           int first_of_tile, const KeyStatistics& keys, const float* products,
                                           const float* squares) {
  constexpr int kRows = Tile::kRows, kTileRows = Tile::kTileRows;
  if (threadIdx.x >= kRows) { return; }
  const int row_of_tile = first_of_tile + threadIdx.x, row = owner.row(kTileRows) + row_of_tile;
  const float delta = with_gradient_of_lse(params, owner, row, products[threadIdx.x]);
  const float lse = row < owner.lengths.seqlen_q ? params.softmax_lse[lse_index(params, owner, row)] : INFINITY;
  const uint16_t* const dout = params.dout.row(owner.batch, owner.first_row + row, owner.head);
  const float dout_norm = row < owner.lengths.seqlen_q
                              ? norm_bound(squares[threadIdx.x], dout, params.head_dims.v, params.is_bf16)
                              : 0.f;
  const int64_t first_of_workspace = int64_t(tile) * kTileRows;
  params.workspace.delta[first_of_workspace + statistic_position(row_of_tile)] = delta;
  const TileGrid grid{Tile::kNarrowTiling, mask_of(params.call.mask, owner.lengths)};
  const RowScale scale = row_scale(params.head_dims, !params.is_bf16, grid, row, {lse, dout_norm, delta}, keys);
  params.workspace.scales[first_of_workspace + row_of_tile] = scale.stored;
  if (scale.needs_order) {
    needs_order(params.workspace, params.call, owner) = 1;
    *params.workspace.any_needs_order = 1;
  }
}

// Zeroes dQ of a block's rows if no KV tile adds to it. The caller has checked that there is a dQ.
template <typename Tile>
__device__ __forceinline__ void zero_unseen_rows(const PreprocessParams& params, const TileOwner& owner,
                                                 int first_row) {
  const int column = threadIdx.x % Tile::kThreadsPerRow * 8;
  if (adds_to_query_tile(params.call, Tile::kNarrowTiling, owner) > 0 || column >= params.head_dims.qk) { return; }
#pragma unroll 1
  for (int pass = 0; pass < Tile::kPasses; ++pass) {
    const int row = first_row + (pass * kPreprocessThreads + threadIdx.x) / Tile::kThreadsPerRow;
    if (row >= owner.lengths.seqlen_q) { return; }
    *reinterpret_cast<uint4*>(params.dq.row(owner.batch, owner.first_row + row, owner.head) + column) =
        make_uint4(0, 0, 0, 0);
  }
}

// The same for all blocks under a mask by key columns, whose plan alone says which rows see no key.
template <typename Tile>
__device__ __forceinline__ void zero_unseen_rows_of_columns(const PreprocessParams& params) {
  for (int block = blockIdx.x; block < params.num_blocks; block += gridDim.x) {
    TileOwner owner;
    if (!find_owner<Tile::kTileRows>(params.call, block / Tile::kBlocks, owner)) { return; }
    zero_unseen_rows<Tile>(params, owner, owner.row(Tile::kTileRows) + block % Tile::kBlocks * Tile::kRows);
  }
}

template <typename Tile, bool kOrderFree>
__device__ __forceinline__ void preprocess_block(const PreprocessParams& params, int block) {
  constexpr int kThreadsPerRow = Tile::kThreadsPerRow, kPasses = Tile::kPasses, kTileRows = Tile::kTileRows;
  const int tile = block / Tile::kBlocks;
  TileOwner owner;
  if (!find_owner<kTileRows>(params.call, tile, owner)) { return; }
  const int first_of_tile = block % Tile::kBlocks * Tile::kRows;
  const int first_row = owner.row(kTileRows) + first_of_tile;
  const int column = threadIdx.x % kThreadsPerRow * 8;
  if (Tile::kMayBeNarrow && params.dq.data && !params.call.columns.exist()) {
    zero_unseen_rows<Tile>(params, owner, first_row);
  }

  uint4 out[kPasses], dout[kPasses];
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int row = first_row + (pass * kPreprocessThreads + threadIdx.x) / kThreadsPerRow;
    const bool inside = row < owner.lengths.seqlen_q && column < params.head_dims.v;
    dout[pass] = load8(params.dout, owner.batch, owner.first_row + row, owner.head, column, inside);
    out[pass] = load8(params.out, owner.batch, owner.first_row + row, owner.head, column, inside);
  }

  KeyStatistics keys;
  if constexpr (kOrderFree) {
    if (writes_rows<Tile>()) {          // while the rows are being loaded
      ptx::wait_for_previous_kernel();  // the statistics
      keys = combine_warp(chunk_key_statistics(params.workspace, first_chunk(params.call, owner), owner.lengths));
    }
  }

  float products[kPasses], squares[kPasses];  // of this thread's columns, then of its rows
  with_element(params.is_bf16, [&](auto element) {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      products[pass] = dot8<decltype(element)>(out[pass], dout[pass]);
      if (kOrderFree) { squares[pass] = dot8<decltype(element)>(dout[pass], dout[pass]); }
    }
  });

#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    products[pass] = sum_of_row<kThreadsPerRow>(products[pass]);
    if (kOrderFree) { squares[pass] = sum_of_row<kThreadsPerRow>(squares[pass]); }
  }

  __shared__ float products_of_rows[kOrderFree ? Tile::kRows : 1], squares_of_rows[kOrderFree ? Tile::kRows : 1];
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int row_of_block = (pass * kPreprocessThreads + threadIdx.x) / kThreadsPerRow;
    if (column != 0) { continue; }
    if constexpr (kOrderFree) {
      products_of_rows[row_of_block] = products[pass];
      squares_of_rows[row_of_block] = squares[pass];
    } else {
      const float delta = with_gradient_of_lse(params, owner, first_row + row_of_block, products[pass]) * params.kept;
      const int row_of_tile = first_of_tile + row_of_block;
      params.workspace.delta[int64_t(tile) * kTileRows + statistic_position(row_of_tile)] = delta;
    }
  }
  if constexpr (kOrderFree) {
    __syncthreads();
    write_rows<Tile>(params, tile, owner, first_of_tile, keys, products_of_rows, squares_of_rows);
    __syncthreads();  // the next block reuses the arrays
  }
}

// Limits a thread to 64 registers, or to 48. The compiler would take more for write_rows.
template <typename Tile>
constexpr int kPreprocessBlocksOfSm = Tile::kMayBeNarrow ? 4 : 5;

__device__ __forceinline__ void clear_counters(const PreprocessParams& params) {
  clear_integers(params.workspace.dq_semaphores, params.num_dq_semaphores);
  clear_integers(params.workspace.split_semaphores, params.num_split_semaphores);
  clear_integers(params.workspace.next_work, params.num_work_counters);
}

template <typename Tile>
__global__ void __launch_bounds__(kPreprocessThreads, kPreprocessBlocksOfSm<Tile>)
    preprocess_kernel(const PreprocessParams params) {
  ptx::launch_dependents();
  clear_counters(params);
  for (int block = blockIdx.x; block < params.num_blocks; block += gridDim.x) {
    if (Tile::kMayBeNarrow && params.workspace.is_order_free()) {
      preprocess_block<Tile, Tile::kMayBeNarrow>(params, block);
    } else {
      preprocess_block<Tile, false>(params, block);
    }
  }
  ptx::wait_for_previous_kernel();  // whoever waits for this kernel also waits for that one
  if (Tile::kMayBeNarrow && params.dq.data && params.call.columns.exist()) {
    zero_unseen_rows_of_columns<Tile>(params);
  }
}

}  // namespace dash_attn::backward
