// The order of dQ's accumulator: each consumer's wgmma fragment as its threads hold it, four registers at a time.
//
// The accumulator is private to the kernels, so it needs no rows and columns of its own: written like this, staging a
// tile takes 16-byte stores without bank conflicts and one bulk operation adds it. convert.h puts it in order.
#pragma once

#include "../device/fragment.h"
#include "config.h"

namespace dash_attn::backward {

// Where the order-free scale of row r of a head lies among those of all its rows: a consumer thread finds those of all
// queries of its fragment, two a quad, side by side.
constexpr int kScaleGroup = 64;
__host__ __device__ constexpr int scale_position(int r) {
  const int query = r % kScaleGroup;
  return r - query + query % 8 / 2 * (kScaleGroup / 4) + query / 8 * 2 + query % 2;
}

template <typename Geometry>
struct DqLayout {
  // Of each consumer thread: a 64 x kDqQueries fragment of dQ^T.
  static constexpr int kRegisters = Geometry::kDqQueries / 2;
  static constexpr int kQuads = kRegisters / 4;

  // Index, in units of float4, of registers 4 * quad ... 4 * quad + 3.
  static __host__ __device__ constexpr int quad_index(int consumer, int quad, int thread) {
    return (consumer * kQuads + quad) * kWarpgroupThreads + thread;
  }

  struct Element {
    int query, column;
  };

  // Row and column of dQ that element `i` of quad `index` belongs to: the inverse of quad_index.
  static __host__ __device__ constexpr Element element(int index, int i) {
    const int thread = index % kWarpgroupThreads;
    const int quad = index / kWarpgroupThreads % kQuads;
    const int consumer = index / kWarpgroupThreads / kQuads;
    const int column = fragment_row(thread, i), query = fragment_column(thread, 4 * quad + i);
    return Geometry::kSplitDqByHeadDim ? Element{query, consumer * kWarpgroupRows + column}
                                       : Element{consumer * Geometry::kDqQueries + query, column};
  }
};

}  // namespace dash_attn::backward
