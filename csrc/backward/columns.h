// A work tile under a mask by key columns (contract/columns.h, columns/plan.h).
#pragma once

#include "params.h"

namespace dash_attn::backward {

// The row of the first query, or key, of the work tile's sequence among all rows.
__device__ __forceinline__ int first_query_row(const KernelParams& params, const WorkTile& work) {
  return params.pack.is_pack() ? work.q_outer - work.sequence.seqlen_q : work.q_outer * work.sequence.seqlen_q;
}
__device__ __forceinline__ int first_key_row(const KernelParams& params, const WorkTile& work) {
  return params.pack.is_pack() ? work.k_outer - work.sequence.seqlen_k : work.k_outer * work.sequence.seqlen_k;
}

template <typename Variant>
__device__ __forceinline__ const ColumnTile& column_tile_of(const KernelParams& params, const WorkTile& work) {
  const int first = TileNumbers{Variant::kKey}.first(work.batch, first_key_row(params, work));
  return params.columns.kv_tile(work.kv_head, first + work.kv_tile);
}

// How many KV tiles come first (TileScheduler::place_long_tiles_first) in a sequence of a pack, or in the one sequence
// of a dense batch. Where several sequences or masks share one numbering of work tiles, no count suits them all.
template <typename Variant>
__device__ __forceinline__ int long_tiles_of(const KernelParams& params, const PackedSequence* of_pack) {
  if (!params.columns.heads_share || (!of_pack && params.scheduler.batch > 1)) { return 0; }
  const int sequence = of_pack ? of_pack->number : 0;
  const int first_row = of_pack ? of_pack->end_k - of_pack->lengths.seqlen_k : 0;
  return params.columns.kv_tile(0, TileNumbers{Variant::kKey}.first(sequence, first_row)).long_tiles;
}

// What the plan says of one of the query tiles that the work tile visits.
struct PlannedVisit {
  int rank, kv_tiles;  // of the KV tile in the sum of dQ, and how many add to it
  bool needs_masking;
};

template <typename Variant>
__device__ __forceinline__ PlannedVisit planned_visit(const KernelParams& params, const WorkTile& work,
                                                      int query_tile) {
  const int first = TileNumbers{Variant::kQuery}.first(work.batch, first_query_row(params, work));
  const int number = first + query_tile, kv_tile = work.kv_tile;
  const LiveWord word = params.columns.words_of(work.kv_head, number)[kv_tile / LiveWord::kTiles];
  const uint32_t own = 1u << kv_tile % LiveWord::kTiles;
  return {word.before + __popc(word.live & (own - 1)), params.columns.live_tiles(work.kv_head, number).count,
          (word.masked & own) != 0};
}

// The keys of the work tile, from key `key` of the sequence on.
__device__ __forceinline__ const HiddenQueries* hidden_keys_of(const KernelParams& params, const WorkTile& work,
                                                               int key) {
  return params.columns.keys(work.kv_head, first_key_row(params, work)) + key;
}

}  // namespace dash_attn::backward
