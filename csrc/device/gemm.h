// Warpgroup products on tiles of 16-bit elements that TMA has written with one of its swizzles.
//
// A tile of R rows and C columns is stored in shared memory as C / Swizzle::kColumns blocks of R rows each. wgmma reads
// such a tile either way round: the operand types below say along which side the products are summed.
#pragma once

#include <cstdint>

#include "ptx.h"
#include "wgmma.h"

namespace dash_attn {

constexpr int kWarpgroupRows = 64;  // wgmma's M
constexpr int kProductDepth = 16;   // wgmma's K for 16-bit types

// TMA's swizzle of blocks of 64 columns (128 bytes) or 32 columns (64 bytes). The 16-byte chunks of a row are permuted
// by the number of the 128-byte line, so that the same chunk of 8 rows, which wgmma, ldmatrix and stmatrix access
// together, is spread over all banks.
template <int kColumns_>
struct Swizzle {
  static constexpr int kColumns = kColumns_;
  static constexpr int kRowBytes = 2 * kColumns;
  static constexpr int kAtomBytes = 8 * kRowBytes;  // the pattern repeats every 8 rows
  static constexpr int kChunks = kRowBytes / 16;    // of a row of a block
  static constexpr int kRowsPerLine = 128 / kRowBytes;
  static_assert(kColumns == 64 || kColumns == 32);
  static constexpr uint64_t kDescriptorMode = kColumns == 64 ? 1 : 2;

  // The position of `chunk` within a row of a block.
  static __device__ __forceinline__ constexpr int place(int row, int chunk) {
    return chunk ^ (row / kRowsPerLine % kChunks);
  }
};

// The swizzle with the widest blocks that divide the columns.
template <int kTileColumns>
using SwizzleOf = Swizzle<kTileColumns % 64 == 0 ? 64 : 32>;

// The addresses of tiles in shared memory, as wgmma's matrix descriptors (PTX ISA 9.7.15.5.1.2.2). A descriptor holds
// the address and two strides in units of 16 bytes, in 14-bit fields at bits 0, 16 and 32, and the swizzle in bits
// 62-63. Above its 18 bits an address of shared memory holds the CTA's rank in its cluster, which would spill into the
// next field. It is masked off once, in the base address of all tiles. Everything else is added to that base
// descriptor, and is mostly constant: one instruction a product.
template <typename Swizzle>
class TileDescriptors {
 public:
  explicit __device__ __forceinline__ TileDescriptors(const void* shared)
      : shared_(ptx::shared_address(shared)),
        first_(((shared_ & 0x3ffff) >> 4) | (uint64_t(Swizzle::kAtomBytes >> 4) << 32) |
               (Swizzle::kDescriptorMode << 62)) {
    opaque();  // otherwise the compiler, which knows the upper half, adds the halves apart
  }
  // Has descriptors computed again instead of carried in registers.
  __device__ __forceinline__ void opaque() { asm volatile("" : "+l"(first_)); }
  __device__ __forceinline__ uint64_t operator()(const void* tile) const {
    return first_ + ((ptx::shared_address(tile) - shared_) >> 4);
  }

 private:
  uint32_t shared_;
  uint64_t first_;
};

// The descriptor `units` of 16 bytes further on. No field overflows, so there is no carry.
__device__ __forceinline__ uint64_t advance(uint64_t descriptor, uint32_t units) {
  return (descriptor >> 32 << 32) | uint32_t(uint32_t(descriptor) + units);
}

// A K-major operand: the products are summed along the tile's columns, and the operand's M or N is the tile's rows,
// from `row` on.
template <typename Swizzle, int kRows>
struct KMajor {
  static constexpr bool kIsTransposed = false;
  uint64_t first;

  explicit __device__ __forceinline__ KMajor(uint64_t tile, int row = 0)
      : first(advance(tile + (1 << 16), row * (Swizzle::kRowBytes >> 4))) {}

  __device__ __forceinline__ uint64_t step(int k) const {
    const int steps_per_block = Swizzle::kColumns / kProductDepth;
    const int bytes = (k / steps_per_block) * kRows * Swizzle::kRowBytes + (k % steps_per_block) * kProductDepth * 2;
    return first + (bytes >> 4);
  }
};

// An MN-major operand: the products are summed along the tile's rows, and the operand's M or N is the tile's columns,
// from block `block` on.
template <typename Swizzle, int kRows>
struct MnMajor {
  static constexpr bool kIsTransposed = true;
  static constexpr int kBlockBytes = kRows * Swizzle::kRowBytes;
  uint64_t first;

  explicit __device__ __forceinline__ MnMajor(uint64_t tile, int block = 0)
      : first(advance(tile + ((kBlockBytes >> 4) << 16), block * (kBlockBytes >> 4))) {}

  __device__ __forceinline__ uint64_t step(int k) const {
    return first + ((k * kProductDepth * Swizzle::kRowBytes) >> 4);
  }
};

// One 16-deep slice of an A operand in registers, as pairs of 16-bit values.
using RegisterSlice = uint32_t[4];

template <int kSize>
__device__ __forceinline__ void clear(float (&accumulator)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) { accumulator[i] = 0.f; }
}

// Keeps the compiler from moving accesses to registers across the start or the end of an asynchronous product that uses
// them.
template <int kSize>
__device__ __forceinline__ void fence_operand(float (&accumulator)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) { asm volatile("" : "+f"(accumulator[i])::"memory"); }
}

// Declares the contents of registers dead. Without it a product that overwrites them counts as one that reads them.
template <int kSize>
__device__ __forceinline__ void discard_contents(float (&accumulator)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) { asm volatile("" : "=f"(accumulator[i])); }
}

template <int kSlices>
__device__ __forceinline__ void fence_operand(uint32_t (&operand)[kSlices][4]) {
#pragma unroll
  for (int i = 0; i < 4 * kSlices; ++i) { asm volatile("" : "+r"(operand[i / 4][i % 4])::"memory"); }
}

// Starts acc = A B, 64 x kN over kDepth, and commits it as one group. Slices before kFirstSlice have been issued
// already. After the `wait_products` that completes the group, call `fence_operand` on all registers that the product
// reads or writes.
template <typename Element, int kDepth, int kFirstSlice = 0, typename A, typename B, int kAcc>
__device__ __forceinline__ void wgmma_async(float (&acc)[kAcc], A a, B b) {
  using Product = wgmma::SharedProduct<Element, kAcc, A::kIsTransposed, B::kIsTransposed>;
  if constexpr (kFirstSlice > 0) { fence_operand(acc); }
  wgmma::fence();
#pragma unroll
  for (int k = kFirstSlice; k < kDepth / kProductDepth; ++k) { Product::issue(acc, a.step(k), b.step(k), k != 0); }
  wgmma::commit();
}

// The same with A in registers, which must not change until the product has completed.
template <typename Element, typename B, int kSlices, int kAcc>
__device__ __forceinline__ void wgmma_async(float (&acc)[kAcc], RegisterSlice (&a)[kSlices], B b,
                                            bool accumulate = false) {
  using Product = wgmma::RegisterProduct<Element, kAcc, B::kIsTransposed>;
  fence_operand(a);
  fence_operand(acc);
  wgmma::fence();
#pragma unroll
  for (int k = 0; k < kSlices; ++k) { Product::issue(acc, a[k], b.step(k), accumulate || k != 0); }
  wgmma::commit();
}

// Starts acc += A B.
template <typename Element, typename B, int kSlices, int kAcc>
__device__ __forceinline__ void wgmma_async_add(float (&acc)[kAcc], RegisterSlice (&a)[kSlices], B b) {
  wgmma_async<Element>(acc, a, b, true);
}

template <typename Element, int kDepth, typename A, typename B, int kAcc>
__device__ __forceinline__ void wgmma_async_add(float (&acc)[kAcc], A a, B b) {
  using Product = wgmma::SharedProduct<Element, kAcc, A::kIsTransposed, B::kIsTransposed>;
  fence_operand(acc);
  wgmma::fence();
#pragma unroll
  for (int k = 0; k < kDepth / kProductDepth; ++k) { Product::issue(acc, a.step(k), b.step(k), true); }
  wgmma::commit();
}

// Returns when at most the last `kPending` groups are still running.
template <int kPending>
__device__ __forceinline__ void wait_products() {
  wgmma::wait<kPending>();
}

}  // namespace dash_attn
