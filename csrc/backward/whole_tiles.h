// Divided KV tiles (schedule/order.h) that are worked on whole all the same: both parts by one CTA, with dK and dV in
// its registers, as the second part would have taken them up. The bits are the same.
//
// Whole, the KV tiles of a head wait for each other in a circle, so each must have a CTA. Whoever takes the first
// number of a KV head decides for it, all splits of its query heads: it is worked on whole if as many CTAs have begun
// as it has KV tiles. Then, of each split,
//   - the first parts' numbers are taken as whole KV tiles, and the second parts' stand for nothing: whoever takes one
//     moves the counter past those that follow it;
//   - a CTA that has one takes no other number before all first parts are taken. So while one is not, some CTA has none
//     and is at work of smaller numbers, which ends; and it takes the next. A CTA's work needs its loader no more while
//     that waits here: all loads have gone out.
// Otherwise every wait points to a smaller number, and the second part's CTA goes on with the sums of the first.
#pragma once

#include "../device/ptx.h"
#include "params.h"

namespace dash_attn::backward {

enum WholeHead : int { kUndecided, kWhole, kInParts };  // the first as preprocess clears them

__device__ __forceinline__ void count_running_cta(const KernelParams& params) {
  atomicAdd(params.workspace.running_ctas, 1);
}

// CTAs begin one after the other, within a few microseconds: whoever decides looks so many times before it gives up.
constexpr int kPollsForCtas = 16;

// Whether at least so many CTAs have begun. They go on until all numbers are taken.
__device__ __forceinline__ bool have_begun(const KernelParams& params, int ctas) {
  if (int(gridDim.x) < ctas) { return false; }
  for (int poll = 0; poll < kPollsForCtas; ++poll) {
    if (ptx::poll(params.workspace.running_ctas) >= ctas) { return true; }
  }
  return false;
}

// `first_number` is the KV head's first; `decides`: this CTA has taken it.
__device__ __forceinline__ bool is_worked_on_whole(const KernelParams& params, int first_number, bool decides,
                                                   int kv_tiles) {
  int* const head = params.workspace.whole_heads + first_number;
  int decision = kUndecided;
  if (decides) {
    decision = have_begun(params, kv_tiles) ? kWhole : kInParts;
    ptx::store_relaxed(head, decision);  // it is all that the others read
  }
  while (decision == kUndecided) { decision = ptx::load_acquire(head); }
  return decision == kWhole;
}

// All numbers below `number` have been taken or stand for nothing.
__device__ __forceinline__ void move_counter_to(const KernelParams& params, int number) {
  atomicMax(params.workspace.next_work, number);
}

// Until all numbers below `number` are taken; 0 costs no look.
__device__ __forceinline__ void wait_until_taken(const KernelParams& params, int number) {
  while (number > 0 && ptx::load_acquire(params.workspace.next_work) < number) {}
}

}  // namespace dash_attn::backward
