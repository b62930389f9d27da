// Copies K or V of a KV tile row by row, for pages whose size is not a multiple of the rows of a TMA box. TMA takes
// about 54 cycles for a box, however few rows it has. A warp issues the copies of one to four rows in a few cycles.
#pragma once

#include "../device/ptx.h"
#include "params.h"

namespace dash_attn::forward {

// The rows of the tensor in which the keys of a KV tile lie: lane i has those of its keys i, i + 32, ..., and kNoRow
// for keys that the sequence does not have.
template <int kKeys>
struct RowsOfKeys {
  static constexpr int kNoRow = -1;
  int of[ceil_div(kKeys, 32)];
};

// A warp starts to copy kColumns columns of these rows to a tile, as operations of its threads. Keys without a row and
// columns that the tensor does not have become zeros.
template <typename Swizzle, int kColumns, int kKeys, typename Element>
__device__ __forceinline__ void gather_tile(Element* tile, const RowsOfPages& source, int head,
                                            const RowsOfKeys<kKeys>& rows, uint64_t cache_hint) {
  constexpr int kChunkColumns = 16 / int(sizeof(Element));  // each lane copies 16 bytes
  constexpr int kChunks = kColumns / kChunkColumns, kRowsAtOnce = 32 / kChunks;
  static_assert(32 % kRowsAtOnce == 0 && kKeys % kRowsAtOnce == 0);
  const int lane = int(threadIdx.x) % 32, chunk = lane % kChunks, column = chunk * kChunkColumns;
  const int row_of_lane = lane / kChunks;
  const bool copies = row_of_lane < kRowsAtOnce, has_columns = column < source.columns;
  const Element* const from = static_cast<const Element*>(source.data) + head * source.stride_head + column;
  Element* const block = tile + column / Swizzle::kColumns * (kKeys * Swizzle::kColumns);
#pragma unroll
  for (int first = 0; first < kKeys; first += 32) {
#pragma unroll 4
    for (int row = first; row < min_int(first + 32, kKeys); row += kRowsAtOnce) {
      const int found = __shfl_sync(0xffffffff, rows.of[first / 32], (row + row_of_lane) % 32);
      const bool exists = has_columns && found != RowsOfKeys<kKeys>::kNoRow;
      const int place = Swizzle::place(row + row_of_lane, chunk % Swizzle::kChunks) * kChunkColumns;
      if (copies) {
        ptx::copy_16_bytes(block + (row + row_of_lane) * Swizzle::kColumns + place,
                           from + (exists ? found : 0) * source.stride_row, exists ? 16 : 0, cache_hint);
      }
    }
  }
  ptx::commit_copies();
}

}  // namespace dash_attn::forward
