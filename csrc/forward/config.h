// All sizes of the forward kernel (Variant), its shared memory, and the barriers that say when each buffer is full or
// empty.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../contract/tile_grid.h"
#include "../contract/tile_shapes.h"
#include "../device/barrier.h"
#include "../device/gemm.h"
#include "../device/ring.h"
#include "../device/score.h"
#include "../device/sm90.h"
#include "../dropout/mask.h"
#include "../placement/columns.h"
#include "../placement/forward_tiles.h"

namespace dash_attn::forward {

// kIsShort_: the query tile has rows for one warpgroup alone (short_mainloop.h).
template <typename Element_, int kQkDim_, int kValueDim_, MaskKind kMask_, typename Score_, bool kIsShort_ = false>
struct Variant {
  using Element = Element_;
  using Score = Score_;
  static constexpr MaskKind kMask = kMask_;
  static constexpr bool kHasColumns = kMask == MaskKind::kColumns;
  static constexpr TileShape kTile = forward_tile_shape({kQkDim_, kValueDim_});
  static constexpr bool kIsShort = kIsShort_;
  static constexpr int kQuery = kIsShort ? kWarpgroupRows : kTile.query;
  static constexpr int kKey = kTile.key;
  static constexpr int kQkDim = kTile.head_dims.qk;
  static constexpr int kValueDim = kTile.head_dims.v;
  using Swizzle = SwizzleOf<kQkDim>;  // of all tiles
  static_assert(kQkDim % Swizzle::kColumns == 0 && kValueDim % Swizzle::kColumns == 0);
  static_assert(kKey % kProductDepth == 0 && kQuery % kWarpgroupRows == 0);

  // Warpgroup 0 loads and stores. Each of the others owns 64 rows of the query tile, from S to the output.
  static constexpr int kConsumers = kQuery / kWarpgroupRows;
  static constexpr int kConsumerWarps = kConsumers * kWarpgroupWarps;
  static constexpr int kThreads = (kConsumers + 1) * kWarpgroupThreads;
  static_assert(kIsShort ? kConsumers == 1 && kValueDim <= 128 : kConsumers == 2 || kConsumers == 3);
  static_assert(kConsumers <= kMostParts && kWarpgroupRows == kPartRows);
  // One consumer uses 256 of the 512 registers. 104 suffice for gather.h.
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : kConsumers == 2 ? 40 : 104;
  static constexpr int kConsumerRegisters = consumer_registers(kConsumers, kProducerRegisters);

  static constexpr int kQueryTileBytes = kQuery * kQkDim * sizeof(Element);
  static constexpr int kKeyTileBytes = kKey * kQkDim * sizeof(Element);
  static constexpr int kValueTileBytes = kKey * kValueDim * sizeof(Element);
  static constexpr int kBytesForTiles = kSharedMemoryLimit - 1024;  // the rest is for barriers

  // Buffers for tiles of Q: one in use, one being loaded, one being stored as output. There are two or three if that
  // leaves room for three tiles of K and V, and otherwise as many as fit beside two.
  static constexpr int query_stages_beside(int tiles) {
    return min_int(3, (kBytesForTiles - tiles * (kKeyTileBytes + kValueTileBytes)) / kQueryTileBytes);
  }
  static constexpr int kQueryStages = query_stages_beside(3) >= 2 ? query_stages_beside(3) : query_stages_beside(2);

  // The output of a tile is staged in place of its Q: a warpgroup reads no rows of Q but its own. With one buffer of Q
  // the output is staged in place of V instead, and the next Q is loaded while the last P V runs.
  static constexpr bool kOutputInValues = kQueryStages == 1;
  static constexpr int kOutputRows = kOutputInValues ? kWarpgroupRows : kQuery;  // of the tile that it is staged in
  static_assert(kOutputInValues ? kWarpgroupRows <= kKey : kValueDim <= kQkDim);

  // Query tiles that are announced at a time: the next one may be announced before the output of this one has been
  // stored.
  static constexpr int kTileSlots = kOutputInValues ? 2 : kQueryStages;

  // Buffers for tiles of K, and as many for tiles of V.
  static constexpr int kStages = (kBytesForTiles - kQueryStages * kQueryTileBytes) / (kKeyTileBytes + kValueTileBytes);
  static_assert(kStages >= (kOutputInValues ? kConsumers : 2));

  // Whether the last P V of a query tile overlaps the first S of the next one, which takes two buffers of Q. Three
  // consumers have no registers for that beside a changed score.
  static constexpr bool kCrosses = kQueryStages > 1 && !(kConsumers == 3 && Score::kChangesLogits);

  // Whether a warpgroup waits for P V before its exponentials, and rounds P among them. With three consumers the
  // products of the others run meanwhile. With two, a consumer computes its exponentials while its own P V runs.
  static constexpr bool kRoundsBesideExponentials = kConsumers == 3;

  // Whether the kernel serves steps of decoding without a plan. With pages only the kernels of short tiles do: the
  // loaders of the others have no registers for limiting the entries of the table.
  DASH_HOST_DEVICE static constexpr bool serves_steps(bool has_pages) {
    return kIsShort || (!kHasColumns && !Score::kDrops && !has_pages);
  }

  // Whether a call may ask for the largest logits. Kernels that can are slower in every call.
  static constexpr bool kFindsLargest = kHasColumns;

  // Whether a thread keeps the address of its bits of dropout. There are no registers for it beside 256 columns of
  // output, nor, with three consumers, beside the places of the outputs.
  static constexpr bool kKeepsRowOfBits = Score::kDrops && kValueDim < 256 && !(kConsumers == 3 && kOutputInValues);

  DASH_HOST_DEVICE static constexpr TileGrid grid(Sequence const& sequence, Window const& window) {
    return {{kQuery, kKey, 1}, {kMask, window.of_whole_sequence(), sequence}};
  }
};

constexpr int kNoMoreTiles = -1;

// The tiles of a word that are loaded from one on, which is the highest bit. Bit 0 is KV tile `first`.
struct WordOfTiles {
  int first;
  uint32_t live, hidden[kMostParts];  // as in LiveWord
};

// A query tile as the loader announces it to the other warps.
struct AnnouncedTile {
  int end;  // the position at which the next tile begins, or kNoMoreTiles
  int head_group;
  Sequence sequence;
  RowOrigin rows;
  int64_t first_lse;  // index of the LSE of head 0's query 0
  int number;         // of the sequence in the batch
};

// What the loader says of an announced query tile under a mask by key columns.
struct ColumnsOfTile {
  LiveTiles loaded;           // for it
  const HiddenQueries* keys;  // of its sequence, from the first one on
};

// What else the loader of V must know of an announced short query tile.
template <typename Variant>
struct KeyRowsOfTiles {
  RowOrigin of[Variant::kTileSlots];
};

template <typename Variant>
struct LoadedColumns {
  ColumnsOfTile of_tile[Variant::kTileSlots];
  WordOfTiles words[Variant::kStages];  // from the tile in that buffer of K on
};

template <typename Variant>
struct alignas(1024) SharedStorage {
  using Element = typename Variant::Element;

  Element q[Variant::kQueryStages][Variant::kQuery * Variant::kQkDim];
  Element k[Variant::kStages][Variant::kKey * Variant::kQkDim];
  Element v[Variant::kStages][Variant::kKey * Variant::kValueDim];

  AnnouncedTile tiles[Variant::kTileSlots];

  TransactionBarrier q_full[Variant::kQueryStages];
  Barrier q_empty[Variant::kQueryStages];
  Barrier out_full[Variant::kQueryStages][Variant::kConsumers];
  TransactionBarrier k_full[Variant::kStages], v_full[Variant::kStages];
  Barrier k_empty[Variant::kStages], v_empty[Variant::kStages];

  // With kOutputInValues: the buffer of V that a warpgroup's output is staged in, and whether the output has been
  // stored.
  int output_slot[Variant::kConsumers];
  Barrier out_left[Variant::kConsumers];

  std::conditional_t<Variant::kHasColumns, LoadedColumns<Variant>, Empty> columns;
  std::conditional_t<Variant::kIsShort, KeyRowsOfTiles<Variant>, Empty> key_rows;

  // The query tile whose Q is in that buffer.
  __device__ __forceinline__ AnnouncedTile& tile(RingIndex<Variant::kQueryStages> place) {
    return tiles[place.count % Variant::kTileSlots];
  }
  // What is announced with it under a mask by key columns.
  __device__ __forceinline__ ColumnsOfTile& columns_of(RingIndex<Variant::kQueryStages> place) {
    return columns.of_tile[place.count % Variant::kTileSlots];
  }
};

// The number of arrivals that complete each barrier.
template <typename Variant>
struct Arrivals {
  static constexpr int kTransaction = 1;                          // the thread that announces bytes or copied rows
  static constexpr int kConsumerWarps = Variant::kConsumerWarps;  // a lane of each warp whose products have completed
  static constexpr int kStagingWarps = kWarpgroupWarps;           // a lane of each warp that has staged its output
  // For each warpgroup: the storer, after the output has left the buffer, and every thread that has read the announced
  // tile; and for short tiles the warp that loads V. The storers alone would do, since each has waited for a lane of
  // all its warps, but racecheck does not follow that.
  static constexpr int kDoneWithTile =
      Variant::kConsumers * (kWarpgroupThreads + (Variant::kOutputInValues ? 0 : 1)) + (Variant::kIsShort ? 32 : 0);
  static constexpr int kStorer = 1;
};

template <typename Variant>
__device__ __forceinline__ void initialise_barriers(SharedStorage<Variant>& shared) {
  using Count = Arrivals<Variant>;
  for (int i = 0; i < Variant::kQueryStages; ++i) {
    shared.q_full[i].init(Count::kTransaction);
    shared.q_empty[i].init(Count::kDoneWithTile);
    for (int consumer = 0; consumer < Variant::kConsumers; ++consumer) {
      shared.out_full[i][consumer].init(Count::kStagingWarps);
    }
  }
  if constexpr (Variant::kOutputInValues) {
    for (auto& left : shared.out_left) { left.init(Count::kStorer); }
  }
  for (int i = 0; i < Variant::kStages; ++i) {
    shared.k_full[i].init(Count::kTransaction);
    shared.v_full[i].init(Count::kTransaction);
    shared.k_empty[i].init(Count::kConsumerWarps);
    shared.v_empty[i].init(Count::kConsumerWarps);
  }
  fence_barrier_init();
}

}  // namespace dash_attn::forward
