// What a tensor map stands for: the boxes that TMA copies.
#pragma once
#include <cuda.h>

#include "machine.h"

struct TensorOfMap {
  static constexpr int kRank = 5;
  char* data;
  uint64_t sizes[kRank], strides[kRank];  // strides in bytes
  uint32_t box[kRank];
  uint32_t swizzle_rows;  // the pattern's, of 16-byte chunks: 8 of 128 bytes, 4 of 64

  // Calls f(address in shared memory, address in the tensor or null) for each element of the box.
  template <typename F>
  void for_box(uint32_t shared, const int (&at)[kRank], F&& f) const {
    if (at[2] < 0) { emulator::fail("a box that begins at a negative row"); }
    uint32_t index[kRank] = {};
    const uint32_t row_bytes = 2 * box[0];
    if (shared % (8 * row_bytes) != 0) { emulator::fail("a box of which the swizzle's pattern is cut"); }
    for (uint32_t row = 0;; ++row) {
      bool has_row = true;
      uint64_t offset = 0;  // sums wrap around, as addresses do
      for (int d = 1; d < kRank; ++d) {
        const int64_t i = int64_t{at[d]} + index[d];
        has_row &= i >= 0 && uint64_t(i) < sizes[d];
        offset += uint64_t(i) * strides[d];
      }
      for (uint32_t column = 0; column < box[0]; ++column) {
        const uint32_t place = shared + row * row_bytes + 2 * column;
        const int64_t i = int64_t{at[0]} + column;
        const bool is_inside = has_row && i >= 0 && uint64_t(i) < sizes[0];
        f(place ^ (place >> 7 & (swizzle_rows - 1)) << 4,
          is_inside ? data + offset + uint64_t(i) * strides[0] : nullptr);
      }
      int d = 1;
      for (; d < kRank; ++d) {
        if (++index[d] < box[d]) { break; }
        index[d] = 0;
      }
      if (d == kRank) { return; }
    }
  }
  int box_bytes() const { return int(2 * box[0] * box[1] * box[2] * box[3] * box[4]); }
};
