// The KV tiles of a query tile under a mask by key columns, from the last to the first.
#pragma once

#include "config.h"
#include "params.h"

namespace dash_attn::forward {

__device__ __forceinline__ int highest_bit(uint32_t word) { return 31 - __clz(word); }

// Bits first ... end - 1, of which some may lie outside of the word.
__device__ __forceinline__ uint32_t bits_between(int first, int end) {
  const auto below = [](int bit) { return (uint64_t{1} << max_int(0, min_int(32, bit))) - 1; };
  return uint32_t(below(end) & ~below(first));
}

// The ranks of the tiles that are loaded for a query tile, and of those that a warpgroup walks. Shuffles tell the
// compiler that values are uniform.
__device__ __forceinline__ Range ranks_of(const LiveTiles& loaded) {
  return {0, __shfl_sync(0xffffffff, loaded.count, 0)};
}
__device__ __forceinline__ Range ranks_of(const LiveTiles& loaded, int warpgroup) {
  const Range& live = loaded.of_part[warpgroup];
  return {__shfl_sync(0xffffffff, live.first, 0), __shfl_sync(0xffffffff, live.count, 0)};
}

// What a warpgroup has yet to walk of a word, from the highest bit to the lowest.
struct TilesToWalk {
  int first;
  uint32_t live;
  uint32_t hidden, masked;  // those with keys that intervals, or the mask in any way, hide from some of the rows

  TilesToWalk() = default;
  // `seen_whole`: without intervals, by the rows. One lane reads the word, which is the one that releases K with it:
  // racecheck follows no other.
  __device__ __forceinline__ TilesToWalk(const WordOfTiles& word, int warpgroup, Range seen_whole)
      : first(0), live(0), hidden(0) {
    if (threadIdx.x % 32 == 0) {
      first = word.first;
      live = word.live;
      hidden = word.hidden[warpgroup];
    }
    first = __shfl_sync(0xffffffff, first, 0);
    live = __shfl_sync(0xffffffff, live, 0);
    hidden = __shfl_sync(0xffffffff, hidden, 0);
    masked = hidden | ~bits_between(seen_whole.first - first, seen_whole.end() - first);
  }

  __device__ __forceinline__ int next_tile() const { return first + highest_bit(live); }
  __device__ __forceinline__ bool hides_keys_of_next() const { return hidden >> highest_bit(live) & 1; }
  __device__ __forceinline__ bool masks_next() const { return masked >> highest_bit(live) & 1; }
  __device__ __forceinline__ void leave_next() { live ^= 1u << highest_bit(live); }
  // Leaves the tiles before the next one to mask, and returns their number.
  __device__ __forceinline__ int leave_unmasked() {
    const uint32_t to_mask = live & masked, unmasked = to_mask == 0 ? live : live & ~(~0u >> __clz(to_mask));
    live ^= unmasked;
    return __popc(unmasked);
  }
};

class LiveWalk {
 public:
  // `query_tile`: the number of `tile` in its sequence.
  __device__ __forceinline__ LiveWalk(const KernelParams& params, const AnnouncedTile& tile, int query_tile,
                                      int kv_head) {
    const int first_row = params.pack.is_pack() ? tile.rows.outer - tile.sequence.seqlen_q
                                                : tile.number * tile.sequence.seqlen_q;
    const int number = TileNumbers{params.scheduler.tile_positions}.first(tile.number, first_row) + query_tile;
    tiles_ = params.columns.live_tiles(kv_head, number);
    words_ = params.columns.words_of(kv_head, number);
    left_ = tiles_.count;
    at_ = tiles_.last_word;
    if (left_ > 0) { word_ = words_[at_]; }
  }

  __device__ __forceinline__ const LiveTiles& tiles() const { return tiles_; }
  __device__ __forceinline__ int left() const { return left_; }

  // Goes on to the next tile and returns its number. Called while tiles are left. `announce` is given the rest of the
  // word, from this tile on.
  template <typename Announce>
  __device__ __forceinline__ int next(Announce&& announce) {
    if (word_.live == 0) {
      at_ = word_.previous;
      word_ = words_[at_];
    }
    const int first = at_ * LiveWord::kTiles, bit = highest_bit(word_.live);
    announce(WordOfTiles{first, word_.live, {word_.hidden[0], word_.hidden[1], word_.hidden[2]}});
    word_.live ^= 1u << bit;
    --left_;
    return first + bit;
  }

 private:
  LiveTiles tiles_;
  const LiveWord* words_;
  LiveWord word_;
  int at_, left_;
};

}  // namespace dash_attn::forward
