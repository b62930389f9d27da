// The KV tiles of a query tile under a mask by key columns, from the last to the first.
#pragma once

#include "config.h"
#include "params.h"

namespace dash_attn::forward {

class LiveWalk {
 public:
  __device__ __forceinline__ LiveWalk(const KernelParams& params, const AnnouncedTile& tile, int kv_head) {
    const int tile_positions = params.scheduler.tile_positions;
    const int first_row = params.pack.is_pack() ? tile.rows.outer - tile.sequence.seqlen_q
                                                : tile.number * tile.sequence.seqlen_q;
    // Tiles begin at the first query (fixes_rows_of_tiles).
    const int query_tile = tile.end / tile_positions - 1;
    const int number = TileNumbers{tile_positions}.first(tile.number, first_row) + query_tile;
    tiles_ = params.columns.live_tiles(kv_head, number);
    words_ = params.columns.words_of(kv_head, number);
    left_ = tiles_.count;
    at_ = tiles_.last_word;
    if (left_ > 0) { word_ = words_[at_]; }
  }

  __device__ __forceinline__ const LiveTiles& tiles() const { return tiles_; }
  __device__ __forceinline__ int left() const { return left_; }

  // Called while tiles are left.
  __device__ __forceinline__ LoadedTile next() {
    if (word_.live == 0) {
      at_ = word_.previous;
      word_ = words_[at_];
    }
    const int bit = LiveWord::kTiles - 1 - __clz(word_.live);
    word_.live ^= 1u << bit;
    --left_;
    int hidden = 0;
#pragma unroll
    for (int part = 0; part < kMostParts; ++part) { hidden |= int(word_.hidden[part] >> bit & 1) << part; }
    return {at_ * LiveWord::kTiles + bit, hidden};
  }

 private:
  LiveTiles tiles_;
  const LiveWord* words_;
  LiveWord word_;
  int at_, left_;
};

}  // namespace dash_attn::forward
