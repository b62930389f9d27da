// The backward kernel: sets up barriers and sends each warp to its role.
//
//   warpgroup 0   warp 0: loader (load.h)   warp 1: planner (plan.h)   warps 2, 3: adders of dQ (dq_add.h)
//   warpgroups 1, 2: consumers (products.h)
//
// CTAs are persistent and claim their work (claims.h); none waits for a CTA that may not be running.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include <cute/arch/cluster_sm90.hpp>

#include "config.h"
#include "dq_add.h"
#include "load.h"
#include "params.h"
#include "plan.h"
#include "products.h"

namespace dash_attn::backward {

template <typename Config>
__device__ __forceinline__ void initialise_barriers(SharedStorage<Config>& shared) {
  using Count = Arrivals<Config>;
  shared.k_full.init(Count::kTransaction);
  shared.v_full.init(Count::kTransaction);
  shared.v_empty.init(Count::kConsumerWarps);
  shared.k_empty.init(Count::kDoneWithK);
  for (int i = 0; i < Config::kStages; ++i) {
    shared.q_full[i].init(Count::kLoaderLanes);
    shared.dout_full[i].init(Count::kTransaction);
    shared.q_empty[i].init(Count::kConsumerThreads);
    shared.dout_empty[i].init(Count::kConsumerThreads);
    shared.ds_full[i].init(Count::kConsumerWarps);
    shared.dq_full[i].init(Count::kConsumerWarps);
    shared.dq_empty[i].init(Count::kAdder);
  }
  for (int i = 0; i < Config::kPlanSlots; ++i) {
    shared.plan_full[i].init(Count::kPlanner);
    shared.plan_empty[i].init(Count::kPlanReaders);
  }
  for (int i = 0; i < Config::kClaimSlots; ++i) {
    shared.claim_full[i].init(Count::kTransaction);
    shared.claim_empty[i].init(Count::kClaimReaders);
  }
  cutlass::arch::fence_barrier_init();
}

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1) backward_kernel(const __grid_constant__ KernelParams params) {
  extern __shared__ char shared_memory[];
  static_assert(sizeof(SharedStorage<Config>) <= kSharedMemoryLimit);
  auto& shared = *reinterpret_cast<SharedStorage<Config>*>(shared_memory);

  if (threadIdx.x == 0) { initialise_barriers(shared); }
  // The other CTAs of the cluster arrive on this one's barriers.
  if constexpr (Config::kClusterSize > 1) {
    cute::cluster_sync();
  } else {
    __syncthreads();
  }

  ptx::wait_for_previous_kernel();

  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / kWarpgroupThreads, 0);
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<Config::kProducerRegisters>();
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
    if (warp == kLoaderWarp) {
      Loader<Config>(shared, params).run();
    } else if (cute::elect_one_sync()) {
      switch (warp) {
        case kPlannerWarp:
          Planner<Config>(shared, params).run();
          break;
        default:
          Adder<Config>(shared, params, warp - kFirstAdderWarp).run();
      }
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Config::kConsumerRegisters>();
    Consumer<Config>(shared, params).run();
  }

  // A CTA's shared memory must outlive the last arrival of its neighbours. The barrier takes whole warps.
  if constexpr (Config::kClusterSize > 1) {
    __syncwarp();
    cute::cluster_sync();
  }
}

}  // namespace dash_attn::backward
