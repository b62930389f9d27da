// Which keys a query sees. This is decided only here, for the forward, the backward and the schedules, on the host and
// on the device. A kernel builds its Mask with a constant kind, so that the compiler drops the code of the others.
#pragma once

#include <cstdint>

#include "../host_device.h"
#include "divisor.h"

namespace dash_attn {

DASH_HOST_DEVICE constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
DASH_HOST_DEVICE constexpr int min_int(int a, int b) { return a < b ? a : b; }
DASH_HOST_DEVICE constexpr int max_int(int a, int b) { return a > b ? a : b; }

// Each kernel is compiled for one kind. The kind of a call follows from its arguments and never from its lengths, so
// that a sequence's bits do not depend on its batch.
enum class MaskKind : int {
  kFull,     // every key
  kCausal,   // no key after the query's own
  kWindow,   // keys near the query's own and in its chunk
  kColumns,  // the same, except for the keys that are hidden from the query one by one (columns.h)
};

inline constexpr int kNumMasks = 4;
inline constexpr const char* kMaskNames[kNumMasks] = {"full", "causal", "window", "columns"};

// Whether every query that sees a key sees all keys before it.
DASH_HOST_DEVICE constexpr bool starts_at_first_key(MaskKind kind) {
  return kind == MaskKind::kFull || kind == MaskKind::kCausal;
}

// Whether a query tile of the forward has rows of one head alone and tiles begin at the first query, or for kColumns
// where end_of_query_tile (placement/columns.h) says. Under a window, a value of V that is not finite may spoil rows
// beside those that see it, and the bits of dropout come in blocks of a head's rows: which rows share a tile must then
// follow from the sequence alone.
DASH_HOST_DEVICE constexpr bool fixes_rows_of_tiles(MaskKind kind, bool drops) {
  return !starts_at_first_key(kind) || drops;
}

inline constexpr int kUnbounded = (1 << 30) - 1;  // more keys than a sequence has: lengths are smaller

// The query's own key is p = query + seqlen_k - seqlen_q: the last query's own key is the last key. A query sees keys p
// - left to p + right and, if `chunk` is not 0, of these only the keys of its own chunk, whose key / chunk is that of
// p.
struct Window {
  int left, right;
  Divisor chunk;
  // For a call of a chunk of a sequence's queries and a chunk of its keys, otherwise 0: by how many keys a query's own
  // key is shifted, and how many keys of the sequence come before.
  int own_key_shift, keys_before;

  DASH_HOST_DEVICE constexpr Window of_whole_sequence() const { return {left, right, chunk, 0, 0}; }
};

// The mask that a call asks for.
struct MaskRule {
  MaskKind kind;
  Window window;  // only for kWindow and kColumns, except for the position of a chunk of a sequence

  // The same mask as a window, which may lack bounds.
  DASH_HOST_DEVICE constexpr Window as_window() const {
    if (!starts_at_first_key(kind)) return window;
    int const right = kind == MaskKind::kCausal ? 0 : kUnbounded;
    return {kUnbounded, right, Divisor(0), window.own_key_shift, window.keys_before};
  }
};

// FlashAttention's arguments: a negative side is unbounded, `causal` means right = 0, and a chunk of 0 means no chunk.
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
           Divisor(chunked ? static_cast<int>(chunk) : 0)}};
}

// The largest distance of a chunk from the sequence's other rows. A sum of two such distances and two lengths fits in
// an int.
inline constexpr int kMostRowsAway = 1 << 28;

// The lengths of one sequence, below kUnbounded.
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

// Both ends of what a query sees, and both ends of the queries that see a key, never move back from one row to the
// next. So what a tile sees follows from its first and last row. What kColumns hides is not part of this (columns.h).
//
// For a chunk of a sequence, keys before and after it do not exist, and a query's own key may be one of those.
struct Mask {
  MaskKind kind;
  Window window;
  Sequence sequence;

  // The keys that a query sees. For a query past the end, the end of the range is at least that of the last query, and
  // at most the number of keys.
  DASH_HOST_DEVICE constexpr Range keys_of(int query) const {
    if (kind == MaskKind::kFull) return {0, sequence.seqlen_k};
    int const own = query + diagonal();
    if (kind == MaskKind::kCausal) return Range::between(0, min_int(own + 1, sequence.seqlen_k));
    int const first = max_int(own - window.left, chunk_start(own));
    int const end = min_int(own + window.right + 1, chunk_end(own));
    return Range::between(min_int(max_int(0, first), sequence.seqlen_k), min_int(end, sequence.seqlen_k));
  }

  // The queries that see a key, which must exist. The queries' own keys are diagonal(), diagonal() + 1, ..., and end
  // with seqlen_k - 1 except for a chunk's.
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

  // The own key of query 0.
  DASH_HOST_DEVICE constexpr int diagonal() const {
    return sequence.seqlen_k - sequence.seqlen_q + window.own_key_shift;
  }

  // Whether some query of the tile does not see some key of it. Query rows past the end need no mask: their LSE is
  // +inf.
  DASH_HOST_DEVICE constexpr bool hides_part_of(Range queries, Range keys) const {
    return keys.first < keys_of(queries.end() - 1).first || keys.end() > keys_of(queries.first).end();
  }

 private:
  // Clamps a first query. Only a chunk's may lie past its last query.
  DASH_HOST_DEVICE constexpr int existing(int first) const {
    return window.own_key_shift == 0 ? first : min_int(first, sequence.seqlen_q);
  }

  // Where the attention chunk of a key begins, and where the next one begins. What lies before key 0 of the sequence
  // counts as one chunk, which has no keys to see.
  DASH_HOST_DEVICE constexpr int chunk_start(int key) const {
    int const number = key + window.keys_before;
    return window.chunk == 0 || number < 0 ? -kUnbounded : key - number % window.chunk;
  }
  DASH_HOST_DEVICE constexpr int chunk_end(int key) const {
    int const number = key + window.keys_before;
    if (window.chunk == 0) return kUnbounded;
    return number < 0 ? -window.keys_before : min_int(chunk_start(key), kUnbounded - window.chunk) + window.chunk;
  }
};

DASH_HOST_DEVICE constexpr Mask mask_of(MaskRule const& rule, Sequence const& sequence) {
  return {rule.kind, rule.window, sequence};
}

}  // namespace dash_attn
