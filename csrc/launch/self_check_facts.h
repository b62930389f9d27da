// What the kernel of the self-check is given and leaves, and what is wrong with it. Plain C++: no CUDA.
#pragma once

#include <cstdint>
#include <string>

namespace dash_attn::self_check {

// Bits of fp32 numbers: sums of subnormal ones are sums of integers, up to the smallest normal number, 0x00800000.
constexpr int kSums = 4;
constexpr uint32_t kAddends[kSums] = {0x00000001, 0x00400000, 0x80000003, 0x007fffff};
constexpr uint32_t kBefore[kSums] = {0x00000002, 0x00400000, 0x00000001, 0x00000001};
constexpr uint32_t kAfter[kSums] = {0x00000003, 0x00800000, 0x80000002, 0x00800000};

// A pack of kRows rows, of which the sequence has kLength before row kEnd; row r holds the number r + 1, and a tile of
// kTileRows rows is read from the sequence's start and then written there, full of kMarks.
constexpr int kRows = 16, kLength = 3, kEnd = 8, kTileRows = 8;
constexpr int kFirst = kEnd - kLength;
constexpr uint16_t kMark = 77;

// One number of each row stands for all of them.
struct Facts {
  uint32_t sums[kSums];
  uint16_t read[kTileRows];
  uint16_t written[kRows];
};

// Empty where nothing is wrong.
inline std::string problem_of(const Facts& facts) {
  for (int i = 0; i < kSums; ++i) {
    if (facts.sums[i] != kAfter[i]) { return "a bulk addition (cp.reduce.async.bulk) does not keep subnormal numbers"; }
  }
  for (int row = 0; row < kTileRows; ++row) {
    const int expected = row < kLength ? kFirst + row + 1 : 0;
    if (facts.read[row] != expected) { return "a TMA load does not clip at the end of a packed sequence"; }
  }
  for (int row = 0; row < kRows; ++row) {
    const bool is_of_sequence = row >= kFirst && row < kEnd;
    if (facts.written[row] != (is_of_sequence ? kMark : row + 1)) {
      return "a TMA store does not clip at the end of a packed sequence";
    }
  }
  return {};
}

}  // namespace dash_attn::self_check
