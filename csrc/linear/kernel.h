// y = x W^T + bias, with the bits of dropout made beside it.
//
//   warpgroup 0   warp 0: loader (load.h)   the others: bits (generator/lines.h), in units taken from a counter
//   the others    consumers (mainloop.h)
//
// Products and random numbers need different parts of an SM: the consumers' warps issue little, and the tensor cores
// none of what Philox is made of. A warp that has done its part makes bits until there are none left to make. CTAs are
// persistent, and none waits for another but for those of its cluster. Each sum over the depth is one thread's, in
// order: y does not depend on the SMs, nor on who makes which bits.
#pragma once

#include "../device/warp_roles.h"
#include "config.h"
#include "load.h"
#include "mainloop.h"

namespace dash_attn::linear {

template <typename Variant>
__device__ __forceinline__ void make_bits(const Params<typename Variant::Element>& params) {
  if (params.units_taken == nullptr) { return; }
  const int units = int(params.bits.units()), lane = int(threadIdx.x) % 32;
  while (true) {
    int first = lane == 0 ? atomicAdd(params.units_taken, Variant::kUnitsAtATime) : 0;
    first = __shfl_sync(0xffffffff, first, 0);
    if (first >= units) { return; }
    const int end = min_int(first + Variant::kUnitsAtATime, units);
#pragma unroll 1
    for (int unit = first; unit < end; ++unit) {
      dropout::make_lines<Variant::kMapping, Variant::kRounds, Variant::kLinesAtATime>(params.bits, unit, lane);
    }
  }
}

template <typename Variant>
__global__ void __launch_bounds__(Variant::kThreads, 1)
    linear_kernel(const __grid_constant__ Params<typename Variant::Element> params) {
  auto& shared = shared_storage<SharedStorage<Variant>>();
  if (threadIdx.x == 0) { initialise_barriers(shared, params.tiles.cluster); }
  ptx::sync_cluster();  // no CTA writes to another, or arrives there, before

  const auto produce = [&](int warp) {
    if (warp == 0) {
      if (ptx::elect_one()) { Loader<Variant>(shared, params).run(); }
      __syncwarp();
    }
    make_bits<Variant>(params);
  };
  const auto consume = [&] {
    Consumer<Variant>(shared, params).run();
    __syncwarp();
    make_bits<Variant>(params);
  };
  specialise_warps<Variant>(produce, consume);
  __syncwarp();
  ptx::sync_cluster();  // nor after it has ended
}

}  // namespace dash_attn::linear
