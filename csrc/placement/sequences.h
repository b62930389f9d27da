// The sequences of a call, and the positions of their rows, on which no order of sums depends. Plain C++: no CUDA or
// torch.
//
// In a dense batch all sequences have the same lengths. In a pack the rows of sequences follow one another in one
// tensor, and only the device knows the lengths: before a pass, packing/plan.h writes a PackedSequence for each
// sequence, in the order in which they are worked on. A step of decoding whose tiles all run at once needs none.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../contract/divisor.h"
#include "../contract/mask.h"
#include "../host_device.h"

namespace dash_attn {

// Row r of a sequence is at TMA coordinates (first + r, outer, wrap) of a tensor map (launch/tensor_map.h), which reads
// rows past the sequence's end as zeros and does not write them.
struct RowOrigin {
  int first, outer, wrap;

  // `outer` is the sequence's number in a dense batch, and the row at which the sequence ends in a pack.
  DASH_HOST_DEVICE static constexpr RowOrigin of(bool is_pack, int outer, int length) {
    return is_pack ? RowOrigin{kRaggedRows - length, outer, kRaggedRows} : RowOrigin{0, outer, 0};
  }

  // The rows of the one dimension of a pack's map that clips: more than a sequence has. The map's outer dimension
  // advances by a row, and its last one goes back by kRaggedRows rows, so that the coordinates yield row outer - length
  // + r.
  static constexpr int kRaggedRows = 1 << 30;
};

// The most entries that a table of pages may have: kernels compute their indices in 32 bits.
inline constexpr int64_t kMostTableEntries = (int64_t{1} << 32) - 1;

// Where the keys of a pack's sequences lie when they lie in pages: each page has the rows of `page_rows` keys of one
// sequence, in their order. Null where the keys of a sequence follow each other.
struct PageTable {
  const int* pages;  // (batch, max_pages)
  int max_pages;     // of a sequence
  Divisor page_rows;
  int page_distance;  // rows of the tensor from one page to the next
  int num_pages;      // of the tensor

  // Keys that one TMA operation loads.
  static constexpr int kBoxRows = 16;

  DASH_HOST_DEVICE constexpr bool exists() const { return pages != nullptr; }

  // Whether a box may have rows of several pages. Then no TMA operation loads it.
  DASH_HOST_DEVICE constexpr bool cuts_boxes() const { return exists() && max_pages > 1 && page_rows % kBoxRows != 0; }

  // Keys that a sequence has room for; fewer than kUnbounded.
  DASH_HOST_DEVICE constexpr int capacity() const { return max_pages * page_rows; }

  // The keys in a box where `keys_left` keys of a sequence are left. The rest of the box reads as zeros, and a page
  // without keys of the sequence is not looked up.
  static DASH_HOST_DEVICE constexpr int keys_of_box(int keys_left) { return max_int(0, min_int(keys_left, kBoxRows)); }

  // Where a key of a sequence lies.
  struct Place {
    int page, row;  // of the page
  };

  DASH_HOST_DEVICE constexpr Place place_of(int sequence, int key) const {
    int const number = key / page_rows;
    return {page(sequence, number), key - number * page_rows};
  }

  // Entry `number` of a sequence.
  DASH_HOST_DEVICE constexpr int page(int sequence, int number) const {
    return pages[uint32_t(sequence) * uint32_t(max_pages) + uint32_t(number)];
  }

  // The row of the tensor. Its computation waits for the table, which place_of only begins to read.
  DASH_HOST_DEVICE constexpr int row_of(Place place) const { return place.page * page_distance + place.row; }

  // The same, or some row of the tensor where a wrong entry of the table has not been refused yet.
  DASH_HOST_DEVICE constexpr int row_within_tensor(Place place) const {
    return row_of({max_int(0, min_int(place.page, num_pages - 1)), place.row});
  }
};

// A sequence of a pack: its lengths, and where its rows, its work and its share of the workspace begin.
struct PackedSequence {
  Sequence lengths;
  int number;        // in the pack
  int end_q, end_k;  // the rows of the pack at which it ends
  int last_heads;    // last_heads of TileScheduler, and last_groups of QueryTileScheduler
  int first_unit;    // of the work: packing/plan.h

  // The backward's.
  int head_swizzle, swizzle_with_turns;    // head_swizzle.h
  int splits;                              // splits.h
  int first_query_tile;                    // its first one among all query tiles of the workspace
  int first_split_tile;                    // of the sums over splits and parts, in KV tiles of sequences that have them
  int first_key_chunk;                     // of the statistics of order-free accumulation

  // Maps a number of the pack's work to the number within this sequence's work. A unit of work has `numbers_of_unit`
  // numbers.
  DASH_HOST_DEVICE constexpr int number_within(int number, int numbers_of_unit) const {
    return number - first_unit * numbers_of_unit;
  }
};

struct PackTotals {
  int units, query_tiles, split_tiles, key_chunks;
};

DASH_HOST_DEVICE constexpr PackTotals operator+(PackTotals const& a, PackTotals const& b) {
  return {a.units + b.units, a.query_tiles + b.query_tiles, a.split_tiles + b.split_tiles,
          a.key_chunks + b.key_chunks};
}

// The results of packing/plan.h for a pack. All pointers are null in a dense batch, and for a pack without a plan.
struct PackView {
  const PackedSequence* sequences;  // longest first
  const int* of_unit;               // the place in `sequences` of each unit of work
  const int* of_query_tile;         // and, in the backward, of each query tile of the workspace
  const PackTotals* totals;

  DASH_HOST_DEVICE constexpr bool is_pack() const { return sequences != nullptr; }

  // The place in `sequences` of the sequence to which a number of the pack's work belongs.
  template <typename Number>  // an int where the members of a Divisor would take registers that are missing
  DASH_HOST_DEVICE constexpr int place_of(int number, Number const& numbers_of_unit) const {
    return of_unit[number / numbers_of_unit];
  }
};

// docs/design.md states these sizes.
static_assert(sizeof(PackedSequence) == 52 && sizeof(PackTotals) == 16);
static_assert(std::is_trivially_copyable_v<PackedSequence> && std::is_trivially_copyable_v<PackView>);

}  // namespace dash_attn
