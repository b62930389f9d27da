// dQ = scale * accumulator, put in order and rounded. An order-free accumulator holds integers in units of each
// row's scale. Starts while the last CTAs of the main kernel are running, on SMs that have none left: a block waits for
// the sum of its own tile.
#pragma once

#include "../config/fixed_point.h"
#include "../schedule/tile_grid.h"
#include "dq_layout.h"
#include "order_free/scale.h"
#include "params.h"
#include "rows.h"

namespace dash_attn::backward {

constexpr int kConvertThreads = 256;

template <typename Element>
struct ConvertParams {
  StridedView<Element> dq;
  Workspace workspace;
  SequencesOfCall call;
  int num_blocks;  // of the whole call: a query tile of the workspace each; a grid of fewer takes several
  int head_dim;
  float dq_scale;  // of the sum
  Range continues;  // the query tiles that calls before have added to: CarriedSums
};

template <typename Geometry>
struct ConvertTile {
  // Rows of 4 (mod 16) words spread the fragment's columns of 8 over all banks.
  static constexpr int kPitch = Geometry::kQkDim + 4;
  static constexpr int kBytes = Geometry::kQuery * kPitch * sizeof(float);
};

template <typename Geometry, bool kOrderFree>
__device__ __forceinline__ void convert_block(const ConvertParams<typename Geometry::Element>& params, int block,
                                              float* tile) {
  using Element = typename Geometry::Element;
  using Layout = DqLayout<Geometry>;
  constexpr int kQuads = Geometry::kDqTileFloats / 4;
  TileOwner owner;
  if (!find_owner<Geometry::kQuery>(params.call, block, owner)) { return; }

  // Nobody has written the accumulator of queries that see no key, here or, of carried sums, in the calls before.
  const TileGrid grid{{Geometry::kQuery, Geometry::kKey, 1}, mask_of(params.call.mask, owner.lengths)};
  const int adds = grid.kv_tiles_of(owner.query_tile).count;
  const bool live = adds > 0 || params.continues.contains(owner.query_tile);
  if (adds > 0 && threadIdx.x < Geometry::kDqParts) {
    const int* const semaphore = params.workspace.dq_semaphores + int64_t(block) * Geometry::kDqParts + threadIdx.x;
    while (ptx::load_acquire(semaphore) != adds) { __nanosleep(100); }
  }
  __syncthreads();
  bool integers = false;
  if constexpr (kOrderFree) { integers = live && !needs_order(params.workspace, params.call, owner).any(); }
  const uint32_t offset = fixed_point::kOffsetBits * uint32_t(adds);  // every partial has brought it along
  const float4* const source =
      reinterpret_cast<const float4*>(params.workspace.dq_accumulator + int64_t(block) * Geometry::kDqTileFloats);
#pragma unroll
  for (int index = threadIdx.x; index < kQuads; index += kConvertThreads) {
    // By way of L1, which has no older contents: the acquire has come before, and nobody reads a sum until then.
    const float4 quad = live ? __ldcs(source + index) : make_float4(0.f, 0.f, 0.f, 0.f);
    const float values[4] = {quad.x, quad.y, quad.z, quad.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const auto element = Layout::element(index, i);
      tile[element.query * ConvertTile<Geometry>::kPitch + element.column] =
          integers ? float(int(__float_as_uint(values[i]) - offset)) : values[i] * params.dq_scale;
    }
  }
  __syncthreads();

  constexpr int kThreadsPerRow = kRowThreads<Geometry::kQkDim>;
  const int column = threadIdx.x % kThreadsPerRow * 8;
#pragma unroll
  for (int row = threadIdx.x / kThreadsPerRow; row < Geometry::kQuery; row += kConvertThreads / kThreadsPerRow) {
    const int position = owner.row(Geometry::kQuery) + row;
    if (column >= params.head_dim || position >= owner.lengths.seqlen_q) { break; }
    const float4* const values = reinterpret_cast<const float4*>(tile + row * ConvertTile<Geometry>::kPitch + column);
    float4 low = values[0], high = values[1];
    if (integers) {
      const int64_t first_row = int64_t(block) * Geometry::kQuery;
      const float unit = unit_of(params.workspace.scales[first_row + Layout::scale_position(row)]);
      const auto scaled = [&](float4 x) {
        return make_float4(x.x * unit * params.dq_scale, x.y * unit * params.dq_scale, x.z * unit * params.dq_scale,
                           x.w * unit * params.dq_scale);
      };
      low = scaled(low);
      high = scaled(high);
    }
    Element* const dq = params.dq.row(owner.batch, owner.first_row + position, owner.head) + column;
    __stcs(reinterpret_cast<uint4*>(dq), make_uint4(pack<Element>(low.x, low.y), pack<Element>(low.z, low.w),
                                                    pack<Element>(high.x, high.y), pack<Element>(high.z, high.w)));
  }
}

template <typename Geometry, bool kOrderFree>
__global__ void __launch_bounds__(kConvertThreads)
    convert_kernel(const ConvertParams<typename Geometry::Element> params) {
  extern __shared__ float tile[];
  for (int block = blockIdx.x; block < params.num_blocks; block += gridDim.x) {
    if (block != int(blockIdx.x)) { __syncthreads(); }  // the tile before has been read
    convert_block<Geometry, kOrderFree>(params, block, tile);
  }
  ptx::wait_for_previous_kernel();  // so that the end of this kernel is the end of both
}

}  // namespace dash_attn::backward
