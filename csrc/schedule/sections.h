// How many (batch, KV head, split)s have their claims interleaved. For speed alone: it changes who runs when, never an
// order of sums. Measured on an H200 (docs/engineering_log.md). What limits it is L2, which should hold the Q, dO and fp32
// dQ of the heads that are live together: what it does not hold costs power, and with it clock.
#pragma once

#include <cstdint>

#include "policy.h"
#include "problem.h"

namespace dash_attn {

constexpr int head_section(Policy policy, Problem const& problem, int padded_head_dim) {
  constexpr int kElementBytes = 2, kSumBytes = 4;
  int64_t const head_bytes = int64_t{problem.seqlen_q} * padded_head_dim * (2 * kElementBytes + kSumBytes);
  auto const heads_within = [&](int64_t bytes) {
    return bytes < head_bytes ? 1 : static_cast<int>(bytes / head_bytes);
  };
  if (!problem.causal) return heads_within(16 << 20);
  if (policy == Policy::kAscending || policy == Policy::kSpt) return 1;
  // From here on also the descending heads of spt_descending, whose spt heads have sections of one (assignment.h).

  // The longest KV tiles come first. A section then ends evenly when the short tiles of many heads come last.
  constexpr int kEnoughForAnEvenEnd = 512;  // claims in a section
  int const even = min_int(kEnoughForAnEvenEnd / problem.kv_tiles, heads_within(32 << 20));
  // All KV tiles of a head start at the same query tile, so a CTA begins by waiting for the others of its head, fewer
  // of them in a larger section. The longer its claim, the less that matters.
  bool const waits = accumulation(policy) == Accumulation::kOrdered;
  int const enough_steps = problem.queries_per_claim > 1 ? 512 : 1024;
  int const apart = waits ? min_int(16, enough_steps / problem.query_tiles) : 1;
  return max_int(4, max_int(even, apart));
}

}  // namespace dash_attn
