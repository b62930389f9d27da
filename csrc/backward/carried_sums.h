// dK and dV of a call for a chunk of keys and a chunk of queries. A consumer starts from the sums that the call for the
// previous chunk of queries has left, and leaves its own sums to the next call. After the last chunk it adds the sums
// of the previous splits instead.
//
// Every sum starts and ends as it would in a single call for all queries: the carried value is the accumulator itself,
// in fp32. A call starts after the calls whose sums it continues have ended, so nothing waits within it.
#pragma once

#include "../device/warp_roles.h"
#include "params.h"
#include "split_reduction.h"

namespace dash_attn::backward {

// The sum that begins at `sums` + `first_float`, laid out like split_sums.
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

// Returns whether `gradient` is complete. If not, it is left to the next call.
template <int kRegisters>
__device__ __forceinline__ bool end_carried_sum(const KernelParams& params, int64_t first_float, int consumer,
                                                float (&gradient)[kRegisters]) {
  if (params.carried.total) { carried_sum<kRegisters>(params.carried.total, first_float, consumer).add_to(gradient); }
  if (params.carried.keys_end) { return true; }
  carried_sum<kRegisters>(params.workspace.split_sums, first_float, consumer).store(gradient);
  // In wide kernels one thread releases the work tile's K or V for all.
  sync_warpgroup(1 + consumer);
  return false;
}

}  // namespace dash_attn::backward
