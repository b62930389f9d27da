// The order of dQ's accumulator: each consumer's wgmma fragment as its threads hold it, four registers at a time.
//
// The accumulator is private to the kernels, so it needs no rows and columns of its own: written like this, staging a
// tile takes 16-byte stores without bank conflicts and one bulk operation adds it. convert.h puts it in order.
#pragma once

#include "../device/fragment.h"
#include "config.h"

namespace dash_attn::backward {

template <typename Geometry, bool kIsWide = Geometry::kWide>
struct DqLayout {
  static constexpr int kFragments = Geometry::kConsumers;
  static constexpr bool kTransposed = Geometry::kTransposesDq;
  // Of each consumer thread: a fragment of 64 queries and 64 columns, or of 64 columns and kDqQueries queries.
  static constexpr int kRegisters = Geometry::kDqQueries / 2;
  static constexpr int kQuads = kRegisters / 4;

  // Threads of a consumer whose fragments go into the sum: all, or, of the transpose, which has 16 columns a warp and
  // columns in common with the other consumer's, those of half the columns, the first consumer's first ones and the
  // second's last ones.
  static constexpr int kThreads = kTransposed ? Geometry::kHeadDim : kWarpgroupThreads;
  static __host__ __device__ constexpr int first_thread(int consumer) {
    return consumer * (kWarpgroupThreads - kThreads);
  }
  static __host__ __device__ constexpr bool has_part(int consumer, int thread) {
    return kThreads == kWarpgroupThreads || unsigned(thread - first_thread(consumer)) < kThreads;
  }

  // Index, in units of float4, of registers 4 * quad ... 4 * quad + 3.
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

// Where a consumer's part of a buffer of dQ begins, for 16-bit rows that TMA stores.
template <typename Variant>
__device__ __forceinline__ typename Variant::Element* rows_in_dq_buffer(float* buffer, int consumer) {
  constexpr int kPart = Variant::kDqTileFloats / Variant::kConsumers;
  static_assert(kPart * sizeof(float) % 1024 == 0, "TMA's swizzle has a period of 1,024 bytes");
  return reinterpret_cast<typename Variant::Element*>(buffer + consumer * kPart);
}

}  // namespace dash_attn::backward
