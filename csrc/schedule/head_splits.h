// Into how many parts the query heads of a KV head are cut. Each part has claims of its own, so that there are as many
// times more of them, as many times shorter; dK and dV then are sums over claims, in the order of the splits.
#pragma once

#include <cstdint>

#include "../host_device.h"

namespace dash_attn {

// Where the sums of dK and dV are cut shows in their bits. So it may depend on the shape of one sequence and on nothing
// else: not on the batch, nor on the SMs that a device has or a caller leaves. kEnoughClaims is about what fills a Hopper
// GPU, and is the same everywhere.
inline constexpr int kEnoughClaims = 128;        // of one sequence
inline constexpr int kEnoughCausalClaims = 256;  // the longest is twice the mean, and short ones must fill up beside it
inline constexpr int kStepsWorthACarry = 32;  // of a claim: to add its dK and dV up must stay small beside its products

// The fewest parts that make enough claims; where too few are possible, the most that leave the claims long enough.
constexpr int head_splits(int kv_heads, int queries_per_kv, int query_tiles, int kv_tiles, bool causal) {
  int const enough = causal ? kEnoughCausalClaims : kEnoughClaims;
  int splits = 1;
  for (int next = 2; next <= queries_per_kv && int64_t{kv_heads} * kv_tiles * splits < enough; ++next) {
    if (int64_t{queries_per_kv} / next * query_tiles < kStepsWorthACarry) break;
    if (queries_per_kv % next == 0) splits = next;
  }
  return splits;
}

}  // namespace dash_attn
