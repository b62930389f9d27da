// The one table of tile sizes: read by the kernels, the workspace, the schedule module and Python.
// Plain C++: no CUDA or torch.
#pragma once

#include "../host_device.h"

namespace dash_attn {

// Columns of Q and K, and those of V and the output.
struct HeadDims {
  int qk, v;

  DASH_HOST_DEVICE constexpr int sum() const { return qk + v; }
};

DASH_HOST_DEVICE constexpr bool operator==(HeadDims a, HeadDims b) { return a.qk == b.qk && a.v == b.v; }
DASH_HOST_DEVICE constexpr bool operator!=(HeadDims a, HeadDims b) { return !(a == b); }

struct TileShape {
  int query;           // rows of Q and dO in one tile (M)
  int key;             // rows of K and V in one tile (N)
  HeadDims head_dims;  // columns held in shared memory; smaller head dims are padded with zeros by TMA
};

inline constexpr int kMaxHeadDim = 256;

// The smallest row of the table that holds both head dims; (0, 0) when none does.
DASH_HOST_DEVICE constexpr HeadDims padded_head_dims(int qk, int v) {
  // Each holds all before it.
  constexpr HeadDims kRows[] = {{64, 64}, {96, 96}, {128, 128}, {192, 128}, {192, 192}, {256, 256}};
  if (qk <= 0 || v <= 0) return {0, 0};
  for (HeadDims const row : kRows) {
    if (qk <= row.qk && v <= row.v) return row;
  }
  return {0, 0};
}

// `padded` is a value of padded_head_dims. A row is chosen for speed alone, but it fixes the rounding of the
// sums over queries and keys, so it may depend on the shape of the problem and on nothing else.
DASH_HOST_DEVICE constexpr TileShape backward_tile_shape(HeadDims padded) {
  switch (padded.qk) {
    case 64:
      return {128, 128, padded};
    case 96:
      return {80, 128, padded};
    case 192:
      return {64, 96, padded};
    case 256:
      return {64, 80, padded};
    default:
      return {64, 128, padded};
  }
}

// The same for the forward, where only the keys of a tile fix the rounding of a row. A tile in use may have fewer rows.
DASH_HOST_DEVICE constexpr TileShape forward_tile_shape(HeadDims padded) {
  switch (padded.qk) {
    case 64:
      return {192, 128, padded};
    case 96:
      return {192, 96, padded};
    case 192:
      return {padded.v == 128 ? 192 : 128, 80, padded};
    case 256:
      return {128, 80, padded};
    default:
      return {192, 80, padded};
  }
}

}  // namespace dash_attn
