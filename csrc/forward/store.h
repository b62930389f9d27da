// The storers: for each consumer warpgroup one thread, which writes out what the warpgroup staged in the place of its Q
// and lets the loader have that place when TMA has read it.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "../device/ptx.h"
#include "config.h"
#include "params.h"
#include "tiles.h"

namespace dash_attn::forward {

template <typename Config>
class Storer {
 public:
  using Element = typename Config::Element;
  using Shared = SharedStorage<Config>;

  __device__ Storer(Shared& shared, const KernelParams& params, int consumer)
      : shared_(shared), params_(params), consumer_(consumer) {}

  __device__ void run() {
    for (TileWalk tiles(params_.order, blockIdx.x, gridDim.x); tiles.more(); tiles.next()) { store(tiles.tile()); }
  }

 private:
  __device__ __forceinline__ void store(const QueryTile& tile) {
    const TileOrder& order = params_.order;
    const int first_row = consumer_ * kWarpgroupRows;
    const int position = order.position_of(tile.index, first_row);
    const Element* rows = shared_.q[q_.slot()] + first_row * kSwizzleColumns;
    shared_.out_full[q_.slot()][consumer_].wait(q_.parity());
    // TMA leaves out what lies outside the tensor.
#pragma unroll
    for (int column = 0; column < Config::kHeadDim; column += kSwizzleColumns) {
      cute::SM90_TMA_STORE_5D::copy(&params_.out, rows + column * Config::kQuery, column, 0, position, tile.head_group,
                                    tile.batch);
    }
    ptx::bulk_commit();
    ptx::bulk_wait_read();
    shared_.q_empty[q_.slot()].arrive();
    q_ = q_.next();
  }

  Shared& shared_;
  const KernelParams& params_;
  const int consumer_;
  RingIndex<Config::kQueryStages> q_;
};

}  // namespace dash_attn::forward
