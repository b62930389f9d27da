// The forward kernel: initialises the barriers and sends each warp to its role.
//
//   warpgroup 0   warp 0: loader (load.h)   one warp for each consumer: storer (store.h)
//                 for short query tiles one more: loader of V
//   the others    consumers (mainloop.h, of short tiles short_mainloop.h; softmax.h)
//
// CTAs are persistent and never wait for another CTA. placement/forward_tiles.h assigns query tiles to them.
#pragma once

#include "../device/warp_roles.h"
#include "config.h"
#include "load.h"
#include "mainloop.h"
#include "params.h"
#include "short_mainloop.h"
#include "store.h"

namespace dash_attn::forward {

template <typename Variant>
__global__ void __launch_bounds__(Variant::kThreads, 1) forward_kernel(const __grid_constant__ KernelParams params) {
  auto& shared = shared_storage<SharedStorage<Variant>>();
  if constexpr (Variant::serves_steps(false)) {
    if (params.seqlens_k) { ptx::launch_dependents(); }  // packing/check.h, which waits for this kernel's end
  }
  if (threadIdx.x == 0) { initialise_barriers(shared); }
  ptx::wait_for_previous_kernel();  // the plan of a pack or of a mask by key columns
  __syncthreads();

  const auto produce = [&](int warp) {
    static_assert(Variant::kConsumers < kWarpgroupWarps);
    constexpr int kLoaderOfV = Variant::kConsumers + 1;  // a warp, for short query tiles
    const bool leads = ptx::elect_one();
    constexpr Loads kFirst = Variant::kIsShort ? Loads::kAllButV : Loads::kAll;
    if constexpr (Variant::kIsShort) {
      if (params.pages.cuts_boxes()) {
        if (warp == 0) { return Loader<Variant, Keys::kInRows, kFirst>(shared, params, leads).run(); }
        if (warp == kLoaderOfV) { return Loader<Variant, Keys::kInRows, Loads::kV>(shared, params, leads).run(); }
      }
    }
    if constexpr (kMayHavePages<Variant>) {
      if (warp == 0 && params.pages.exists()) {
        return Loader<Variant, Keys::kInPages, kFirst>(shared, params, leads).run();
      }
    }
    if constexpr (Variant::kIsShort) {
      if (warp == kLoaderOfV) {
        if (params.pages.exists()) { return Loader<Variant, Keys::kInPages, Loads::kV>(shared, params, leads).run(); }
        return Loader<Variant, Keys::kInTensor, Loads::kV>(shared, params, leads).run();
      }
    }
    if (!leads) { return; }
    if (warp == 0) {
      Loader<Variant, Keys::kInTensor, kFirst>(shared, params, leads).run();
    } else if (warp <= Variant::kConsumers) {
      Storer<Variant>(shared, params, warp - 1).run();
    }
  };
  using ConsumerOfTiles = std::conditional_t<Variant::kIsShort, ShortConsumer<Variant>, Consumer<Variant>>;
  specialise_warps<Variant>(produce, [&]() __attribute__((always_inline)) { ConsumerOfTiles(shared, params).run(); });
}

}  // namespace dash_attn::forward
