// Rings of buffers in shared memory.
#pragma once

#include <cstdint>

namespace dash_attn {

// Where use number `count` of a ring of buffers finds its slot, and the parity its barriers have on that pass. One
// register. Where kSlots is no power of two, for less than 2^32 uses.
template <int kSlots>
struct RingIndex {
  uint32_t count = 0;

  __device__ __forceinline__ uint32_t slot() const { return count % kSlots; }
  __device__ __forceinline__ uint32_t parity() const { return count / kSlots % 2; }
  // Parity to wait for on an `empty` barrier: the first pass finds the buffers free.
  __device__ __forceinline__ uint32_t empty_parity() const { return parity() ^ 1; }
  __device__ __forceinline__ RingIndex next() const { return {count + 1}; }
  __device__ __forceinline__ RingIndex previous() const { return {count - 1}; }
};

}  // namespace dash_attn
