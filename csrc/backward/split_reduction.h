// If the query heads of a KV head are split over work tiles, their dK and dV are added in the order of the splits. Each
// consumer passes its fp32 sums through the workspace to the same consumer of the next split's work tile:
//
//   all threads store the sum -> barrier of the warpgroup -> one thread: st.release semaphore = split + 1
//   -> one thread of the next split: ld.acquire semaphore -> barrier of the warpgroup -> all threads load the sum
//
// The work tile that is waited for was taken earlier (contract/order.h), so it is running or has ended.
//
// The first part of a divided KV tile passes its sums to the second in the same way, if two CTAs work on them. These
// sums have a place of their own, which serves one split after the other; then all splits are in parts (whole_tiles.h).
#pragma once

#include "../device/ptx.h"
#include "../device/warp_roles.h"
#include "config.h"
#include "params.h"

namespace dash_attn::backward {

// The sum of one consumer's rows of dK or of dV. It is private to the kernel and stored as each thread holds it, four
// registers at a time, thread after thread.
template <int kRegisters>
class SplitSum {
 public:
  static constexpr int kQuads = kRegisters / 4;

  using Gradient = float[kRegisters];

  // `semaphore` and `sums` belong to this sum.
  __device__ __forceinline__ SplitSum(int* semaphore, float4* sums, int consumer, int thread)
      : semaphore_(semaphore), sums_(sums + thread), consumer_(consumer), is_first_thread_(thread == 0) {}

  // Waits until the previous splits are in the sum, and adds it.
  __device__ __forceinline__ void add_to(Gradient& gradient, int split) const {
    wait_for(split);
    add_to(gradient);
  }

  __device__ __forceinline__ void pass_on(const Gradient& gradient, int split) const {
    store(gradient);
    signal(split + 1);
  }

  // For a divided KV tile, whose first part publishes the sum of each split and whose second part consumes it, one
  // split after the other in one place.
  __device__ __forceinline__ void publish(const Gradient& gradient, int split) const {
    wait_for(2 * split);
    store(gradient);
    signal(2 * split + 1);
  }

  __device__ __forceinline__ void consume(Gradient& gradient, int split) const {
    wait_for(2 * split + 1);
    load(gradient);
    signal(2 * split + 2);
  }

  __device__ __forceinline__ void add_to(Gradient& gradient) const {
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      const float4 sum = __ldcg(sums_ + quad * kWarpgroupThreads);
      float* const own = gradient + 4 * quad;
      own[0] += sum.x;
      own[1] += sum.y;
      own[2] += sum.z;
      own[3] += sum.w;
    }
  }

  __device__ __forceinline__ void load(Gradient& gradient) const {
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      const float4 sum = __ldcg(sums_ + quad * kWarpgroupThreads);
      float* const own = gradient + 4 * quad;
      own[0] = sum.x;
      own[1] = sum.y;
      own[2] = sum.z;
      own[3] = sum.w;
    }
  }

  __device__ __forceinline__ void store(const Gradient& gradient) const {
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      const float* const own = gradient + 4 * quad;
      __stcg(sums_ + quad * kWarpgroupThreads, make_float4(own[0], own[1], own[2], own[3]));
    }
  }

 private:
  __device__ __forceinline__ void wait_for(int value) const {
    if (is_first_thread_) {
      while (ptx::load_acquire(semaphore_) != value) {}
    }
    sync_warpgroup(1 + consumer_);
  }

  // Signals once all threads have come here.
  __device__ __forceinline__ void signal(int value) const {
    sync_warpgroup(1 + consumer_);
    if (is_first_thread_) { ptx::store_release(semaphore_, value); }
  }

  int* semaphore_;  // how many splits are in the sum, or how often it was published or consumed
  float4* sums_;
  int consumer_;
  bool is_first_thread_;
};

// The first float in split_sums of the sum of a consumer's rows of dV. That of dK follows it.
template <typename Variant, int kRegisters>
__device__ __forceinline__ int64_t first_float_of_sum(const WorkTile& work, int consumer, bool is_dk) {
  return (2 * (int64_t(work.split_tile) * Variant::kConsumers + consumer) + is_dk) * kRegisters * kWarpgroupThreads;
}

// Calls f with a consumer's sums of dV and of dK at `sums`. Threads read their index again: a value shared with the
// mainloop would change the mainloop's code for the worse.
template <typename Variant, int kRegisters, typename F>
__device__ __forceinline__ void with_sums(float* sums, int* semaphores, const WorkTile& work, F&& f) {
  const int index = read_thread_index();
  const int consumer = index / kWarpgroupThreads - 1, thread = index % kWarpgroupThreads;
  const int64_t first = 2 * (int64_t(work.split_tile) * Variant::kConsumers + consumer);
  const auto sum = [&](int64_t number) {
    using Sum = SplitSum<kRegisters>;
    float4* const first_of_sum = reinterpret_cast<float4*>(sums) + number * Sum::kQuads * kWarpgroupThreads;
    return Sum(semaphores + number, first_of_sum, consumer, thread);
  };
  f(sum(first), sum(first + 1));
}

// Adds the sums of the previous splits. The last split keeps the result and returns true; the others pass it on, dV
// while dK is still being loaded. Like the function below, it is called by whole consumers.
template <typename Variant, int kRegisters>
__device__ __forceinline__ bool reduce_splits(const KernelParams& params, const WorkTile& work, float (&dk)[kRegisters],
                                              float (&dv)[kRegisters]) {
  const bool is_last = work.split + 1 == work.splits;
  with_sums<Variant, kRegisters>(params.workspace.split_sums, params.workspace.split_semaphores, work,
                                 [&](auto dv_sum, auto dk_sum) {
                                   if (work.split > 0) { dv_sum.add_to(dv, work.split); }
                                   if (!is_last) { dv_sum.pass_on(dv, work.split); }
                                   if (work.split > 0) { dk_sum.add_to(dk, work.split); }
                                   if (!is_last) { dk_sum.pass_on(dk, work.split); }
                                 });
  return is_last;
}

// Passes the sums of a divided KV tile from its first part to its second, which continues them as if the two were one.
// kPart says which of them this is.
template <typename Variant, Visits kPart, int kRegisters>
__device__ __forceinline__ void hand_over_first_part(const KernelParams& params, const WorkTile& work,
                                                     float (&dk)[kRegisters], float (&dv)[kRegisters]) {
  const auto hand_over = [&](auto sum, auto& gradient) {
    if constexpr (kPart == Visits::kFirst) {
      sum.publish(gradient, work.split);
    } else {
      sum.consume(gradient, work.split);
    }
  };
  with_sums<Variant, kRegisters>(params.workspace.first_part_sums, params.workspace.first_part_semaphores, work,
                                 [&](auto dv_sum, auto dk_sum) {
                                   hand_over(dv_sum, dv);
                                   hand_over(dk_sum, dk);
                                 });
}

}  // namespace dash_attn::backward
