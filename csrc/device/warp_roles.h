// What warps and warpgroups of both passes do together.
#pragma once

#include "barrier.h"
#include "ptx.h"
#include "sm90.h"

namespace dash_attn {

// The warpgroup's number in the CTA, by a shuffle so that the compiler knows that it is uniform.
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

// Warpgroup 0 feeds the others and gives them of its registers: `produce` is called with the number of each of its
// warps, `consume` by every thread of the others.
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

// Of the threads of one warpgroup.
__device__ __forceinline__ void sync_warpgroup(int barrier) { sync_numbered(barrier, kWarpgroupThreads); }

// One arrival a warp, for what is done by the time its elected lane comes here: products, waits.
__device__ __forceinline__ void arrive_once(const Barrier& barrier) {
  if (ptx::elect_one()) { barrier.arrive(); }
}

// One arrival a warp: all its threads have finished with what the barrier guards.
__device__ __forceinline__ void arrive_together(const Barrier& barrier) {
  __syncwarp();
  arrive_once(barrier);
}

// What the threads of the warp have stored may be read by products and bulk operations. The fence takes hundreds of
// clocks, so a product should be running.
__device__ __forceinline__ void fence_and_arrive(const Barrier& barrier) {
  ptx::fence_async_shared();
  arrive_together(barrier);
}

}  // namespace dash_attn
