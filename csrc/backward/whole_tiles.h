// Divided KV tiles (schedule/order.h) that are worked on whole all the same: both parts by one CTA, with dK and dV in
// its registers, as the second part would have taken them up. The bits are the same.
//
// Whole, the KV tiles of a head wait for each other in a circle, so each must have a CTA. Whoever takes a head's first
// number decides for the head: it is worked on whole if as many CTAs are running as it has KV tiles. Then
//   - its first parts' numbers are taken as whole KV tiles, and the second parts' stand for nothing;
//   - a CTA that has one takes no other number before all of them are taken. So there is always a CTA that has none and
//     is at work of smaller numbers, which ends, or takes the next.
// Otherwise every wait points to a smaller number, and the second part's CTA goes on with the sums of the first.
#pragma once

#include "../device/ptx.h"
#include "params.h"
#include "split_reduction.h"

namespace dash_attn::backward {

enum WholeHead : int { kUndecided = 0, kWhole = 1, kInParts = 2 };

__device__ __forceinline__ void count_running_cta(const KernelParams& params) {
  atomicAdd(params.workspace.running_ctas, 1);
}

// CTAs begin one after the other, within a few microseconds: whoever decides looks so many times before it gives up.
constexpr int kLooksForCtas = 16;

// Whether at least so many CTAs are running. They go on running until all numbers are taken.
__device__ __forceinline__ bool are_running(const KernelParams& params, int ctas) {
  if (int(gridDim.x) < ctas) { return false; }
  for (int look = 0; look < kLooksForCtas; ++look) {
    if (ptx::load_acquire(params.workspace.running_ctas) >= ctas) { return true; }
  }
  return false;
}

// `first_number` is the head's first; `decides`: this CTA has taken it.
__device__ __forceinline__ bool is_worked_on_whole(const KernelParams& params, int first_number, bool decides,
                                                   int kv_tiles) {
  int* const head = params.workspace.whole_heads + first_number;
  int decision = kUndecided;
  if (decides) {
    decision = are_running(params, kv_tiles) ? kWhole : kInParts;
    ptx::store_release(head, decision);
  }
  while (decision == kUndecided) { decision = ptx::load_acquire(head); }
  return decision == kWhole;
}

// Until all numbers below `number` are taken.
__device__ __forceinline__ void wait_until_taken(const KernelParams& params, int number) {
  while (ptx::load_acquire(params.workspace.next_work) < number) {}
}

}  // namespace dash_attn::backward
