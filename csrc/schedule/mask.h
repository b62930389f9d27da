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
  // Query i sees the keys j <= i, so that of more keys than queries the last are seen by none. No kernel of the build
  // has it: tests/gpu/test_unseen_keys.py compiles one.
  kTopLeft,
};

inline constexpr const char* kMaskNames[] = {"full", "causal", "top-left causal"};

DASH_HOST_DEVICE constexpr MaskKind mask_kind(bool causal) { return causal ? MaskKind::kCausal : MaskKind::kFull; }

// Whether every query sees from the first key on, as the forward takes for granted: it passes over the KV tiles that
// only other rows of a query tile see at the end of the keys alone (forward/rows.h).
DASH_HOST_DEVICE constexpr bool starts_at_first_key(MaskKind kind) {
  return kind == MaskKind::kFull || kind == MaskKind::kCausal || kind == MaskKind::kTopLeft;
}

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

  DASH_HOST_DEVICE constexpr Range keys_of(int query) const {
    int const end = is_full() ? sequence.seqlen_k : query + diagonal() + 1;
    return Range::between(0, min_int(end, sequence.seqlen_k));
  }

  DASH_HOST_DEVICE constexpr Range queries_of(int key) const {
    int const first = is_full() ? 0 : max_int(0, key - diagonal());
    // Under the others every key is seen, at the least by the last query.
    bool const may_be_unseen = kind == MaskKind::kTopLeft;
    return Range::between(may_be_unseen ? min_int(first, sequence.seqlen_q) : first, sequence.seqlen_q);
  }

  DASH_HOST_DEVICE constexpr bool visible(int query, int key) const {
    bool const exists = key < sequence.seqlen_k;
    return is_full() ? exists : exists && key <= query + diagonal();
  }

  // Whether a query of the tile does not see a key of it. Query rows past the end need no mask: their LSE is +inf.
  DASH_HOST_DEVICE constexpr bool hides_part_of(Range queries, Range keys) const {
    bool const past_end = keys.end() > sequence.seqlen_k;
    return is_full() ? past_end : past_end || keys.end() - 1 > queries.first + diagonal();
  }

 private:
  DASH_HOST_DEVICE constexpr bool is_full() const { return kind == MaskKind::kFull; }
  // The last key that query 0 sees.
  DASH_HOST_DEVICE constexpr int diagonal() const {
    return kind == MaskKind::kTopLeft ? 0 : sequence.seqlen_k - sequence.seqlen_q;
  }
};

}  // namespace dash_attn
