// Rings of buffers in shared memory.
#pragma once

#include <cstdint>

namespace dash_attn {

// The slot of use number `count` of a ring of buffers, and the parity of that pass over its barriers, in one register.
// If kSlots is no power of two, there may be at most 2^32 uses.
template <int kSlots>
struct RingIndex {
  uint32_t count = 0;

  __device__ __forceinline__ uint32_t slot() const { return count % kSlots; }
  __device__ __forceinline__ uint32_t parity() const { return count / kSlots % 2; }
  // The parity to wait for on an `empty` barrier. In the first pass the buffers are free.
  __device__ __forceinline__ uint32_t empty_parity() const { return parity() ^ 1; }
  __device__ __forceinline__ RingIndex next() const { return {count + 1}; }
  __device__ __forceinline__ RingIndex previous() const { return {count - 1}; }
};

}  // namespace dash_attn
