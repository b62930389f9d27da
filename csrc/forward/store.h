// The storers: for each consumer warpgroup one thread, which writes out what the warpgroup has staged in place of its Q
// and releases that buffer once TMA has read it.
#pragma once

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
    for (; wait_for_output() != kNoMoreTiles; q_ = q_.next()) {
      write(shared_.tile(q_));
      if constexpr (Variant::kOutputInValues) {
        shared_.out_left[consumer_].arrive();
      } else {
        shared_.q_empty[q_.slot()].arrive();
      }
    }
  }

 private:
  using Swizzle = typename Variant::Swizzle;

  // Returns the end of the tile, or kNoMoreTiles. If the output is staged in place of V, the loader does not wait for
  // it before it loads the next Q, and a storer that waited for Q could miss one. The consumers then signal the end of
  // the work too.
  __device__ __forceinline__ int wait_for_output() const {
    if constexpr (!Variant::kOutputInValues) {
      if (wait_for_tile(shared_, q_) == kNoMoreTiles) { return kNoMoreTiles; }
    }
    shared_.out_full[q_.slot()][consumer_].wait(q_.parity());
    return shared_.tile(q_).end;
  }

  // TMA does not write rows past the sequence's end.
  __device__ __forceinline__ void write(const AnnouncedTile& tile) const {
    const int position = WarpgroupRows<Variant>::first_row(params_, tile.end, consumer_);
    if (position < tile.end) {
      const Element* staged = Variant::kOutputInValues
                                  ? shared_.v[shared_.output_slot[consumer_]]
                                  : shared_.q[q_.slot()] + consumer_ * kWarpgroupRows * Swizzle::kColumns;
#pragma unroll
      for (int column = 0; column < Variant::kValueDim; column += Swizzle::kColumns) {
        ptx::store_box(params_.out, staged + column * Variant::kOutputRows,
                       {column, tile.head_group << params_.scheduler.group_shift, tile.rows.first + position,
                        tile.rows.outer, tile.rows.wrap});
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
