// The one table of tile sizes: read by the kernels, the workspace, the schedule module and Python.
// Plain C++: no CUDA, CuTe or torch.
#pragma once

#include "../host_device.h"

namespace dash_attn {

struct TileShape {
  int query;     // rows of Q and dO in one tile (M)
  int key;       // rows of K and V in one tile (N)
  int head_dim;  // columns held in shared memory; a smaller head_dim is padded with zeros by TMA
};

// Smallest head dim of the table that holds `head_dim`, or 0 when none does.
DASH_HOST_DEVICE constexpr int padded_head_dim(int head_dim) {
  return head_dim <= 0 ? 0 : head_dim <= 64 ? 64 : head_dim <= 96 ? 96 : head_dim <= 128 ? 128 : 0;
}

// `padded` is a value of padded_head_dim. A row is chosen for speed alone, but it fixes the rounding of the
// sums over queries and keys, so it may depend on the shape of the problem and on nothing else.
DASH_HOST_DEVICE constexpr TileShape backward_tile_shape(int padded) {
  switch (padded) {
    case 64:
      return {128, 128, 64};
    case 96:
      return {80, 128, 96};
    default:
      return {64, 128, 128};
  }
}

// The same for the forward, where only the keys of a tile fix the rounding of a row.
DASH_HOST_DEVICE constexpr TileShape forward_tile_shape(int padded) {
  return padded == 64 ? TileShape{192, 128, 64} : TileShape{128, 128, padded};
}

}  // namespace dash_attn
