// dK and dV of a call that is a chunk of keys by a chunk of queries: a consumer begins with the sums that the chunk of
// queries before has left, and leaves its own to the next one, or, behind the last, adds those of the splits before.
//
// No sum starts or ends otherwise than in one call for all queries: what has been carried is the accumulator itself, in
// fp32. A call begins when those whose sums it goes on with have ended, so nothing is waited for within it.
#pragma once

#include "../device/warp_roles.h"
#include "params.h"
#include "split_reduction.h"

namespace dash_attn::backward {

// The sum at `sums`, laid out as split_sums; `first_float`: where it begins.
template <int kRegisters>
__device__ __forceinline__ SplitSum<kRegisters> carried_sum(const float* sums, int64_t first_float, int consumer) {
  float4* const first = reinterpret_cast<float4*>(const_cast<float*>(sums) + first_float);
  return {nullptr, first, consumer, int(read_thread_index() % kWarpgroupThreads)};
}

template <int kRegisters>
__device__ __forceinline__ void begin_carried_sum(const KernelParams& params, int64_t first_float, int consumer,
                                                  float (&gradient)[kRegisters]) {
  if (!params.carried.keys_continue) { return; }
  carried_sum<kRegisters>(params.workspace.split_sums, first_float, consumer).load(gradient);
}

// Whether `gradient` is complete; if not, it is left to the next call.
template <int kRegisters>
__device__ __forceinline__ bool end_carried_sum(const KernelParams& params, int64_t first_float, int consumer,
                                                float (&gradient)[kRegisters]) {
  if (params.carried.total) { carried_sum<kRegisters>(params.carried.total, first_float, consumer).add_to(gradient); }
  if (params.carried.keys_end) { return true; }
  carried_sum<kRegisters>(params.workspace.split_sums, first_float, consumer).store(gradient);
  // In wide kernels one thread says for all that the work tile's K or V is done with.
  sync_warpgroup(1 + consumer);
  return false;
}

}  // namespace dash_attn::backward
