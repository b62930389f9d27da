// The forward kernel: sets up barriers and sends each warp to its role.
//
//   warpgroup 0   warp 0: loader (load.h)   one warp for each consumer: storer (store.h)
//   the others    consumers (products.h, softmax.h)
//
// CTAs are persistent and independent: each has its share of the query tiles (tiles.h) and waits for no other.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "config.h"
#include "load.h"
#include "params.h"
#include "products.h"
#include "store.h"

namespace dash_attn::forward {

template <typename Config>
__device__ __forceinline__ void initialise_barriers(SharedStorage<Config>& shared) {
  using Count = Arrivals<Config>;
  for (int i = 0; i < Config::kQueryStages; ++i) {
    shared.q_full[i].init(Count::kTransaction);
    shared.q_empty[i].init(Count::kStorers);
    for (int consumer = 0; consumer < Config::kConsumers; ++consumer) {
      shared.out_full[i][consumer].init(Count::kStagingWarps);
    }
  }
  for (int i = 0; i < Config::kStages; ++i) {
    shared.k_full[i].init(Count::kTransaction);
    shared.v_full[i].init(Count::kTransaction);
    shared.k_empty[i].init(Count::kConsumerWarps);
    shared.v_empty[i].init(Count::kConsumerWarps);
  }
  cutlass::arch::fence_barrier_init();
}

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1) forward_kernel(const __grid_constant__ KernelParams params) {
  extern __shared__ char shared_memory[];
  static_assert(sizeof(SharedStorage<Config>) <= kSharedMemoryLimit);
  auto& shared = *reinterpret_cast<SharedStorage<Config>*>(shared_memory);

  if (threadIdx.x == 0) { initialise_barriers(shared); }
  __syncthreads();

  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / kWarpgroupThreads, 0);
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<Config::kProducerRegisters>();
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
    static_assert(Config::kConsumers < kWarpgroupWarps);
    if (cute::elect_one_sync()) {
      if (warp == 0) {
        Loader<Config>(shared, params).run();
      } else if (warp <= Config::kConsumers) {
        Storer<Config>(shared, params, warp - 1).run();
      }
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Config::kConsumerRegisters>();
    Consumer<Config>(shared, params).run();
  }
}

}  // namespace dash_attn::forward
