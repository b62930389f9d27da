// Parts of many tensors in one launch: which warp reads which words, the position of a word in its whole tensor, and
// which sum it belongs to. All of it is plain C++ that also runs on the host (host.h), except for the exchange of sums
// within a warp and the load instructions.
//
// Words are numbered in the whole tensor, and all cuts are made in that numbering. A *strip* is a power of two of words
// that begins at a multiple of itself and lies in one block or, if blocks are shorter than 32 groups, has one group a
// lane. A warp works on one strip of one row of one piece at a time. A group belongs to lane group % 32, even if only a
// part of it is there.
#pragma once

#include <cstdint>

#include "../host_device.h"
#include "fingerprint.h"

namespace dash_attn::receipts {

constexpr int kLanes = 32;  // in a warp
// Blocks have 2^3 to 2^24 words, and strips 32 to 512 groups, which suffices to hide what a warp does once a strip.
constexpr int kLeastBlockShift = 3, kMostBlockShift = 24;
constexpr int kLeastStripShift = 8, kMostStripShift = 12;

// Equally spaced rows of words, in memory and in the whole tensor.
struct Piece {
  std::uintptr_t address;  // of the first word of the first row
  int64_t rows, columns;   // at least 1
  int64_t pitch;           // words from a row to the next in memory
  int64_t first;           // the number of the first word in the whole tensor
  int64_t stride;          // words from a row to the next in the whole tensor
  int64_t sums;            // the index among all sums of that of the tensor's block 0; may be negative
  int64_t units_end;       // units of the launch's pieces up to and including this one
  int64_t word_bytes;      // 1, 2 or 4
};

// The parameters of a launch. They are passed by value: nothing is copied that would have to be waited for or kept
// alive, and a captured graph contains them.
struct Table {
  static constexpr int kPieces = 56;
  Piece pieces[kPieces];
  uint64_t* sums;
  int64_t units;
  int count;
  int block_shift;
};
static_assert(sizeof(Table) <= 4096, "what every driver takes as parameters");

DASH_HOST_DEVICE constexpr int strip_shift(int block_shift) {
  return block_shift < kLeastStripShift  ? kLeastStripShift
         : block_shift > kMostStripShift ? kMostStripShift
                                         : block_shift;
}

// The number of halvings that add up the lanes of a warp whose groups belong to one block.
DASH_HOST_DEVICE constexpr int levels_of_sum(int block_shift) {
  return block_shift < kLeastStripShift ? block_shift - kLeastBlockShift : kLeastStripShift - kLeastBlockShift;
}

// The units of work of a row: the strips that it may overlap. In some rows the last one is empty.
DASH_HOST_DEVICE constexpr int64_t units_of_row(const Piece& piece, int shift) {
  const int64_t words = int64_t{1} << shift, place = piece.first & (words - 1);
  if (piece.rows == 1 || (piece.stride & (words - 1)) == 0) { return ((place + piece.columns - 1) >> shift) + 1; }
  return ((piece.columns + words - 2) >> shift) + 1;
}

struct Unit {
  int64_t first;           // the number of the strip's first word
  int low, high;           // the range of words that are there, counted from it; empty unless low < high
  std::uintptr_t address;  // of the strip's first word, even if that is not there
};

DASH_HOST_DEVICE constexpr Unit unit_of(const Piece& piece, int64_t number, int shift) {
  const int64_t units = units_of_row(piece, shift);
  const int64_t row = piece.rows == 1 ? 0 : number / units;
  const int64_t start = piece.first + row * piece.stride, end = start + piece.columns;
  const int64_t first = ((start >> shift) + (number - row * units)) << shift, next = first + (int64_t{1} << shift);
  Unit unit{};
  unit.first = first;
  if (first < end) {
    unit.low = static_cast<int>((start > first ? start : first) - first);
    unit.high = static_cast<int>((end < next ? end : next) - first);
  }
  unit.address = piece.address + static_cast<std::uintptr_t>((row * piece.pitch + first - start) * piece.word_bytes);
  return unit;
}

// Calls f(piece, unit) for the units first, first + step, ... of a launch.
template <class F>
DASH_HOST_DEVICE void for_units(const Table& table, int64_t first, int64_t step, F&& f) {
  int64_t begin = 0;
  int piece = 0;
  const int shift = strip_shift(table.block_shift);
  for (int64_t number = first; number < table.units; number += step) {
    while (number >= table.pieces[piece].units_end) { begin = table.pieces[piece++].units_end; }
    f(table.pieces[piece], unit_of(table.pieces[piece], number - begin, shift));
  }
}

// The sum of a group that only partly lies in the unit.
template <class Memory, int kBytes>
DASH_HOST_DEVICE uint64_t partial_sum(const Unit& unit, int group) {
  GroupSums<kBytes> sums;
  for (int lane = 0; lane < kGroupWords; ++lane) {
    const int word = kGroupWords * group + lane;
    if (word >= unit.low && word < unit.high) {
      sums.add(Memory::template word<kBytes>(unit.address + static_cast<unsigned>(word * kBytes)), lane);
    }
  }
  return sums.fingerprint(seed_of(static_cast<uint64_t>(unit.first / kGroupWords + group)));
}

// The sum of the lane's whole groups. Several loads are in flight together. Groups that are not there count as words of
// 0, which add nothing.
template <class Memory, int kBytes, bool kVectors>
DASH_HOST_DEVICE uint64_t whole_groups_sum(const Unit& unit, int lane) {
  constexpr int kTogether = 4, kGroupBytes = kGroupWords * kBytes;
  constexpr uint64_t kStep = kLanes * kGamma;
  const int first = (unit.low + kGroupWords - 1) / kGroupWords, end = unit.high / kGroupWords;
  const int begin = first / kLanes * kLanes;
  uint64_t sum = 0, seed = seed_of(static_cast<uint64_t>(unit.first / kGroupWords + begin + lane));
  for (int base = begin; base < end; base += kTogether * kLanes) {
    GroupBits<kBytes> groups[kTogether];
#if defined(__CUDACC__)
#pragma unroll
#endif
    for (int i = 0; i < kTogether; ++i) {
      const int group = base + i * kLanes + lane;
      groups[i] = {};
      if (group >= first && group < end) {
        groups[i] = Memory::template group<kBytes, kVectors>(unit.address + static_cast<unsigned>(group * kGroupBytes));
      }
    }
#if defined(__CUDACC__)
#pragma unroll
#endif
    for (int i = 0; i < kTogether; ++i) {
      sum += groups[i].fingerprint(seed);
      seed += kStep;
    }
  }
  return sum;
}

// What a lane contributes to the sum of its block.
template <class Memory, int kBytes>
DASH_HOST_DEVICE uint64_t lane_sum(const Unit& unit, int lane) {
  // If the address is not aligned to what a load takes, words are loaded one by one.
  constexpr unsigned kAlignment = kBytes == 1 ? 8 : 16;
  uint64_t sum = unit.address % kAlignment == 0 ? whole_groups_sum<Memory, kBytes, true>(unit, lane)
                                                : whole_groups_sum<Memory, kBytes, false>(unit, lane);
  const int head = unit.low / kGroupWords, tail = unit.high / kGroupWords;
  const bool has_head = unit.low % kGroupWords != 0, has_tail = unit.high % kGroupWords != 0;
  if (has_head && head % kLanes == lane) { sum += partial_sum<Memory, kBytes>(unit, head); }
  if (has_tail && tail % kLanes == lane && !(has_head && head == tail)) {
    sum += partial_sum<Memory, kBytes>(unit, tail);
  }
  return sum;
}

template <class Memory>
DASH_HOST_DEVICE uint64_t lane_sum(const Piece& piece, const Unit& unit, int lane) {
  switch (piece.word_bytes) {
    case 1:
      return lane_sum<Memory, 1>(unit, lane);
    case 2:
      return lane_sum<Memory, 2>(unit, lane);
    default:
      return lane_sum<Memory, 4>(unit, lane);
  }
}

// The index among all sums of that of the lane's block. It is meaningful only if the lane has words.
DASH_HOST_DEVICE constexpr int64_t place_of_sum(const Piece& piece, const Unit& unit, int lane, int block_shift) {
  return piece.sums + ((unit.first + kGroupWords * lane) >> block_shift);
}

}  // namespace dash_attn::receipts
