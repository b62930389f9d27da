// The loader: one thread that brings in x and W by TMA. The CTAs of a cluster each bring a part of W's tile to all.
#pragma once

#include "config.h"

namespace dash_attn::linear {

template <typename Variant>
class Loader {
 public:
  using Element = typename Variant::Element;
  using Shared = SharedStorage<Variant>;

  __device__ Loader(Shared& shared, const Params<Element>& params)
      : shared_(shared), params_(params), rank_(ptx::cta_rank()) {}

  __device__ void run() {
    const TileList& tiles = params_.tiles;
    const int clusters = int(gridDim.x) / tiles.cluster;
    for (int place = int(blockIdx.x) / tiles.cluster; place < tiles.places(); place += clusters) {
      const TileOfOutput tile = tiles.tile(place, rank_);
      for (int step = 0; step < params_.steps; ++step) { load(tile, step); }
    }
  }

 private:
  // Every stage in every CTA of the cluster is full of the same number of bytes, and empty when all CTAs have read it.
  __device__ __forceinline__ void load(const TileOfOutput& tile, int step) {
    const int slot = int(ring_.slot());
    shared_.empty[slot].wait(ring_.empty_parity());
    auto& full = shared_.full[slot];
    full.arrive_and_expect_tx(Variant::kStageBytes);
    const int depth = step * kTileDepth;
    ptx::load_box(shared_.x[slot], params_.x, {depth, 0, tile.row * kTileRows, 0, 0}, &full, kNoHint);
    const int cluster = params_.tiles.cluster;
    for (int piece = rank_; piece < Variant::kWeightPieces; piece += cluster) {
      const int first = piece * Variant::kPieceRows;
      ptx::load_box_to_ctas(shared_.weight[slot] + first * kTileDepth, params_.weight,
                            {depth, 0, tile.column * kTileColumns + first, 0, 0}, &full, kNoHint,
                            uint16_t((1 << cluster) - 1));
    }
    ring_ = ring_.next();
  }

  Shared& shared_;
  const Params<Element>& params_;
  const int rank_;
  RingIndex<Variant::kStages> ring_;
};

}  // namespace dash_attn::linear
