// From a claim number to the KV tile that a CTA owns.
#pragma once

#include <cstdint>

#include "../host_device.h"
#include "order.h"
#include "policy.h"
#include "problem.h"

namespace dash_attn {

struct Work {
  int batch;
  int kv_head;
  int kv_tile;
  bool valid;  // false: the group is smaller than the cluster and this CTA sits the claim out
};

// Claims of the whole problem; a kernel needs it below 2^31.
template <Policy P>
DASH_HOST_DEVICE constexpr int64_t num_claims(Problem const& problem) {
  return static_cast<int64_t>(problem.batch) * problem.kv_heads * Order<P>::groups(problem);
}

// Work of CTA `cta_rank` of the cluster that took `claim`. Claims must be taken in increasing order: batch-major, then KV
// head, then the policy's groups, which is the order in which waits point back.
template <Policy P>
DASH_HOST_DEVICE constexpr Work assign(Problem const& problem, int claim, int cta_rank) {
  int const groups = Order<P>::groups(problem);
  int const head = claim / groups;
  int const kv = Order<P>::kv_tile(problem, claim - head * groups, cta_rank);
  int const batch = head / problem.kv_heads;
  return {batch, head - batch * problem.kv_heads, kv, kv >= 0};
}

}  // namespace dash_attn
