// The order of elements in dQ's accumulator: each consumer's wgmma fragment as its threads hold it, four registers at a
// time.
//
// The accumulator is private to the kernels, so it need not have rows and columns. In this order a tile is staged by
// 16-byte stores without bank conflicts and added by one bulk operation. convert.h restores rows and columns.
#pragma once

#include "../device/fragment.h"
#include "config.h"

namespace dash_attn::backward {

// A wide kernel has one consumer that computes dQ, in fragments of 64 x 64, one block of columns after the other. The
// number of the block then takes the place of the consumer's.
template <typename Geometry>
struct DqLayout {
  static constexpr int kFragments = Geometry::kWide ? Geometry::kQkDim / kWarpgroupRows : Geometry::kConsumers;
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

  // The row and column of dQ of element `i` of quad `index`: the inverse of quad_index.
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

// Where a consumer's part of a buffer of dQ begins, as 16-bit rows that TMA stores.
template <typename Variant>
__device__ __forceinline__ typename Variant::Element* rows_in_dq_buffer(float* buffer, int consumer) {
  constexpr int kPart = Variant::kDqTileFloats / Variant::kConsumers;
  static_assert(kPart * sizeof(float) % 1024 == 0, "TMA's swizzle has a period of 1,024 bytes");
  return reinterpret_cast<typename Variant::Element*>(buffer + consumer * kPart);
}

}  // namespace dash_attn::backward
