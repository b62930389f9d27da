// The end of a work tile: a consumer's dK and dV are rounded, staged in shared memory and written by TMA.
//
// If a consumer's half of one slot of dS holds both (kStageInDs), they are staged in the slot of the last step.
// Otherwise dK takes both slots of dS, one consumer's after the other's, and dV takes its consumer's half of the buffer
// in which the next step stages dQ. V of the next work tile may overwrite K as soon as dQ no longer needs that.
//
// The first step of the next work tile that writes to those buffers comes after `release_staging` of both consumers.
// With kStageInDs that is the second step, for which a consumer waits for the other's first dS, which is written after
// its release_staging. Otherwise it is the first step, for dS and for dQ, and all consumers meet before it:
// meet_released. A sum of dQ that is loaded into that buffer waits for the first dS as well (dq_add.h). A work tile
// without steps stages in the same buffers after a meeting of its own, in `store`.
#pragma once

#include "../device/fragment.h"
#include "../device/tma.h"
#include "../device/warp_roles.h"
#include "dq_layout.h"
#include "params.h"
#include "split_reduction.h"
#include "storage.h"

namespace dash_attn::backward {

template <typename Variant>
class Epilogue {
 public:
  using Element = typename Variant::Element;
  using Shared = SharedStorage<Variant>;
  static constexpr int kRegisters = Variant::kHeadDim / 2;  // of a 64 x kHeadDim fragment
  using Gradient = float[kRegisters];

  // Called once a work tile, when dK and dV of the previous one have had time to leave.
  static __device__ __forceinline__ void release_staging(int thread) {
    if (thread == 0) { ptx::bulk_wait_read(); }
  }

  // Called after release_staging and before the first dS of a work tile.
  static __device__ __forceinline__ void meet_released() {
    if constexpr (!Variant::kStageInDs) { sync_consumers(); }
  }

  // `next` is the next step. Threads read their index again, because a value shared with the mainloop would occupy a
  // register there.
  static __device__ __forceinline__ void store(Shared& shared, const KernelParams& params, const WorkTile& work,
                                               RingIndex<Variant::kStages> next, int consumer, Gradient& dk,
                                               Gradient& dv) {
    const int thread = read_thread_index() % kWarpgroupThreads;
    RegisterSlice packed[kRegisters / 8];
    Element *dv_rows, *dk_rows;
    if constexpr (Variant::kStageInDs) {
      dv_rows = shared.ds[next.previous().slot()] + consumer * kDsBlock;
      dk_rows = dv_rows + kElements;
    } else {
      shared.dq_empty[next.slot()].wait(next.empty_parity());
      dv_rows = rows_in_dq_buffer<Variant>(shared.dq[next.slot()], consumer);
      dk_rows = shared.ds[0] + consumer * kElements;
    }
    if constexpr (Variant::Score::kDrops) {
      for (float& x : dv) { x *= params.dropout.scale; }
    }
    pack_slices<Element>(packed, dv);
    sync_consumers();  // dQ of both has read dS; without steps, earlier staged tiles have left
    store_rows<Swizzle, kWarpgroupRows>(dv_rows, 0, packed, thread / 32, thread % 32);
#pragma unroll
    for (int i = 0; i < kRegisters; ++i) { dk[i] *= params.scale_of_sums; }
    pack_slices<Element>(packed, dk);
    store_rows<Swizzle, kWarpgroupRows>(dk_rows, 0, packed, thread / 32, thread % 32);
    ptx::fence_async_shared();
    sync_warpgroup(1 + consumer);
    if (thread == 0) {
      const int first_row = work.kv_tile * Variant::kKey + consumer * kWarpgroupRows;
      const RowOrigin rows = RowOrigin::of(params.pack.is_pack(), work.k_outer, work.sequence.seqlen_k);
      store_tile<Swizzle, kWarpgroupRows, Variant::kHeadDim>(params.dv, dv_rows, rows, first_row, work.kv_head);
      store_tile<Swizzle, kWarpgroupRows, Variant::kHeadDim>(params.dk, dk_rows, rows, first_row, work.kv_head);
      ptx::bulk_commit();
    }
  }

 private:
  using Swizzle = typename Variant::Swizzle;
  static constexpr int kDsBlock = Variant::kQuery * kWarpgroupRows;
  static constexpr int kElements = kWarpgroupRows * Variant::kHeadDim;
  static constexpr int kDqPart = Variant::kDqTileFloats / Variant::kConsumers;  // the part that one consumer stages
  static_assert(Variant::kStageInDs || kElements * sizeof(Element) <= kDqPart * sizeof(float),
                "dV fits where a consumer stages dQ");

  static __device__ __forceinline__ void sync_consumers() { sync_numbered(0, Variant::kConsumers * kWarpgroupThreads); }
};

}  // namespace dash_attn::backward
