// The scratch memory of a call: one allocation, cut into arrays.
#pragma once

#include <cstdint>

#include "../placement/pack_needs.h"
#include "../placement/sequences.h"
#include "arguments.h"

namespace dash_attn {

// Cuts memory into arrays. With a null base only `bytes`, the size of all arrays so far, means anything.
class WorkspaceAllocator {
 public:
  explicit WorkspaceAllocator(void* base) : base_(static_cast<char*>(base)) {}

  template <typename T>
  void take(T*& array, int64_t count) {
    constexpr int64_t kAlignment = 128;  // bulk copies need 16
    bytes = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    array = reinterpret_cast<T*>(base_ + bytes);
    bytes += count * int64_t(sizeof(T));
  }

  int64_t bytes = 0;

 private:
  char* base_;
};

// What packing/plan.h writes.
struct PackArrays {
  PackedSequence* sequences;
  int* of_unit;
  int* of_query_tile;
  PackTotals* totals;

  PackView view() const { return {sequences, of_unit, of_query_tile, totals}; }
};

inline PackArrays take_pack_arrays(WorkspaceAllocator& allocator, int batch, const PackCapacity& most) {
  PackArrays arrays{};
  allocator.take(arrays.sequences, batch);
  allocator.take(arrays.of_unit, most.units);
  if (most.query_tiles > 0) { allocator.take(arrays.of_query_tile, most.query_tiles); }
  allocator.take(arrays.totals, 1);
  return arrays;
}

inline PackRows pack_rows(const AttentionArguments& a) { return {a.batch, a.seqlen_q, a.seqlen_k}; }

}  // namespace dash_attn
