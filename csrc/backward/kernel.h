// The backward kernel: initialises the barriers and sends each warp to its role.
//
//   warpgroup 0   warp 0: loader (load.h)   warp 1: planner (plan.h)   warps 2, 3: adders of dQ (dq_add.h)
//   warpgroups 1, 2: consumers (mainloop.h, score_tile.h, epilogue.h; with wide heads, those of wide/)
//
// CTAs are persistent and take their work from a counter (work_ring.h). None waits for a CTA that may not be running.
#pragma once

#include "../device/warp_roles.h"
#include "dq_add.h"
#include "load.h"
#include "mainloop.h"
#include "params.h"
#include "plan.h"
#include "storage.h"
#include "wide/mainloop.h"

namespace dash_attn::backward {

template <typename Variant>
__global__ void __launch_bounds__(Variant::kThreads, 1) backward_kernel(const __grid_constant__ KernelParams params) {
  auto& shared = shared_storage<SharedStorage<Variant>>();
  if (threadIdx.x == 0) { initialise_barriers(shared); }
  // The other CTAs of the cluster arrive on this one's barriers.
  if constexpr (Variant::kClusterSize > 1) {
    ptx::sync_cluster();
  } else {
    __syncthreads();
  }

  ptx::wait_for_previous_kernel();

  const auto produce = [&](int warp) {
    if (warp == kLoaderWarp) {
      Loader<Variant>(shared, params).run();
    } else if (ptx::elect_one()) {
      if (warp == kPlannerWarp) {
        Planner<Variant>(shared, params).run();
      } else {
        Adder<Variant>(shared, params, warp - kFirstAdderWarp).run();
      }
    }
  };
  const auto consume = [&] {
    if constexpr (!Variant::kWide) {
      Consumer<Variant>(shared, params).run();
    } else if (warpgroup_index() == 1) {
      wide::Consumer<Variant>(shared, params).template run<true>();
    } else {
      wide::Consumer<Variant>(shared, params).template run<false>();
    }
  };
  specialise_warps<Variant>(produce, consume);

  // A CTA's shared memory must outlive the last arrival of its neighbours. The barrier takes whole warps.
  if constexpr (Variant::kClusterSize > 1) {
    __syncwarp();
    ptx::sync_cluster();
  }
}

}  // namespace dash_attn::backward
