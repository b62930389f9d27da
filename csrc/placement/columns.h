// The plan of a mask by key columns, which columns/plan.h writes before a pass and the pass reads. contract/columns.h
// decides what it says. Plain C++: no CUDA or torch.
#pragma once

#include <cstdint>

#include "../contract/columns.h"
#include "../contract/tile_grid.h"
#include "../host_device.h"

namespace dash_attn {

// The rows of the sequences of a call: those of a dense batch, each `length` long, or those of a pack.
struct SequenceRows {
  const int* cu_seqlens;  // null in a dense batch
  const int* seqused;     // or null: all rows are used
  int length;

  DASH_HOST_DEVICE constexpr int first(int sequence) const {
    return cu_seqlens ? cu_seqlens[sequence] : sequence * length;
  }
  DASH_HOST_DEVICE constexpr int count(int sequence) const {
    return seqused ? seqused[sequence] : cu_seqlens ? cu_seqlens[sequence + 1] - cu_seqlens[sequence] : length;
  }
};

// Numbers the tiles of all sequences, those of a sequence one after the other. Some numbers belong to no tile.
struct TileNumbers {
  int size;  // rows of a tile

  // The number of a sequence's first tile, given the row at which the sequence begins.
  DASH_HOST_DEVICE constexpr int first(int sequence, int first_row) const { return first_row / size + sequence; }
  DASH_HOST_DEVICE constexpr int64_t end(int batch, int64_t all_rows) const { return all_rows / size + batch + 1; }
};

// A query tile consists of parts, each of which a warpgroup of the forward owns.
inline constexpr int kPartRows = 64, kMostParts = 3;

enum class Pass { kForward, kBackward };

// Where a query tile ends, or would end if its last part were full. Tiles of the backward begin at the first query. Of
// the forward the first tile may have fewer parts than the others, so that under a causal mask the rows left empty are
// those that see the fewest keys. Either follows from the sequence alone.
DASH_HOST_DEVICE constexpr int end_of_query_tile(Pass pass, int tile, int rows, int seqlen_q) {
  if (pass == Pass::kBackward) return (tile + 1) * rows;
  return ceil_div(seqlen_q, kPartRows) * kPartRows - (ceil_div(seqlen_q, rows) - 1 - tile) * rows;
}

// The queries of a tile, which must exist.
DASH_HOST_DEVICE constexpr QueryInterval queries_of_tile(Pass pass, int tile, int rows, int seqlen_q) {
  int const end = end_of_query_tile(pass, tile, rows, seqlen_q);
  return {max_int(0, end - rows), min_int(end, seqlen_q)};
}

// 32 KV tiles of a query tile.
struct alignas(16) LiveWord {
  uint32_t live;                // by bit
  uint32_t masked;              // for the backward: the live ones whose elements must be masked one by one
  int before;                   // live tiles in the words before: the rank of the first one here
  int previous;                 // the last word before with a live tile; -1 if there is none
  uint32_t hidden[kMostParts];  // for the forward: live ones with a key that intervals hide from a query of the part

  static constexpr int kTiles = 32;
};

struct TilePart {
  QueryInterval queries;  // may be empty
  Range kv_tiles;         // that they see without the columns

  DASH_HOST_DEVICE static constexpr TilePart of(TileGrid const& grid, QueryInterval const& of_tile, int part) {
    int const first = of_tile.first + part * kPartRows, end = min_int(first + kPartRows, of_tile.end);
    return {QueryInterval::between(first, end), first < end ? grid.kv_tiles_of_queries(first, end) : Range{0, 0}};
  }
  // Whether some of the queries may see a key of a KV tile.
  DASH_HOST_DEVICE constexpr bool sees(int kv, HiddenByTile const& hidden) const {
    return kv_tiles.contains(kv) && !hidden.hides_all(queries);
  }
};

// The live KV tiles of a query tile.
struct alignas(16) LiveTiles {
  int count, last_word;       // the last word with a live tile; -1 if there is none
  Range of_part[kMostParts];  // for the forward: ranks, from the first tile that is live for the part to the last one
};

// Arrays by mask head: one for each KV head, or one for all. Indices have 32 bits, which save registers.
struct ColumnsView {
  const HiddenQueries* hidden;  // of each key, by its row among all rows
  const ColumnTile* kv_tiles;   // by TileNumbers; for the backward
  const LiveTiles* query_tiles;
  const LiveWord* words;  // of each query tile
  int key_rows, kv_numbers, query_numbers, words_of_tile;
  bool heads_share;
  bool hide_keys;  // false for a call without columns that runs the kernel for them

  DASH_HOST_DEVICE constexpr bool exist() const { return hidden != nullptr; }
  DASH_HOST_DEVICE constexpr int head(int kv_head) const { return heads_share ? 0 : kv_head; }
  DASH_HOST_DEVICE constexpr const HiddenQueries* keys(int kv_head, int first_row) const {
    return hidden + head(kv_head) * key_rows + first_row;
  }
  DASH_HOST_DEVICE constexpr const ColumnTile& kv_tile(int kv_head, int number) const {
    return kv_tiles[head(kv_head) * kv_numbers + number];
  }
  DASH_HOST_DEVICE constexpr const LiveTiles& live_tiles(int kv_head, int number) const {
    return query_tiles[head(kv_head) * query_numbers + number];
  }
  DASH_HOST_DEVICE constexpr const LiveWord* words_of(int kv_head, int number) const {
    return words + (head(kv_head) * query_numbers + number) * words_of_tile;
  }
};

// The sizes of the arrays, for each mask head. A kernel may read the row of a key past a sequence's end, as far as its
// tile goes.
struct ColumnSizes {
  int64_t key_rows, kv_numbers, query_numbers, words_of_tile;
};

constexpr ColumnSizes column_sizes(int batch, int64_t all_query_rows, int64_t all_key_rows, int longest_k,
                                   Tiling const& tiling) {
  return {all_key_rows + tiling.key, TileNumbers{tiling.key}.end(batch, all_key_rows),
          TileNumbers{tiling.query}.end(batch, all_query_rows),
          ceil_div(ceil_div(longest_k, tiling.key), LiveWord::kTiles)};
}

// The same arrays, for the plan.
struct ColumnArrays {
  HiddenQueries* hidden;
  ColumnTile* kv_tiles;
  LiveTiles* query_tiles;
  LiveWord* words;
  ColumnSizes sizes;
  bool heads_share, hide_keys;

  DASH_HOST_DEVICE constexpr ColumnsView view() const {
    return {hidden, kv_tiles, query_tiles, words,
            int(sizes.key_rows), int(sizes.kv_numbers), int(sizes.query_numbers), int(sizes.words_of_tile),
            heads_share, hide_keys};
  }
};

}  // namespace dash_attn
