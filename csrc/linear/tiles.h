// Which tiles of y = x W^T a group of CTAs works on, and in which order. Plain C++: no CUDA or torch.
#pragma once

#include "../host_device.h"
#include "../schedule/mask.h"

namespace dash_attn::linear {

inline constexpr int kTileRows = 128;     // of y, and of x
inline constexpr int kTileColumns = 256;  // of y, rows of W
inline constexpr int kTileDepth = 64;     // of the sum, that a stage of the ring holds

struct TileOfOutput {
  int row, column;  // in tiles
};

// The tiles of y. A cluster of CTAs has as many tiles below each other at a time, which share a tile of W. Clusters
// take the places of the list in turns, so that those that run at a time are next to each other in it: they lie in a
// block of up to kBlockRows clusters' rows, and x and W, of which each is then read by several, come from L2.
struct TileList {
  int row_tiles, column_tiles, cluster;

  static constexpr int kBlockRows = 8;

  DASH_HOST_DEVICE constexpr int cluster_rows() const { return ceil_div(row_tiles, cluster); }
  DASH_HOST_DEVICE constexpr int places() const { return cluster_rows() * column_tiles; }

  // Of the CTA with this rank in its cluster. A row past the end is none of y.
  DASH_HOST_DEVICE constexpr TileOfOutput tile(int place, int rank) const {
    int const block = place / (kBlockRows * column_tiles), within = place % (kBlockRows * column_tiles);
    int const rows = min_int(kBlockRows, cluster_rows() - block * kBlockRows);
    return {(block * kBlockRows + within % rows) * cluster + rank, within / rows};
  }
};

}  // namespace dash_attn::linear
