// The random bits of dropout for a warpgroup's rows of a query tile.
#pragma once

#include <type_traits>

#include "config.h"
#include "params.h"
#include "rows.h"

namespace dash_attn::forward {

template <typename Variant>
struct BitsOfRows {
  using Bits = dropout::FragmentBits<dropout::FragmentRows::kQueries, Variant::kKey>;
  static constexpr bool kDrops = Variant::Score::kDrops;
  using Read = std::conditional_t<kDrops, typename Bits::Read, Empty>;

  const KernelParams& params;
  const AnnouncedTile& tile;  // the query tile; with dropout all its rows are of one head
  const int thread;

  __device__ __forceinline__ const uint8_t* find(const WarpgroupRows<Variant>& rows) const {
    int thread_anew = thread;  // recomputed from here on rather than kept in registers
    opaque(thread_anew);
    return Bits::row_of(params.dropout, params.dropout.of_head(tile.number, tile.head_group), rows.first_position,
                        thread_anew);
  }

  // Called long before the bits are used, because they come from global memory. Every KV tile but the last has all its
  // keys; the plan of a pack rejects sequences that are longer than the bits. Keys of the last tile may not exist.
  __device__ __forceinline__ Read read(const WarpgroupRows<Variant>& rows, int kv_tile) const {
    if constexpr (kDrops) {
      return Bits::read_whole(found(rows), kv_tile * Variant::kKey);
    } else {
      return {};
    }
  }
  __device__ __forceinline__ Read read_last(const WarpgroupRows<Variant>& rows) const {
    if constexpr (kDrops) {
      return Bits::read(params.dropout, found(rows), (rows.kv.end() - 1) * Variant::kKey);
    } else {
      return {};
    }
  }

 private:
  __device__ __forceinline__ const uint8_t* found(const WarpgroupRows<Variant>& rows) const {
    if constexpr (Variant::kKeepsRowOfBits) {
      return rows.bits.first;
    } else {
      return find(rows);
    }
  }
};

}  // namespace dash_attn::forward
