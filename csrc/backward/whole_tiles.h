// Divided KV tiles (contract/order.h) of which one CTA works on both parts, with dK and dV in its registers where the
// second part would otherwise consume the first part's sums. The bits are the same.
//
// Undivided, the KV tiles of a head wait for each other in a circle, so each must have a CTA. Whoever takes the first
// number of a KV head decides for the head and all splits of its query heads: its KV tiles are worked on whole if as
// many CTAs have started as the head has KV tiles. Then, for each split,
//   - the first parts' numbers are taken as whole KV tiles, and the second parts' mean nothing: whoever takes one moves
//     the counter past those that follow it;
//   - a CTA that has taken one takes no other number until all first parts are taken. So while one is not taken, some
//     CTA has none and works on smaller numbers, which ends, and then takes the next. While a CTA waits here its loader
//     is not needed: all its loads have been issued.
// Otherwise every wait points to a smaller number, and the second part's CTA continues the sums of the first.
#pragma once

#include "../device/ptx.h"
#include "params.h"

namespace dash_attn::backward {

enum WholeHead : int { kUndecided, kWhole, kInParts };  // kUndecided is 0, to which preprocess clears them

__device__ __forceinline__ void count_running_cta(const KernelParams& params) {
  atomicAdd(params.workspace.running_ctas, 1);
}

// CTAs start one after the other, within a few microseconds, so the CTA that decides polls this many times before it
// gives up.
constexpr int kPollsForCtas = 16;

// Whether at least `ctas` CTAs have started. They run until all numbers are taken.
__device__ __forceinline__ bool have_begun(const KernelParams& params, int ctas) {
  if (int(gridDim.x) < ctas) { return false; }
  for (int poll = 0; poll < kPollsForCtas; ++poll) {
    if (ptx::poll(params.workspace.running_ctas) >= ctas) { return true; }
  }
  return false;
}

// `first_number` is the first number of the KV head. The CTA that has taken it decides.
__device__ __forceinline__ bool is_worked_on_whole(const KernelParams& params, int first_number, bool decides,
                                                   int kv_tiles) {
  int* const head = params.workspace.whole_heads + first_number;
  int decision = kUndecided;
  if (decides) {
    decision = have_begun(params, kv_tiles) ? kWhole : kInParts;
    ptx::store_relaxed(head, decision);  // relaxed, because the others read nothing else
  }
  while (decision == kUndecided) { decision = ptx::load_acquire(head); }
  return decision == kWhole;
}

// All numbers below `number` have been taken or mean nothing.
__device__ __forceinline__ void move_counter_to(const KernelParams& params, int number) {
  atomicMax(params.workspace.next_work, number);
}

// Waits until all numbers below `number` are taken. 0 costs no poll.
__device__ __forceinline__ void wait_until_taken(const KernelParams& params, int number) {
  while (number > 0 && ptx::load_acquire(params.workspace.next_work) < number) {}
}

}  // namespace dash_attn::backward
