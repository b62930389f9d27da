// The storers: for each consumer warpgroup one thread, which writes out what the warpgroup staged in the place of its Q
// and lets the loader have that place when TMA has read it.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "../device/ptx.h"
#include "config.h"
#include "params.h"
#include "rows.h"

namespace dash_attn::forward {

template <typename Variant>
class Storer {
 public:
  using Element = typename Variant::Element;
  using Shared = SharedStorage<Variant>;
  using Rows = WarpgroupRows<Variant>;

  __device__ Storer(Shared& shared, const KernelParams& params, int consumer)
      : shared_(shared), params_(params), consumer_(consumer) {}

  __device__ void run() {
    for (int tile; (tile = wait_for_tile(shared_, q_)) != kNoMoreTiles; q_ = q_.next()) {
      shared_.out_full[q_.slot()][consumer_].wait(q_.parity());
      write(Rows(params_.scheduler, tile, consumer_));
      shared_.q_empty[q_.slot()].arrive();
    }
  }

 private:
  // TMA leaves out what lies outside the tensor.
  __device__ __forceinline__ void write(const Rows& rows) const {
    const QueryTile tile = shared_.tile[q_.slot()];
    const Element* staged = shared_.q[q_.slot()] + consumer_ * kWarpgroupRows * kSwizzleColumns;
#pragma unroll
    for (int column = 0; column < Variant::kHeadDim; column += kSwizzleColumns) {
      cute::SM90_TMA_STORE_5D::copy(&params_.out, staged + column * Variant::kQuery, column, 0, rows.first_position,
                                    tile.head_group, tile.batch);
    }
    ptx::bulk_commit();
    ptx::bulk_wait_read();
  }

  Shared& shared_;
  const KernelParams& params_;
  const int consumer_;
  RingIndex<Variant::kQueryStages> q_;
};

}  // namespace dash_attn::forward
