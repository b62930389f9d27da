// How a warpgroup's rows leave: the log-sum-exp straight from registers, the output by TMA from where their Q was.
#pragma once

#include <cutlass/arch/barrier.h>

#include <cute/arch/copy_sm90_tma.hpp>

#include "../device/fragment.h"
#include "config.h"
#include "params.h"
#include "rows.h"
#include "softmax.h"

namespace dash_attn::forward {

template <typename Config>
class OutputWriter {
 public:
  using Element = typename Config::Element;
  using Shared = SharedStorage<Config>;
  using Output = float[Config::kHeadDim / 2];  // a 64 x kHeadDim fragment
  using Rows = WarpgroupRows<Config>;

  __device__ OutputWriter(Shared& shared, const KernelParams& params, int consumer, int thread)
      : shared_(shared), params_(params), consumer_(consumer), thread_(thread) {}

  // `out` is the sum of P V.
  __device__ __forceinline__ void store(Output& out, OnlineSoftmax& softmax, const Rows& rows) {
    const TileOrder& order = params_.order;
    RowStatistic inverse_sum, lse;
    softmax.finish(inverse_sum, lse);
    multiply_rows(out, inverse_sum);
#pragma unroll
    for (int row = 0; row < kRowsPerThread; ++row) {
      const int position = rows.position(order, thread_, row);
      if (make_mask<Config>(order).visible_keys(position) <= 0) {
        lse[row] = INFINITY;
#pragma unroll
        for (int i = 0; i < Config::kHeadDim / 2; ++i) {
          if (row_of(i) == row) { out[i] = 0.f; }
        }
      }
      if (thread_ % 4 == 0 && position < order.problem.seqlen_q) {
        const int64_t head =
            (int64_t(rows.tile.batch) * order.head_groups << order.group_shift) + rows.head(order, thread_, row);
        params_.softmax_lse[head * order.problem.seqlen_q + position] = lse[row];
      }
    }
    store_tile(out, rows);
  }

  // Lets the loader bring the Q of a later tile to where the last output was staged. Called late enough that TMA has
  // read it by then, and before this warpgroup waits for that Q.
  __device__ __forceinline__ void release_q() {
    if (!leaving_) { return; }
    leaving_ = false;
    if (thread_ == 0) {
      ptx::bulk_wait_read();
      shared_.q_empty[leaving_slot_].arrive();
    }
  }

 private:
  // TMA writes what lies inside the tensor.
  __device__ __forceinline__ void store_tile(const Output& out, const Rows& rows) {
    uint32_t packed[Config::kHeadDim / 16][4];
    pack_slices<Element>(packed, out);
    Element* staged = shared_.q[rows.q.slot()];
    const int first_row = consumer_ * kWarpgroupRows;
    // Every warp's products have read Q.
    sync_warpgroup();
    store_rows<Config::kQuery>(staged, first_row, packed, thread_ / 32, thread_ % 32);
    ptx::fence_async_shared();
    sync_warpgroup();
    if (thread_ == 0) {
#pragma unroll
      for (int column = 0; column < Config::kHeadDim; column += kSwizzleColumns) {
        cute::SM90_TMA_STORE_5D::copy(&params_.out, staged + column * Config::kQuery + first_row * kSwizzleColumns,
                                      column, 0, rows.first_position, rows.tile.head_group, rows.tile.batch);
      }
      ptx::bulk_commit();
    }
    leaving_ = true;
    leaving_slot_ = rows.q.slot();
  }

  __device__ __forceinline__ void sync_warpgroup() const {
    cutlass::arch::NamedBarrier::sync(kWarpgroupThreads, uint32_t(consumer_));
  }

  Shared& shared_;
  const KernelParams& params_;
  const int consumer_;
  const int thread_;
  bool leaving_ = false;  // is a staged output on its way?
  uint32_t leaving_slot_ = 0;
};

}  // namespace dash_attn::forward
