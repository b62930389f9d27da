// Plans a pass under a mask by key columns, in two kernels. The first reads the caller's tensor once: it writes the
// queries that each key hides, and for each KV tile which query tiles it visits. The second writes for each query tile
// which KV tiles are live. Both only evaluate contract/columns.h, for all sequences and mask heads, on the device.
#pragma once

#include "../contract/columns.h"
#include "../contract/tile_shapes.h"
#include "../device/ptx.h"
#include "../placement/columns.h"

namespace dash_attn::columns {

constexpr int kPlanThreads = 128;
constexpr int kPlanWarps = kPlanThreads / 32;
constexpr int kWordsAtOnce = 4;  // whose KV tiles a lane loads together

constexpr bool has_a_thread_for_each_key(HeadDims dims) {
  return backward_tile_shape(dims).key <= kPlanThreads && forward_tile_shape(dims).key <= kPlanThreads;
}
static_assert(has_a_thread_for_each_key({64, 64}) && has_a_thread_for_each_key({96, 96}) &&
              has_a_thread_for_each_key({128, 128}) && has_a_thread_for_each_key({192, 128}) &&
              has_a_thread_for_each_key({192, 192}) && has_a_thread_for_each_key({256, 256}));

struct PlanParams {
  // startend_row_indices of the caller, in elements. A pack's begin with the first row of all.
  const int* bounds;  // null for a mask that hides nothing
  int per_key;        // 0 for such a mask
  int64_t batch_stride, head_stride;
  bool causal;

  SequenceRows q, k;
  int batch, mask_heads;
  Tiling tiling;
  Window window;
  ColumnArrays arrays;

  __device__ bool is_pack() const { return k.cu_seqlens != nullptr; }
  __device__ TileGrid grid(int sequence) const {
    return {tiling, {MaskKind::kColumns, window, {q.count(sequence), k.count(sequence)}}};
  }
  __device__ const int* bounds_of(int mask_head, int sequence, int key) const {
    const int row = is_pack() ? k.first(sequence) + key : key;
    return bounds + sequence * batch_stride + mask_head * head_stride + int64_t(row) * per_key;
  }
};

// Combines what the keys of the block's threads hide. Valid in thread 0.
__device__ __forceinline__ HiddenByTile combine_block(HiddenByTile own) {
  __shared__ HiddenByTile of_warp[kPlanWarps];
  const auto largest = [](int x) { return int(__reduce_max_sync(0xffffffff, uint32_t(x))); };
  const auto smallest = [](int x) { return int(__reduce_min_sync(0xffffffff, uint32_t(x))); };
#pragma unroll
  for (int i = 0; i < kHiddenIntervals; ++i) {
    own.all[i] = {largest(own.all[i].first), smallest(own.all[i].end)};
    own.some[i] = {smallest(own.some[i].first), largest(own.some[i].end)};
  }
  __syncthreads();  // thread 0 has read the previous ones
  if (threadIdx.x % 32 == 0) { of_warp[threadIdx.x / 32] = own; }
  __syncthreads();
  for (int warp = 1; threadIdx.x == 0 && warp < kPlanWarps; ++warp) { own = own.with(of_warp[warp]); }
  return own;
}

// A block for each KV tile.
__global__ void __launch_bounds__(kPlanThreads) plan_keys_kernel(const __grid_constant__ PlanParams params) {
  ptx::launch_dependents();  // which wait for this kernel's end
  const TileNumbers numbers{params.tiling.key};
  const int count = int(params.arrays.sizes.kv_numbers);
  for (int place = blockIdx.x; place < params.mask_heads * count; place += gridDim.x) {
    const int mask_head = place / count, number = place - mask_head * count;
    const int sequence = numbers.sequence_of(number, params.k, params.batch);
    const int first_row = params.k.first(sequence), kv_tile = number - numbers.first(sequence, first_row);
    const TileGrid grid = params.grid(sequence);
    if (!Range{0, grid.kv_tiles()}.contains(kv_tile)) { continue; }
    const int key = kv_tile * params.tiling.key + int(threadIdx.x);
    HiddenByTile own = HiddenByTile::of_no_keys();
    if (int(threadIdx.x) < params.tiling.key && key < grid.mask.sequence.seqlen_k) {
      const HiddenQueries hidden = hidden_queries(params.bounds_of(mask_head, sequence, key), params.per_key,
                                                  params.causal, grid.mask.sequence.seqlen_q);
      params.arrays.hidden[mask_head * params.arrays.sizes.key_rows + first_row + key] = hidden;
      own = HiddenByTile::of_key(hidden);
    }
    const HiddenByTile of_tile = combine_block(own);
    if (threadIdx.x == 0) { params.arrays.kv_tiles[place] = column_tile(grid, kv_tile, of_tile); }
  }
}

// Extends the ranks of a part by those of its tiles in a further word, `own`. Of the query tile's live tiles, the word
// has `live`, and `before` are in words before.
__device__ __forceinline__ void extend(Range& ranks, uint32_t own, uint32_t live, int before) {
  if (ranks.count == 0) { ranks.first = before + __popc(live & ((own & -own) - 1)); }
  ranks.count = before + __popc(live & (~0u >> __clz(own))) - ranks.first;
}

// A warp for each query tile.
__global__ void __launch_bounds__(kPlanThreads) plan_queries_kernel(const __grid_constant__ PlanParams params) {
  ptx::launch_dependents();  // which wait for this kernel's end
  ptx::wait_for_previous_kernel();
  const TileNumbers numbers{params.tiling.query};
  const int count = int(params.arrays.sizes.query_numbers), lane = threadIdx.x % 32;
  int place = blockIdx.x * kPlanWarps + int(threadIdx.x) / 32;
  for (; place < params.mask_heads * count; place += gridDim.x * kPlanWarps) {
    const int mask_head = place / count, number = place - mask_head * count;
    const int sequence = numbers.sequence_of(number, params.q, params.batch);
    const int query_tile = number - numbers.first(sequence, params.q.first(sequence));
    const TileGrid grid = params.grid(sequence);
    if (!Range{0, grid.query_tiles()}.contains(query_tile)) { continue; }
    const int first_number = TileNumbers{params.tiling.key}.first(sequence, params.k.first(sequence));
    const ColumnTile* const kv_tiles =
        params.arrays.kv_tiles + mask_head * params.arrays.sizes.kv_numbers + first_number;
    LiveWord* const words = params.arrays.words + place * params.arrays.sizes.words_of_tile;
    const Range visited = grid.kv_tiles_of(query_tile);
    TilePart parts[kMostParts];
#pragma unroll
    for (int part = 0; part < kMostParts; ++part) { parts[part] = TilePart::of(grid, query_tile, part); }
    LiveTiles tiles{0, -1, {}};
    const int words_end = ceil_div(visited.end(), LiveWord::kTiles);
    for (int first_word = visited.first / LiveWord::kTiles; first_word < words_end; first_word += kWordsAtOnce) {
      ColumnTile of_words[kWordsAtOnce];
#pragma unroll
      for (int i = 0; i < kWordsAtOnce; ++i) {
        const int kv_tile = (first_word + i) * LiveWord::kTiles + lane;
        if (visited.contains(kv_tile)) { of_words[i] = kv_tiles[kv_tile]; }
      }
#pragma unroll
      for (int i = 0; i < kWordsAtOnce; ++i) {
        const int word = first_word + i, kv_tile = word * LiveWord::kTiles + lane;
        if (word >= words_end) { break; }
        const ColumnTile& tile = of_words[i];
        const bool is_live = visited.contains(kv_tile) && !tile.visits.skips(query_tile);
        const uint32_t live = __ballot_sync(0xffffffff, is_live);
        if (live == 0) { continue; }  // nobody reads the word
        const bool is_masked = is_live && tile.needs_masking(grid, query_tile, kv_tile);
        LiveWord planned{live, __ballot_sync(0xffffffff, is_masked), tiles.count, tiles.last_word, {}};
#pragma unroll
        for (int part = 0; part < kMostParts; ++part) {
          const uint32_t own = __ballot_sync(0xffffffff, is_live && parts[part].sees(kv_tile, tile.hidden));
          if (own != 0) { extend(tiles.of_part[part], own, live, tiles.count); }
          const bool is_hidden = is_live && tile.hidden.hides_any(parts[part].queries);
          planned.hidden[part] = __ballot_sync(0xffffffff, is_hidden);
        }
        if (lane == 0) { words[word] = planned; }
        tiles.count += __popc(live);
        tiles.last_word = word;
      }
    }
    if (lane == 0) { params.arrays.query_tiles[place] = tiles; }
  }
}

}  // namespace dash_attn::columns
