// Rows of Q, K, V, O and dO read by threads: neighbouring threads of a warp share a row and take eight columns each.
#pragma once

#include "../device/fragment.h"
#include "params.h"

namespace dash_attn::backward {

// The threads that share a row, a power of two for the reduction by shuffles. Some of them may have no columns.
template <int kHeadDim>
constexpr int kRowThreads = kHeadDim <= 64    ? 8
                            : kHeadDim <= 128 ? 16
                                              : 32;

constexpr int kPreprocessThreads = 256;

// How blocks of the preprocess kernel share the rows of a query tile. A tile is a whole number of blocks.
template <int kTileRows_, int kThreadsPerRow_>
struct PreprocessTile {
  static constexpr int kTileRows = kTileRows_, kThreadsPerRow = kThreadsPerRow_;
  static constexpr int kRowsAtOnce = kPreprocessThreads / kThreadsPerRow;
  static constexpr int kPassesOfTile = kTileRows / kRowsAtOnce;
  static constexpr int kPasses = kPassesOfTile % 4 == 0 ? 4 : kPassesOfTile;  // of a block
  static constexpr int kRows = kPasses * kRowsAtOnce;
  static constexpr int kBlocks = kTileRows / kRows;                            // of a query tile
  static_assert(kBlocks * kRows == kTileRows && kRows <= kPreprocessThreads);  // a thread writes a row

  // Whether the geometry may be one that is not wide. Only these have order-free sums or finish dQ, which depend on KV
  // tiles. Their KV tiles have as many keys.
  static constexpr bool kMayBeNarrow = kThreadsPerRow < 32;
  static constexpr Tiling kNarrowTiling = {kTileRows, 2 * kWarpgroupRows, 1};
};

template <typename Geometry>
using PreprocessTileOf = PreprocessTile<Geometry::kQuery, kRowThreads<Geometry::kValueDim>>;

// Calls f with an object of the type of the call's elements. Where memory is the limit, the branch costs nothing.
template <typename F>
__device__ __forceinline__ void with_element(bool is_bf16, const F& f) {
  if (is_bf16) {
    f(bf16{});
  } else {
    f(fp16{});
  }
}

// This thread's eight columns of row `row` of a head, or zeros past the end.
__device__ __forceinline__ uint4 load8(const StridedView<const uint16_t>& tensor, int batch, int row, int head,
                                       int column, bool inside) {
  return inside ? *reinterpret_cast<const uint4*>(tensor.row(batch, row, head) + column) : make_uint4(0, 0, 0, 0);
}

// Eight 16-bit elements in fp32, unpacked by words: from an array the compiler takes three instructions for an odd bf16
// element.
template <typename Element>
struct Floats8 {
  float x[8];

  explicit __device__ __forceinline__ Floats8(uint4 packed) {
    const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = unpack<Element>(words[i]);
      x[2 * i] = pair.x;
      x[2 * i + 1] = pair.y;
    }
  }
  __device__ __forceinline__ float operator[](int i) const { return x[i]; }
};

// The dot product of eight 16-bit elements, in fp32.
template <typename Element>
__device__ __forceinline__ float dot8(uint4 a, uint4 b) {
  const Floats8<Element> x(a), y(b);
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) { sum = fmaf(x[i], y[i], sum); }
  return sum;
}

// Sums over the kThreads threads of a row.
template <int kThreads>
__device__ __forceinline__ float sum_of_row(float value) {
#pragma unroll
  for (int offset = kThreads / 2; offset > 0; offset /= 2) { value += __shfl_xor_sync(0xffffffff, value, offset); }
  return value;
}

}  // namespace dash_attn::backward
