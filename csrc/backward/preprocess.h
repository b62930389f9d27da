// Before the main kernel: D = rowsum(dO * O), less the gradient of LSE where there is one, times 1 - p with dropout.
// All semaphores and the counter of work are set to zero. Where dQ is added in no order its accumulator is cleared too,
// and order-free each row gets its unit.
#pragma once

#include "../device/fragment.h"
#include "dq_layout.h"
#include "order_free/scale.h"
#include "params.h"
#include "rows.h"

namespace dash_attn::backward {

constexpr int kPreprocessThreads = 256;

template <typename Element>
struct PreprocessParams {
  StridedView<const Element> out, dout;
  Workspace workspace;
  SequencesOfCall call;
  HeadDims head_dims;
  int num_blocks;  // of the whole call; a grid of fewer takes several each
  int num_dq_semaphores, num_split_semaphores;
  bool clear_dq;                            // its partials are added in no order
  const float *softmax_lse, *dsoftmax_lse;  // the caller's; the second null where LSE has no gradient
  int64_t lse_batch_stride, lse_head_stride;
  float kept;           // 1 - p: 1 / (1 - p) is left out of dS, and multiplies the sums
  ScaleSettings scale;  // of order-free accumulation
};

// How blocks share the rows of a query tile, which whole blocks make up.
template <typename Geometry>
struct PreprocessTile {
  static constexpr int kThreadsPerRow = kRowThreads<Geometry::kValueDim>;
  static constexpr int kRowsAtOnce = kPreprocessThreads / kThreadsPerRow;
  static constexpr int kPassesOfTile = Geometry::kQuery / kRowsAtOnce;
  static constexpr int kPasses = kPassesOfTile % 2 == 0 ? 2 : kPassesOfTile;  // of a block
  static constexpr int kRows = kPasses * kRowsAtOnce;
  static constexpr int kBlocks = Geometry::kQuery / kRows;  // of a query tile, in its order
  static_assert(kBlocks * kRows == Geometry::kQuery);
};

// Sets `count` integers to zero, with all threads of the grid.
__device__ __forceinline__ void clear_integers(int* integers, int count) {
  for (int64_t i = int64_t(blockIdx.x) * kPreprocessThreads + threadIdx.x; i < count;
       i += int64_t(gridDim.x) * kPreprocessThreads) {
    integers[i] = 0;
  }
}

// D less the gradient of LSE, which is looked at only where LSE is finite.
template <typename Element>
__device__ __forceinline__ float with_gradient_of_lse(const PreprocessParams<Element>& params, const TileOwner& owner,
                                                      int row, float delta) {
  if (!params.dsoftmax_lse || row >= owner.lengths.seqlen_q) { return delta; }
  const int64_t index =
      owner.batch * params.lse_batch_stride + owner.head * params.lse_head_stride + owner.first_row + row;
  return isinf(params.softmax_lse[index]) ? delta : delta - params.dsoftmax_lse[index];
}

template <typename Geometry, bool kOrderFree>
__device__ __forceinline__ void preprocess_block(const PreprocessParams<typename Geometry::Element>& params,
                                                 int block) {
  using Element = typename Geometry::Element;
  using Layout = DqLayout<Geometry>;
  using Tile = PreprocessTile<Geometry>;
  constexpr int kThreadsPerRow = Tile::kThreadsPerRow, kPasses = Tile::kPasses;
  constexpr int kTileRows = Geometry::kQuery, kQkDim = Geometry::kQkDim;
  const int tile = block / Tile::kBlocks;
  TileOwner owner;
  if (!find_owner<kTileRows>(params.call, tile, owner)) { return; }
  const int first_of_tile = block % Tile::kBlocks * Tile::kRows;
  const int first_row = owner.row(kTileRows) + first_of_tile;
  const int column = threadIdx.x % kThreadsPerRow * 8;

  uint4 out[kPasses], dout[kPasses];
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int row = first_row + (pass * kPreprocessThreads + threadIdx.x) / kThreadsPerRow;
    const bool inside = row < owner.lengths.seqlen_q && column < params.head_dims.v;
    dout[pass] = load8(params.dout, owner.batch, owner.first_row + row, owner.head, column, inside);
    out[pass] = load8(params.out, owner.batch, owner.first_row + row, owner.head, column, inside);
  }

  KeyStatistics keys{};
  if constexpr (kOrderFree) {
    ptx::wait_for_previous_kernel();  // the statistics
    const int group_size = params.call.group_size();
    keys = combine_warp(chunk_key_statistics(params.workspace, key_chunks_of(params.call, owner), owner.lengths));
    if (first_row == 0 && owner.head % group_size == 0 && threadIdx.x < 32) {
      decide_order(params.workspace, params.call, params.scale, owner, query_chunks_of(params.call, owner), keys);
    }
  }

#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int row = first_row + (pass * kPreprocessThreads + threadIdx.x) / kThreadsPerRow;
    const float delta =
        with_gradient_of_lse(params, owner, row, sum_of_row<kThreadsPerRow>(dot8<Element>(out[pass], dout[pass]))) *
        params.kept;
    float squares = 0.f, largest = 0.f, dout_norm = 0.f;
    if constexpr (kOrderFree) {
      measure8<Element>(dout[pass], squares, largest);
      dout_norm = norm_bound<kThreadsPerRow, Geometry::kValueDim>(sum_of_row<kThreadsPerRow>(squares), largest);
    }
    const int64_t tile_row = int64_t(tile) * kTileRows;
    const int row_of_tile = row - owner.row(kTileRows);
    if (kOrderFree || params.clear_dq) {
      float* const accumulator = params.workspace.dq_accumulator + (tile_row + row_of_tile) * kQkDim;
#pragma unroll
      for (int i = column; i < kQkDim; i += kThreadsPerRow * 8) {
        float4* const eight = reinterpret_cast<float4*>(accumulator + i);
        eight[0] = eight[1] = make_float4(0.f, 0.f, 0.f, 0.f);
      }
    }
    if (column != 0) { continue; }
    params.workspace.delta[tile_row + statistic_position(row_of_tile)] = delta;
    if constexpr (kOrderFree) {
      params.workspace.scales[tile_row + Layout::scale_position(row_of_tile)] =
          row_scale<Geometry>(params.scale, mask_of(params.call.mask, owner.lengths), row, dout_norm, delta, keys,
                              needs_order(params.workspace, params.call, owner));
    }
  }
}

template <typename Geometry, bool kOrderFree>
__global__ void __launch_bounds__(kPreprocessThreads)
    preprocess_kernel(const PreprocessParams<typename Geometry::Element> params) {
  ptx::launch_dependents();
  clear_integers(params.workspace.dq_semaphores, params.num_dq_semaphores);
  clear_integers(params.workspace.split_semaphores, params.num_split_semaphores);
  clear_integers(params.workspace.next_work, 1);
  for (int block = blockIdx.x; block < params.num_blocks; block += gridDim.x) {
    preprocess_block<Geometry, kOrderFree>(params, block);
  }
  if constexpr (kOrderFree) { ptx::wait_for_previous_kernel(); }  // also where no block had a row
}

}  // namespace dash_attn::backward
