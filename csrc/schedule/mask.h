// Which keys a query sees: decided here for the forward, the backward, the schedules and the simulator, on the host and
// on the device. A kernel makes its Mask with a constant kind, so that the compiler drops the others.
#pragma once

#include <cstdint>

#include "../host_device.h"

namespace dash_attn {

DASH_HOST_DEVICE constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
DASH_HOST_DEVICE constexpr int min_int(int a, int b) { return a < b ? a : b; }
DASH_HOST_DEVICE constexpr int max_int(int a, int b) { return a > b ? a : b; }

// A kernel is compiled for one. Which one a call takes follows from what it asks for and never from its lengths, so
// that a sequence's bits do not depend on its batch.
enum class MaskKind : int {
  kFull,    // every key
  kCausal,  // no key behind the query's own
  kWindow,  // keys near the query's own, and of its chunk
};

inline constexpr int kNumMasks = 3;
inline constexpr const char* kMaskNames[kNumMasks] = {"full", "causal", "window"};

// Whether every query that sees a key sees all keys before it.
DASH_HOST_DEVICE constexpr bool starts_at_first_key(MaskKind kind) { return kind != MaskKind::kWindow; }

inline constexpr int kUnbounded = (1 << 30) - 1;  // more keys than a sequence has: lengths are smaller

// The query's own key is p = query + seqlen_k - seqlen_q: the last query's is the last key. It sees those from p - left
// to p + right, and of these, where `chunk` is not 0, the ones of its own chunk: keys with the same key / chunk as p.
struct Window {
  int left, right, chunk;
  // Of a call that is a chunk of a sequence's queries by a chunk of its keys, else 0: how many keys later than usual a
  // query's own one is, and how many keys of the sequence come before.
  int own_key_shift, keys_before;

  DASH_HOST_DEVICE constexpr Window of_whole_sequence() const { return {left, right, chunk, 0, 0}; }
};

// What a call asks for.
struct MaskRule {
  MaskKind kind;
  Window window;  // of kWindow alone, but for where a chunk of a sequence lies

  // Without a bound, or with one alone, it is a window too.
  DASH_HOST_DEVICE constexpr Window as_window() const {
    if (kind == MaskKind::kWindow) return window;
    return {kUnbounded, kind == MaskKind::kCausal ? 0 : kUnbounded, 0, window.own_key_shift, window.keys_before};
  }
};

// FlashAttention's arguments: a negative side is unbounded, `causal` is right = 0, no chunk is 0.
constexpr MaskRule mask_rule(bool causal, int64_t left, int64_t right, int64_t chunk) {
  if (causal) right = 0;
  bool const left_bounded = left >= 0 && left < kUnbounded, right_bounded = right >= 0 && right < kUnbounded;
  bool const chunked = chunk > 0 && chunk < kUnbounded;
  MaskKind const kind = left_bounded || chunked || (right_bounded && right > 0) ? MaskKind::kWindow
                        : right_bounded                                         ? MaskKind::kCausal
                                                                                : MaskKind::kFull;
  if (kind != MaskKind::kWindow) return {kind, {}};
  return {kind,
          {left_bounded ? static_cast<int>(left) : kUnbounded, right_bounded ? static_cast<int>(right) : kUnbounded,
           chunked ? static_cast<int>(chunk) : 0}};
}

// Of a chunk of a sequence: its distance from the sequence's other rows. Sums of two and of two lengths are ints.
inline constexpr int kMostRowsAway = 1 << 28;

// Lengths of one sequence; less than kUnbounded.
struct Sequence {
  int seqlen_q, seqlen_k;
};

// first, first + 1, ..., first + count - 1; empty where count is 0.
struct Range {
  int first, count;

  DASH_HOST_DEVICE constexpr int end() const { return first + count; }
  DASH_HOST_DEVICE constexpr bool contains(int i) const { return first <= i && i < end(); }
  DASH_HOST_DEVICE static constexpr Range between(int first, int end) { return {first, max_int(0, end - first)}; }
};

// Both ends of what a query sees, and of the queries that see a key, never move back from one to the next: so what a
// tile sees follows from its first and last row.
//
// Of a chunk: keys before and behind it are not there, and a query's own key may be one of those.
struct Mask {
  MaskKind kind;
  Window window;
  Sequence sequence;

  // Of a query that exists; of one past the end no less than of the last, and no more than there is.
  DASH_HOST_DEVICE constexpr Range keys_of(int query) const {
    if (kind == MaskKind::kFull) return {0, sequence.seqlen_k};
    int const own = query + diagonal();
    if (kind == MaskKind::kCausal) return Range::between(0, min_int(own + 1, sequence.seqlen_k));
    int const first = max_int(own - window.left, chunk_start(own));
    int const end = min_int(own + window.right + 1, chunk_end(own));
    return Range::between(min_int(max_int(0, first), sequence.seqlen_k), min_int(end, sequence.seqlen_k));
  }

  // Of a key that exists. Their own keys are diagonal(), diagonal() + 1, ..., which end with seqlen_k - 1, but for a
  // chunk's.
  DASH_HOST_DEVICE constexpr Range queries_of(int key) const {
    if (kind == MaskKind::kFull) return {0, sequence.seqlen_q};
    if (kind == MaskKind::kCausal) {
      return Range::between(existing(max_int(key, diagonal()) - diagonal()), sequence.seqlen_q);
    }
    int const first = max_int(key - window.right, chunk_start(key));
    int const end = min_int(key + window.left + 1, chunk_end(key));
    int const own_end = sequence.seqlen_k + window.own_key_shift;
    return Range::between(existing(max_int(first, diagonal()) - diagonal()), min_int(end, own_end) - diagonal());
  }

  // The key that query 0 is aligned with.
  DASH_HOST_DEVICE constexpr int diagonal() const {
    return sequence.seqlen_k - sequence.seqlen_q + window.own_key_shift;
  }

  // Whether a query of the tile does not see a key of it. Query rows past the end need no mask: their LSE is +inf.
  DASH_HOST_DEVICE constexpr bool hides_part_of(Range queries, Range keys) const {
    return keys.first < keys_of(queries.end() - 1).first || keys.end() > keys_of(queries.first).end();
  }

 private:
  // A first query, which only a chunk may have behind its last one.
  DASH_HOST_DEVICE constexpr int existing(int first) const {
    return window.own_key_shift == 0 ? first : min_int(first, sequence.seqlen_q);
  }

  // Where the chunk of attention that a key is in begins, and where the next one does. What lies before key 0 of the
  // sequence counts as one: no key is there to see.
  DASH_HOST_DEVICE constexpr int chunk_start(int key) const {
    int const number = key + window.keys_before;
    return window.chunk == 0 || number < 0 ? -kUnbounded : key - number % window.chunk;
  }
  DASH_HOST_DEVICE constexpr int chunk_end(int key) const {
    int const number = key + window.keys_before;
    return window.chunk == 0 ? kUnbounded
           : number < 0      ? -window.keys_before
                             : min_int(key - number % window.chunk, kUnbounded - window.chunk) + window.chunk;
  }
};

DASH_HOST_DEVICE constexpr Mask mask_of(MaskRule const& rule, Sequence const& sequence) {
  return {rule.kind, rule.window, sequence};
}

}  // namespace dash_attn
