// How many (batch, KV head) pairs have their claims interleaved. For speed alone: it changes who runs when, never an
// order of sums. Measured on an H200 (docs/engineering_log.md). Interleaved heads keep a CTA from starting right behind
// the one it will wait for, and under the causal mask the policies that start with the longest KV tiles end evenly when
// the short tiles of many heads come last. What limits it is L2, which should hold the Q, dO and fp32 dQ of the heads
// that are live together.
#pragma once

#include <cstdint>

#include "policy.h"
#include "problem.h"

namespace dash_attn {

constexpr int head_section(Policy policy, bool causal, int seqlen_q, int seqlen_k, int tile_k, int padded_head_dim) {
  constexpr int kElementBytes = 2, kSumBytes = 4;
  int64_t const head_bytes = int64_t{seqlen_q} * padded_head_dim * (2 * kElementBytes + kSumBytes);
  auto const heads_within = [&](int64_t bytes) {
    return bytes < head_bytes ? 1 : static_cast<int>(bytes / head_bytes);
  };
  if (!causal) return heads_within(16 << 20);
  if (policy != Policy::kAscending && policy != Policy::kSpt) {
    constexpr int kEnoughForAnEvenEnd = 512;  // claims in a section
    return max_int(16, min_int(kEnoughForAnEvenEnd / ceil_div(seqlen_k, tile_k), heads_within(32 << 20)));
  }
  return 1;
}

}  // namespace dash_attn
