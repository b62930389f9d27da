// Copies K or V of a KV tile row by row, for pages whose size is not a multiple of the rows of a TMA box. TMA takes
// about 54 cycles for a box, however few rows it has. A warp issues the copies of four or eight rows in a few cycles.
#pragma once

#include "../device/ptx.h"
#include "params.h"

namespace dash_attn::forward {

// Where the keys of a KV tile lie: lane i has the places of its keys i, i + 32, ...
template <int kKeys>
struct PlacesOfKeys {
  PageTable::Place of[ceil_div(kKeys, 32)];
};

// A warp starts to copy kColumns columns of these keys to a tile, as operations of its threads. The tile's keys after
// the first `count`, and columns that the tensor does not have, become zeros. A lane copies the same chunk of each
// block of its rows, so that only where a row begins is computed for each copy.
template <typename Swizzle, int kColumns, int kKeys, typename Element>
__device__ __forceinline__ void gather_tile(Element* tile, const RowsOfPages& source, int head,
                                            const PageTable& pages, const PlacesOfKeys<kKeys>& keys, int count,
                                            uint64_t cache_hint) {
  constexpr int kChunkColumns = 16 / int(sizeof(Element)), kRowsAtOnce = 32 / Swizzle::kChunks;
  static_assert(kKeys % kRowsAtOnce == 0);
  const int lane = int(threadIdx.x) % 32, chunk = lane % Swizzle::kChunks, row_of_lane = lane / Swizzle::kChunks;
  const Element* const of_head = static_cast<const Element*>(source.data) + head * source.stride_head;
#pragma unroll
  for (int first = 0; first < kKeys; first += 32) {
    const Element* const own_row = of_head + pages.row_within_tensor(keys.of[first / 32]) * source.stride_row;
#pragma unroll
    for (int row = first; row < min_int(first + 32, kKeys); row += kRowsAtOnce) {
      const auto found = reinterpret_cast<const Element*>(
          __shfl_sync(0xffffffff, reinterpret_cast<uint64_t>(own_row), row % 32 + row_of_lane));
      Element* const to = tile + (row + row_of_lane) * Swizzle::kColumns +
                          Swizzle::place(row + row_of_lane, chunk) * kChunkColumns;
#pragma unroll
      for (int block = 0; block < kColumns / Swizzle::kColumns; ++block) {
        const int column = block * Swizzle::kColumns + chunk * kChunkColumns;
        const bool exists = row + row_of_lane < count && column < source.columns;
        ptx::copy_16_bytes(to + block * kKeys * Swizzle::kColumns, found + column, exists ? 16 : 0, cache_hint);
      }
    }
  }
  ptx::commit_copies();
}

}  // namespace dash_attn::forward
