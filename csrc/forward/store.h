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

  __device__ Storer(Shared& shared, const KernelParams& params, int consumer)
      : shared_(shared), params_(params), consumer_(consumer) {}

  __device__ void run() {
    for (; wait_for_tile(shared_, q_) != kNoMoreTiles; q_ = q_.next()) {
      shared_.out_full[q_.slot()][consumer_].wait(q_.parity());
      write(shared_.tile[q_.slot()]);
      shared_.q_empty[q_.slot()].arrive();
    }
  }

 private:
  using Swizzle = typename Variant::Swizzle;

  // TMA leaves out rows past the sequence's end.
  __device__ __forceinline__ void write(const AnnouncedTile& tile) const {
    const int position = WarpgroupRows<Variant>::first_row(params_, tile.end, consumer_);
    if (position < tile.end) {
      const Element* staged = shared_.q[q_.slot()] + consumer_ * kWarpgroupRows * Swizzle::kColumns;
#pragma unroll
      for (int column = 0; column < Variant::kValueDim; column += Swizzle::kColumns) {
        cute::SM90_TMA_STORE_5D::copy(&params_.out, staged + column * Variant::kQuery, column,
                                      tile.head_group << params_.scheduler.group_shift, tile.rows.first + position,
                                      tile.rows.outer, tile.rows.wrap);
      }
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
