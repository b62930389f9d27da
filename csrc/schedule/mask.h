// Which keys a query sees: decided here for the forward, the backward, the schedules and the simulator, on the host and
// on the device. A kernel makes its Mask with a constant kind, so that the compiler drops the others.
#pragma once

#include "../host_device.h"

namespace dash_attn {

DASH_HOST_DEVICE constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
DASH_HOST_DEVICE constexpr int min_int(int a, int b) { return a < b ? a : b; }
DASH_HOST_DEVICE constexpr int max_int(int a, int b) { return a > b ? a : b; }

enum class MaskKind : int {
  kFull,    // every key
  kCausal,  // query i sees the keys j <= i + seqlen_k - seqlen_q: the last query sees the last key
  // Query i sees the last kBandKeys keys up to key i: there may be keys at the end that no query sees, and queries that
  // see none. No kernel of the build has it: tests/gpu/test_band.py compiles one.
  kBand,
};

inline constexpr const char* kMaskNames[] = {"full", "causal", "band"};

DASH_HOST_DEVICE constexpr MaskKind mask_kind(bool causal) { return causal ? MaskKind::kCausal : MaskKind::kFull; }

inline constexpr int kBandKeys = 500;

// Whether every query that sees a key sees all keys before it.
DASH_HOST_DEVICE constexpr bool starts_at_first_key(MaskKind kind) { return kind != MaskKind::kBand; }

// Lengths of one sequence.
struct Sequence {
  int seqlen_q, seqlen_k;
};

// first, first + 1, ..., first + count - 1; empty where count is 0.
struct Range {
  int first, count;

  DASH_HOST_DEVICE constexpr int end() const { return first + count; }
  DASH_HOST_DEVICE static constexpr Range between(int first, int end) { return {first, max_int(0, end - first)}; }
};

// Both ends of what a query sees, and of the queries that see a key, never move back from one to the next: so what a
// tile sees follows from its first and last row.
struct Mask {
  MaskKind kind;
  Sequence sequence;

  // Of a query that exists; of one past the end no less than of the last, and no more than there is.
  DASH_HOST_DEVICE constexpr Range keys_of(int query) const {
    int const end = is_full() ? sequence.seqlen_k : min_int(query + diagonal() + 1, sequence.seqlen_k);
    int const first = starts_at_first_key(kind) ? 0 : min_int(max_int(0, query + 1 - kBandKeys), sequence.seqlen_k);
    return Range::between(first, end);
  }

  // Of a key that exists.
  DASH_HOST_DEVICE constexpr Range queries_of(int key) const {
    int const first = is_full() ? 0 : min_int(max_int(0, key - diagonal()), sequence.seqlen_q);
    int const end = starts_at_first_key(kind) ? sequence.seqlen_q : min_int(key + kBandKeys, sequence.seqlen_q);
    return Range::between(first, end);
  }

  // Whether a query of the tile does not see a key of it. Query rows past the end need no mask: their LSE is +inf.
  DASH_HOST_DEVICE constexpr bool hides_part_of(Range queries, Range keys) const {
    return keys.first < keys_of(queries.end() - 1).first || keys.end() > keys_of(queries.first).end();
  }

 private:
  DASH_HOST_DEVICE constexpr bool is_full() const { return kind == MaskKind::kFull; }
  // The last key that query 0 sees.
  DASH_HOST_DEVICE constexpr int diagonal() const {
    return kind == MaskKind::kBand ? 0 : sequence.seqlen_k - sequence.seqlen_q;
  }
};

}  // namespace dash_attn
