// What the warps and warpgroups of both passes have in common.
#pragma once

#include "barrier.h"
#include "ptx.h"
#include "sm90.h"

namespace dash_attn {

// The warpgroup's number in the CTA. The shuffle tells the compiler that the value is uniform.
__device__ __forceinline__ int warpgroup_index() {
  return __shfl_sync(0xffffffff, int(threadIdx.x) / kWarpgroupThreads, 0);
}
__device__ __forceinline__ int warp_index() { return __shfl_sync(0xffffffff, int(threadIdx.x) / 32, 0); }

// The kernel's dynamic shared memory.
template <typename Storage>
__device__ __forceinline__ Storage& shared_storage() {
  extern __shared__ char shared_memory[];
  static_assert(sizeof(Storage) <= kSharedMemoryLimit);
  return *reinterpret_cast<Storage*>(shared_memory);
}

// Warpgroup 0 feeds the others and gives them some of its registers. Each warp of it calls `produce` with its number,
// and every thread of the others calls `consume`.
template <typename Variant, typename Produce, typename Consume>
__device__ __forceinline__ void specialise_warps(Produce&& produce, Consume&& consume) {
  if (warpgroup_index() == 0) {
    ptx::give_registers<Variant::kProducerRegisters>();
    produce(warp_index());
  } else {
    ptx::take_registers<Variant::kConsumerRegisters>();
    consume();
  }
}

// Synchronises the threads of one warpgroup.
__device__ __forceinline__ void sync_warpgroup(int barrier) { sync_numbered(barrier, kWarpgroupThreads); }

// One arrival a warp, for work that is complete when the elected lane comes here: products and waits.
__device__ __forceinline__ void arrive_once(const Barrier& barrier) {
  if (ptx::elect_one()) { barrier.arrive(); }
}

// One arrival a warp, after all its threads have finished with what the barrier guards.
__device__ __forceinline__ void arrive_together(const Barrier& barrier) {
  __syncwarp();
  arrive_once(barrier);
}

// Lets products and bulk operations read what the threads of the warp have stored. The fence takes hundreds of clocks,
// so a product should be running meanwhile.
__device__ __forceinline__ void fence_and_arrive(const Barrier& barrier) {
  ptx::fence_async_shared();
  arrive_together(barrier);
}

}  // namespace dash_attn
