// The order of elements in dQ's accumulator: each consumer's wgmma fragment as its threads hold it, four registers at a
// time.
//
// The accumulator is private to the kernels, so it need not have rows and columns. In this order a tile is staged by
// 16-byte stores without bank conflicts and added by one bulk operation. convert.h restores rows and columns.
#pragma once

#include "../device/fragment.h"
#include "config.h"

namespace dash_attn::backward {

template <typename Geometry, bool kIsWide = Geometry::kWide>
struct DqLayout {
  static constexpr int kFragments = Geometry::kConsumers;
  static constexpr bool kTransposed = Geometry::kTransposesDq;
  // The registers of each consumer thread: of a fragment of 64 queries by 64 columns, or of 64 columns by kDqQueries
  // queries.
  static constexpr int kRegisters = Geometry::kDqQueries / 2;
  static constexpr int kQuads = kRegisters / 4;

  // The threads of a consumer whose fragments enter the sum. In general these are all. The transpose has 16 columns a
  // warp and both consumers compute the columns in the middle, so that half of the columns count: the first ones of the
  // first consumer and the last ones of the second.
  static constexpr int kThreads = kTransposed ? Geometry::kHeadDim : kWarpgroupThreads;
  static __host__ __device__ constexpr int first_thread(int consumer) {
    return consumer * (kWarpgroupThreads - kThreads);
  }
  static __host__ __device__ constexpr bool has_part(int consumer, int thread) {
    return kThreads == kWarpgroupThreads || unsigned(thread - first_thread(consumer)) < kThreads;
  }

  // The index, in units of float4, of registers 4 * quad ... 4 * quad + 3.
  static __host__ __device__ constexpr int quad_index(int consumer, int quad, int thread) {
    return (consumer * kQuads + quad) * kThreads + thread - first_thread(consumer);
  }

  struct Element {
    int query, column;
  };

  // Row and column of dQ that element `i` of quad `index` belongs to: the inverse of quad_index.
  static __host__ __device__ constexpr Element element(int index, int i) {
    const int quad = index / kThreads % kQuads;
    const int consumer = index / kThreads / kQuads;
    const int thread = first_thread(consumer) + index % kThreads;
    const int along = fragment_row(thread, i), across = fragment_column(thread, 4 * quad + i);
    const int query = kTransposed ? across : along, column = kTransposed ? along : across;
    return Geometry::kSplitDqByHeadDim ? Element{query, consumer * Geometry::kDqColumnStep + column}
                                       : Element{consumer * Geometry::kDqQueries + query, column};
  }
};

// Of one consumer, a 64 x 64 fragment of dQ for each block of 64 columns, one behind the other.
template <typename Geometry>
struct DqLayout<Geometry, true> {
  static constexpr int kFragments = Geometry::kQkDim / kWarpgroupRows;
  static constexpr bool kTransposed = false;
  static constexpr int kRegisters = kWarpgroupRows / 2;  // of a block
  static constexpr int kQuads = kRegisters / 4;
  static constexpr int kThreads = kWarpgroupThreads;

  // In units of float4, within the block.
  static __host__ __device__ constexpr int quad_index(int quad, int thread) {
    return quad * kWarpgroupThreads + thread;
  }

  struct Element {
    int query, column;
  };

  // Row and column of dQ that element `i` of quad `index` belongs to: the inverse of quad_index, over all blocks.
  static __host__ __device__ constexpr Element element(int index, int i) {
    const int thread = index % kWarpgroupThreads, quad = index / kWarpgroupThreads % kQuads;
    const int block = index / kWarpgroupThreads / kQuads;
    return {fragment_row(thread, i), block * kWarpgroupRows + fragment_column(thread, 4 * quad + i)};
  }
};

// Where a consumer's part of a buffer of dQ begins, as 16-bit rows that TMA stores.
template <typename Variant>
__device__ __forceinline__ typename Variant::Element* rows_in_dq_buffer(float* buffer, int consumer) {
  constexpr int kPart = Variant::kDqTileFloats / Variant::kConsumers;
  static_assert(kPart * sizeof(float) % 1024 == 0, "TMA's swizzle has a period of 1,024 bytes");
  return reinterpret_cast<typename Variant::Element*>(buffer + consumer * kPart);
}

}  // namespace dash_attn::backward
