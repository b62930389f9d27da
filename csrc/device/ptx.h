// Instructions that CUDA has no function for, one function each, by their names and sections in the PTX ISA.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace dash_attn::ptx {

// An address of shared memory as instructions take it.
__device__ __forceinline__ uint32_t shared_address(const void* shared) {
  return uint32_t(__cvta_generic_to_shared(shared));
}

// 9.7.3 "ex2": 2^x, 2 ulp, one MUFU.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 9.7.3 "sqrt": within 2^-23, relative. sqrtf is a call.
__device__ __forceinline__ float sqrt_approx(float x) {
  float y;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The largest, the smallest of three. Not PTX: CUDA's intrinsics for Hopper's VIMNMX3, for which PTX has no name.
__device__ __forceinline__ int max3(int a, int b, int c) { return __vimax3_s32(a, b, c); }
__device__ __forceinline__ uint32_t min3(uint32_t a, uint32_t b, uint32_t c) { return __vimin3_u32(a, b, c); }

// 9.7.9.7 "prmt": each four bits of `selector` name a byte of x, or, plus 8, its sign in all bits. CUDA's __byte_perm
// knows no signs.
__device__ __forceinline__ uint32_t permute_bytes(uint32_t x, uint32_t selector) {
  uint32_t y;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(y) : "r"(x), "r"(selector));
  return y;
}

// 9.7.4 "fma": a b + c of each half, or zero where that is less.
__device__ __forceinline__ uint32_t multiply_add_relu_bf16(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.relu.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// 9.7.4 "max": of each half the larger magnitude, its sign that of the product; of a NaN and a number, the number.
__device__ __forceinline__ uint32_t larger_magnitude_f16(uint32_t a, uint32_t b) {
  uint32_t larger;
  asm("max.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
}
__device__ __forceinline__ uint32_t larger_magnitude_bf16(uint32_t a, uint32_t b) {
  uint32_t larger;
  asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
}

// 9.7.3 "lg2": absolute error 2^-22 near 1, else relative error 2^-22.
__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 9.7.3 "tanh": relative error 2^-11, one MUFU.
__device__ __forceinline__ float tanh_approx(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 9.7.9.27 "cp.reduce.async.bulk": adds `bytes` of fp32 in shared memory onto global memory. The manual has
// subnormal numbers count as zero; on Hopper they are added like others.
__device__ __forceinline__ void bulk_add_f32(float* global, const float* shared, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
               :
               : "l"(__cvta_generic_to_global(global)), "r"(shared_address(shared)), "r"(bytes)
               : "memory");
}

// The same for 32-bit integers, held in arrays of floats.
__device__ __forceinline__ void bulk_add_s32(float* global, const float* shared, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.s32 [%0], [%1], %2;"
               :
               : "l"(__cvta_generic_to_global(global)), "r"(shared_address(shared)), "r"(bytes)
               : "memory");
}

// 9.7.9.27 "cp.async.bulk": overwrites global memory with `bytes` of shared memory.
__device__ __forceinline__ void bulk_store(float* global, const float* shared, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
               :
               : "l"(__cvta_generic_to_global(global)), "r"(shared_address(shared)), "r"(bytes)
               : "memory");
}

// 9.7.9.17 "discard": what lies there, from a multiple of as many bytes on, is of no more use, and is not written back.
constexpr int kDiscardedBytes = 128;
__device__ __forceinline__ void discard_l2(void* global) {
  asm volatile("discard.global.L2 [%0], 128;" ::"l"(__cvta_generic_to_global(global)) : "memory");
}

// 9.7.9.25 "cp.async.bulk.prefetch": brings `bytes`, a multiple of 16 like the address, to L2. Nobody waits for it.
__device__ __forceinline__ void bulk_prefetch(const void* global, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(global)), "r"(bytes));
}

// "cp.async.bulk": copies `bytes`, a multiple of 16 like the addresses, to shared memory. `barrier` counts them.
__device__ __forceinline__ void bulk_load(void* shared, const void* global, int bytes, const void* barrier) {
  const uint32_t counter = shared_address(barrier);
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :
               : "r"(shared_address(shared)), "l"(global), "r"(bytes), "r"(counter)
               : "memory");
}

// "cp.async.bulk.tensor": copies the box of a tensor that begins at element `c` to shared memory, with a hint for L2.
// `barrier` counts the bytes. The map's address is passed as a number: as a pointer it would change the machine code.
struct BoxOrigin {
  int x0, x1, x2, x3, x4;
};
__device__ __forceinline__ void load_box(void* shared, const CUtensorMap& map, BoxOrigin c, const void* barrier,
                                         uint64_t cache_hint) {
  const uint32_t counter = shared_address(barrier);
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4, %5, %6}], [%7], %8;"
      :
      : "r"(shared_address(shared)), "l"(reinterpret_cast<uint64_t>(&map)), "r"(c.x0), "r"(c.x1), "r"(c.x2), "r"(c.x3),
        "r"(c.x4), "r"(counter), "l"(cache_hint)
      : "memory");
}

// The other way, as a bulk operation of the calling thread.
__device__ __forceinline__ void store_box(const CUtensorMap& map, const void* shared, BoxOrigin c) {
  asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%1, {%2, %3, %4, %5, %6}], [%0];"
               :
               : "r"(shared_address(shared)), "l"(reinterpret_cast<uint64_t>(&map)), "r"(c.x0), "r"(c.x1), "r"(c.x2),
                 "r"(c.x3), "r"(c.x4)
               : "memory");
}

__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until the bulk operations of this thread are PERFORMED, not merely until shared memory may be reused (.read).
__device__ __forceinline__ void bulk_wait_performed() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Waits until all but the last `kPending` groups of this thread have read shared memory.
template <int kPending = 0>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// 9.7.12.4 "fence.proxy.async": orders the generic proxy's accesses and the async proxy's (TMA, bulk copies, wgmma).
__device__ __forceinline__ void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// 9.7.9.8 "ld": of memory that no one writes meanwhile. Unlike a plain load, which ptxas moves to where its value is
// used, a relaxed one is issued where it is written.
template <typename T>
__device__ __forceinline__ T load_here(const T* address) {
  T value;
  if constexpr (sizeof(T) == 8) {
    asm volatile("ld.relaxed.cta.global.b64 %0, [%1];" : "=l"(value) : "l"(address));
  } else if constexpr (sizeof(T) == 4) {
    asm volatile("ld.relaxed.cta.global.b32 %0, [%1];" : "=r"(value) : "l"(address));
  } else {
    static_assert(sizeof(T) == 2);
    asm volatile("ld.relaxed.cta.global.b16 %0, [%1];" : "=h"(value) : "l"(address));
  }
  return value;
}

__device__ __forceinline__ int load_acquire(const int* address) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// The same, once and again, by who does not wait for another value.
__device__ __forceinline__ int poll(const int* address) { return load_acquire(address); }

__device__ __forceinline__ void store_release(int* address, int value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" : : "l"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void store_relaxed(int* address, int value) {
  asm volatile("st.relaxed.gpu.global.s32 [%0], %1;" : : "l"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void add_release(int* address, int value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" : : "l"(address), "r"(value) : "memory");
}

// 9.7.13.12 "griddepcontrol": the next kernel in the stream, launched as this one's dependent, may start once every CTA
// has said so or ended; what it reads of this one's it waits for by itself.
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Waits until the kernels before this one have ended and what they wrote is visible.
__device__ __forceinline__ void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// "elect.sync": true for one lane of the warp, all of which come here.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile("{ .reg .pred is; elect.sync _|is, %1; selp.u32 %0, 1, 0, is; }" : "=r"(elected) : "r"(0xffffffff));
  return elected != 0;
}

// "setmaxnreg": the registers of each of the warpgroup's threads from now on, fewer or more than before.
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// "barrier.cluster": until all threads of the cluster have come, and what they wrote is visible.
__device__ __forceinline__ void sync_cluster() {
  asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
}

// This CTA's number in its cluster.
__device__ __forceinline__ int cta_rank() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// 9.7.8.24 "mapa": the address of this CTA's shared variable in CTA `cta_rank` of the cluster.
__device__ __forceinline__ uint32_t map_shared(const void* shared, uint32_t cta_rank) {
  uint32_t mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(shared_address(shared)), "r"(cta_rank));
  return mapped;
}

// 9.7.8.13 "st.async": writes 4 bytes to a CTA of the cluster and counts them on that CTA's mbarrier.
__device__ __forceinline__ void store_async(uint32_t remote_address, int value, uint32_t remote_barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.s32 [%0], %1, [%2];"
               :
               : "r"(remote_address), "r"(value), "r"(remote_barrier)
               : "memory");
}

// 9.7.14.5.15 "stmatrix": four 8x8 matrices; each thread passes the address of one 16-byte row.
__device__ __forceinline__ void store_matrix(uint32_t row, const uint32_t (&m)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               :
               : "r"(row), "r"(m[0]), "r"(m[1]), "r"(m[2]), "r"(m[3])
               : "memory");
}

__device__ __forceinline__ void store_matrix_transposed(uint32_t row, const uint32_t (&m)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
               :
               : "r"(row), "r"(m[0]), "r"(m[1]), "r"(m[2]), "r"(m[3])
               : "memory");
}

// 9.7.14.5.14 "ldmatrix": the inverse of store_matrix.
__device__ __forceinline__ void load_matrix(uint32_t row, uint32_t (&m)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(row)
               : "memory");
}

__device__ __forceinline__ void load_matrix_transposed(uint32_t row, uint32_t (&m)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(row)
               : "memory");
}

}  // namespace dash_attn::ptx

namespace dash_attn {

// threadIdx.x, as a value that the compiler does not know to be the same as any other.
__device__ __forceinline__ int read_thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

// Has what follows from the value computed afresh, instead of carried in registers from earlier on.
__device__ __forceinline__ void opaque(int& value) { asm volatile("" : "+r"(value)); }
__device__ __forceinline__ void opaque(uint32_t& value) { asm volatile("" : "+r"(value)); }

// Has memory read again, instead of carried in registers from earlier on.
__device__ __forceinline__ void compiler_fence() { asm volatile("" ::: "memory"); }

}  // namespace dash_attn
