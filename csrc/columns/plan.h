// Plans a pass under a mask by key columns, on the device. A CTA plans one sequence for one head of the mask. It reads
// the caller's tensor once: a warp for each KV tile writes the queries that its keys hide, and which query tiles it
// visits. When the whole CTA has done so, a warp for each query tile writes which KV tiles are live. Several CTAs share
// a long sequence, in a launch for the KV tiles and one for the query tiles. All of this only evaluates
// contract/columns.h.
#pragma once

#include "../contract/columns.h"
#include "../contract/tile_shapes.h"
#include "../device/ptx.h"
#include "../placement/columns.h"

namespace dash_attn::columns {

constexpr int kPlanThreads = 512;
constexpr int kPlanWarps = kPlanThreads / 32;
constexpr int kMostBounds = 4;   // of a key
constexpr int kKeysOfLane = 4;   // at most
constexpr int kWordsAtOnce = 4;  // whose KV tiles a lane loads together

constexpr bool has_a_lane_for_each_key(HeadDims dims) {
  return max_int(backward_tile_shape(dims).key, forward_tile_shape(dims).key) <= 32 * kKeysOfLane;
}
static_assert(has_a_lane_for_each_key({64, 64}) && has_a_lane_for_each_key({96, 96}) &&
              has_a_lane_for_each_key({128, 128}) && has_a_lane_for_each_key({192, 128}) &&
              has_a_lane_for_each_key({192, 192}) && has_a_lane_for_each_key({256, 256}));

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
  int* counter;  // set to zero, or null

  int ctas;  // that share a sequence and head
  bool plans_keys, plans_queries;  // if several CTAs share a sequence, each in a launch of its own
};

// What all lanes share, and the arrays from the sequence's first entry on.
struct PlannedSequence {
  TileGrid grid;
  const int* bounds;
  HiddenQueries* hidden;
  ColumnTile* kv_tiles;
  LiveTiles* query_tiles;
  LiveWord* words;

  __device__ __forceinline__ PlannedSequence(const PlanParams& params, int sequence, int mask_head) {
    const ColumnArrays& arrays = params.arrays;
    const int first_q = params.q.first(sequence), first_k = params.k.first(sequence);
    const int first_of_bounds = params.k.cu_seqlens ? first_k : 0;
    const int64_t first_tile = mask_head * arrays.sizes.query_numbers +
                               TileNumbers{params.tiling.query}.first(sequence, first_q);
    grid = {params.tiling, {MaskKind::kColumns, params.window, {params.q.count(sequence), params.k.count(sequence)}}};
    bounds = params.bounds + sequence * params.batch_stride + mask_head * params.head_stride +
             int64_t(first_of_bounds) * params.per_key;
    hidden = arrays.hidden + mask_head * arrays.sizes.key_rows + first_k;
    kv_tiles = arrays.kv_tiles + mask_head * arrays.sizes.kv_numbers +
               TileNumbers{params.tiling.key}.first(sequence, first_k);
    query_tiles = arrays.query_tiles + first_tile;
    words = arrays.words + first_tile * arrays.sizes.words_of_tile;
  }
};

// What the keys of all lanes hide, of what those of each lane do.
__device__ __forceinline__ HiddenByTile combine_warp(HiddenByTile own) {
  const auto largest = [](int x) { return int(__reduce_max_sync(0xffffffff, uint32_t(x))); };
  const auto smallest = [](int x) { return int(__reduce_min_sync(0xffffffff, uint32_t(x))); };
#pragma unroll
  for (int i = 0; i < kHiddenIntervals; ++i) {
    own.all[i] = {largest(own.all[i].first), smallest(own.all[i].end)};
    own.some[i] = {smallest(own.some[i].first), largest(own.some[i].end)};
  }
  return own;
}

// Called by a warp.
template <Pass kPass>
__device__ __forceinline__ void plan_kv_tile(const PlanParams& params, const PlannedSequence& planned, int kv_tile) {
  const TileGrid& grid = planned.grid;
  const int first_key = kv_tile * grid.tiling.key + int(threadIdx.x) % 32;
  const int end_key = min_int((kv_tile + 1) * grid.tiling.key, grid.mask.sequence.seqlen_k);
  int bounds[kKeysOfLane][kMostBounds];  // loaded together
#pragma unroll
  for (int i = 0; i < kKeysOfLane; ++i) {
    const int key = first_key + 32 * i;
#pragma unroll
    for (int j = 0; j < kMostBounds; ++j) {
      const bool exists = key < end_key && j < params.per_key;
      bounds[i][j] = exists ? planned.bounds[int64_t(key) * params.per_key + j] : 0;
    }
  }
  HiddenByTile own = HiddenByTile::of_no_keys();
#pragma unroll
  for (int i = 0; i < kKeysOfLane; ++i) {
    const int key = first_key + 32 * i;
    if (key >= end_key) { break; }
    const HiddenQueries hidden = hidden_queries(bounds[i], params.per_key, params.causal,
                                                grid.mask.sequence.seqlen_q);
    planned.hidden[key] = hidden;
    own = own.with(HiddenByTile::of_key(hidden));
  }
  const HiddenByTile of_tile = combine_warp(own);
  if (threadIdx.x % 32 != 0) { return; }
  if constexpr (kPass == Pass::kForward) {
    planned.kv_tiles[kv_tile].hidden = of_tile;
  } else {
    planned.kv_tiles[kv_tile] = column_tile(grid, kv_tile, of_tile);
  }
}

// Extends the ranks of a part by those of its tiles in a further word, `own`. Of the query tile's live tiles, the word
// has `live`, and `before` are in words before.
__device__ __forceinline__ void extend(Range& ranks, uint32_t own, uint32_t live, int before) {
  if (ranks.count == 0) { ranks.first = before + __popc(live & ((own & -own) - 1)); }
  ranks.count = before + __popc(live & (~0u >> __clz(own))) - ranks.first;
}

// Called by a warp.
template <Pass kPass>
__device__ __forceinline__ void plan_query_tile(const PlannedSequence& planned, int words_of_tile, int query_tile) {
  const TileGrid& grid = planned.grid;
  const int lane = threadIdx.x % 32;
  const QueryInterval queries =
      queries_of_tile(kPass, query_tile, grid.tiling.query, grid.mask.sequence.seqlen_q);
  const Range visited = grid.kv_tiles_of_queries(queries.first, queries.end);
  LiveWord* const words = planned.words + int64_t(query_tile) * words_of_tile;
  TilePart parts[kMostParts];
  if constexpr (kPass == Pass::kForward) {
#pragma unroll
    for (int part = 0; part < kMostParts; ++part) { parts[part] = TilePart::of(grid, queries, part); }
  }
  LiveTiles tiles{0, -1, {}};
  const int words_end = ceil_div(visited.end(), LiveWord::kTiles);
  for (int first_word = visited.first / LiveWord::kTiles; first_word < words_end; first_word += kWordsAtOnce) {
    HiddenByTile of_words[kWordsAtOnce];
    bool is_live[kWordsAtOnce];
#pragma unroll
    for (int i = 0; i < kWordsAtOnce; ++i) {
      const int kv_tile = (first_word + i) * LiveWord::kTiles + lane;
      is_live[i] = visited.contains(kv_tile);
      if (is_live[i]) { of_words[i] = planned.kv_tiles[kv_tile].hidden; }
    }
#pragma unroll
    for (int i = 0; i < kWordsAtOnce; ++i) {
      const int word = first_word + i, kv_tile = word * LiveWord::kTiles + lane;
      if (word >= words_end) { break; }
      const HiddenByTile& hidden = of_words[i];
      is_live[i] = is_live[i] && !hidden.hides_all(queries);
      const uint32_t live = __ballot_sync(0xffffffff, is_live[i]);
      if (live == 0) { continue; }  // nobody reads the word
      LiveWord of_word{live, 0, tiles.count, tiles.last_word, {}};
      if constexpr (kPass == Pass::kForward) {
#pragma unroll
        for (int part = 0; part < kMostParts; ++part) {
          const uint32_t own = __ballot_sync(0xffffffff, is_live[i] && parts[part].sees(kv_tile, hidden));
          if (own != 0) { extend(tiles.of_part[part], own, live, tiles.count); }
          const bool is_hidden = is_live[i] && hidden.hides_any(parts[part].queries);
          of_word.hidden[part] = __ballot_sync(0xffffffff, is_hidden);
        }
      } else {
        const bool is_masked = is_live[i] && needs_masking(grid, query_tile, kv_tile, queries, hidden);
        of_word.masked = __ballot_sync(0xffffffff, is_masked);
      }
      if (lane == 0) { words[word] = of_word; }
      tiles.count += __popc(live);
      tiles.last_word = word;
    }
  }
  if (lane == 0) { planned.query_tiles[query_tile] = tiles; }
}

// How many KV tiles from the first one on visit more than twice as many query tiles as the mean KV tile, if they are
// few: those of a question that many answers share, for example. Called by a warp, when all visits have been written.
__device__ __forceinline__ int count_long_tiles(const PlannedSequence& planned) {
  constexpr int kMostWords = 2;
  const int kv_tiles = planned.grid.kv_tiles(), lane = threadIdx.x % 32;
  int visits = 0, long_tiles = 0;
  for (int tile = lane; tile < kv_tiles; tile += 32) { visits += planned.kv_tiles[tile].visits.count; }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) { visits += __shfl_xor_sync(0xffffffff, visits, distance); }
#pragma unroll
  for (int word = 0; word < kMostWords; ++word) {
    const int tile = 32 * word + lane;
    const bool is_long =
        tile < kv_tiles && int64_t{planned.kv_tiles[tile].visits.count} * kv_tiles > int64_t{2} * visits;
    const uint32_t found = __ballot_sync(0xffffffff, is_long);
    if (long_tiles == 32 * word) { long_tiles += __popc(found & ~(found + 1)); }  // from the lowest bit on
  }
  return long_tiles < 32 * kMostWords ? long_tiles : 0;
}

template <Pass kPass>
__global__ void __launch_bounds__(kPlanThreads) plan_kernel(const __grid_constant__ PlanParams params) {
  ptx::launch_dependents();  // the dependents wait for this kernel's end
  ptx::wait_for_previous_kernel();  // the launch for the KV tiles
  if (params.counter && blockIdx.x == 0 && threadIdx.x == 0) { *params.counter = 0; }
  const int warp = (int(blockIdx.x) % params.ctas) * kPlanWarps + int(threadIdx.x) / 32;
  const int warps = params.ctas * kPlanWarps;
  const int places = params.batch * params.mask_heads;
  for (int place = blockIdx.x / params.ctas; place < places; place += gridDim.x / params.ctas) {
    const int sequence = place / params.mask_heads;
    const PlannedSequence planned(params, sequence, place - sequence * params.mask_heads);
    if (params.plans_keys) {
      for (int tile = warp; tile < planned.grid.kv_tiles(); tile += warps) {
        plan_kv_tile<kPass>(params, planned, tile);
      }
    }
    if (!params.plans_queries) { continue; }
    __syncthreads();
    for (int tile = warp; tile < planned.grid.query_tiles(); tile += warps) {
      plan_query_tile<kPass>(planned, int(params.arrays.sizes.words_of_tile), tile);
    }
    if (kPass == Pass::kBackward && params.mask_heads == 1 && warp == warps - 1) {
      const int long_tiles = count_long_tiles(planned);
      if (threadIdx.x % 32 == 0 && planned.grid.kv_tiles() > 0) { planned.kv_tiles[0].long_tiles = long_tiles; }
    }
  }
}

}  // namespace dash_attn::columns
