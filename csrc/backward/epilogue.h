// The end of a work tile: a consumer's dK and dV are rounded, staged in shared memory and written by TMA.
//
// They are staged where dS was. Where a consumer's half of one slot holds both (kStageInDs) they take the slot of the
// last step, and V of the next work tile may come to the place of K as soon as dQ is done with that. Elsewhere dV takes
// the place of K, and dK that of both slots of dS, one consumer's after the other's.
//
// The first step of the next work tile that writes dS there comes after `release_staging` of both consumers: with
// kStageInDs it is the second step, for which a consumer waits for the other's first dS, written after its
// release_staging; without, it is the first step, which comes after the wait for v_full, which the loader fills after
// k_empty, to which release_staging arrives. Whoever brings V earlier must keep that.
#pragma once

#include "../device/fragment.h"
#include "../device/tma.h"
#include "../device/warp_roles.h"
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

  // Once a work tile, when dK and dV of the one before have had time to leave.
  static __device__ __forceinline__ void release_staging(Shared& shared, int thread, bool is_first_work_tile) {
    if (thread == 0 && !is_first_work_tile) {
      ptx::bulk_wait_read();
      if constexpr (!Variant::kStageInDs) { shared.k_empty.arrive(); }
    }
  }

  // `key_tile` is the place of the work tile's K, `ds_slot` the slot of its last dS. Threads count themselves afresh:
  // what is shared with the mainloop takes a register there.
  static __device__ __forceinline__ void store(Shared& shared, const KernelParams& params, const WorkTile& work,
                                               Element* key_tile, int ds_slot, int consumer, Gradient& dk,
                                               Gradient& dv) {
    const int thread = read_thread_index() % kWarpgroupThreads;
    RegisterSlice packed[kRegisters / 8];
    Element* const dv_rows =
        Variant::kStageInDs ? shared.ds[ds_slot] + consumer * kDsBlock : key_tile + consumer * kElements;
    Element* const dk_rows = Variant::kStageInDs ? dv_rows + kElements : shared.ds[0] + consumer * kElements;
    if constexpr (Variant::Score::kDrops) {
      for (float& x : dv) { x *= params.dropout.scale; }
    }
    pack_slices<Element>(packed, dv);
    sync_consumers_done_with_k();
    store_rows<Swizzle, kWarpgroupRows>(dv_rows, 0, packed, thread / 32, thread % 32);
#pragma unroll
    for (int i = 0; i < kRegisters; ++i) { dk[i] *= params.dk_scale; }
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

  // Each consumer's dQ reads all of K and dS.
  static __device__ __forceinline__ void sync_consumers_done_with_k() {
    cutlass::arch::NamedBarrier::sync(Variant::kConsumers * kWarpgroupThreads, 0u);
  }
};

}  // namespace dash_attn::backward
