// Where the query heads of a KV head are split over claims, their dK and dV are added up in the order of the splits: each
// consumer hands its fp32 sums to the same consumer of the next split's claim, through the workspace.
//
//   all threads store sums -> barrier of the warpgroup -> one thread: st.release turn = split + 1
//   -> one thread of the next split: ld.acquire turn -> barrier of the warpgroup -> all threads load sums
//
// The claim that is waited for is an earlier one (schedule/order.h): it is being worked on, or has ended.
#pragma once

#include "config.h"
#include "params.h"

namespace dash_attn::backward {

// Private to the kernel, so that it holds what each thread holds: four registers at a time, thread after thread.
template <typename Config>
struct CarryLayout {
  static constexpr int kRegisters = Config::kHeadDim / 2;  // of a 64 x kHeadDim fragment: dK or dV
  static constexpr int kQuads = kRegisters / 4;

  using Gradient = float[kRegisters];

  static __device__ __forceinline__ void add(Gradient& gradient, const float4* sums) {
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      const float4 sum = __ldcg(sums + quad * kWarpgroupThreads);
      float* const own = gradient + 4 * quad;
      own[0] += sum.x;
      own[1] += sum.y;
      own[2] += sum.z;
      own[3] += sum.w;
    }
  }

  static __device__ __forceinline__ void store(const Gradient& gradient, float4* sums) {
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      const float* const own = gradient + 4 * quad;
      __stcg(sums + quad * kWarpgroupThreads, make_float4(own[0], own[1], own[2], own[3]));
    }
  }
};

// Of a consumer's threads; barrier 0 is that of both consumers.
__device__ __forceinline__ void sync_warpgroup(int consumer) {
  cutlass::arch::NamedBarrier::sync(kWarpgroupThreads, 1u + consumer);
}

// Adds the sums of the splits before. The last split keeps the result (true), the others pass it on. Called by whole
// consumers, whose threads count themselves again, for what is kept over the products' loop costs instructions there.
template <typename Config>
__device__ __forceinline__ bool carry_gradients(const KernelParams& params, const Work& work,
                                                typename CarryLayout<Config>::Gradient& dk,
                                                typename CarryLayout<Config>::Gradient& dv) {
  using Layout = CarryLayout<Config>;
  const int consumer = int(threadIdx.x) / kWarpgroupThreads - 1, thread = int(threadIdx.x) % kWarpgroupThreads;
  const Problem& problem = params.problem;
  const int64_t tile = int64_t(work.batch * problem.kv_heads + work.kv_head) * problem.kv_tiles + work.kv_tile;
  const int64_t place = tile * Config::kConsumers + consumer;
  int* const turn = params.workspace.carry_turns + place;
  float4* const dk_sums = reinterpret_cast<float4*>(params.workspace.carried_sums) +
                          place * 2 * Layout::kQuads * kWarpgroupThreads + thread;
  float4* const dv_sums = dk_sums + Layout::kQuads * kWarpgroupThreads;
  if (work.split > 0) {
    if (thread == 0) {
      while (ptx::load_acquire(turn) != work.split) {}
    }
    sync_warpgroup(consumer);
    Layout::add(dk, dk_sums);
    Layout::add(dv, dv_sums);
  }
  if (work.split + 1 == problem.head_splits) { return true; }
  Layout::store(dk, dk_sums);
  Layout::store(dv, dv_sums);
  sync_warpgroup(consumer);
  if (thread == 0) { ptx::store_release(turn, work.split + 1); }
  return false;
}

}  // namespace dash_attn::backward
