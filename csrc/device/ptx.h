// PTX instructions without a CUDA function, one wrapper each, with their names and sections in the PTX ISA.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace dash_attn::ptx {

// An address in shared memory as instructions take it.
__device__ __forceinline__ uint32_t shared_address(const void* shared) {
  return uint32_t(__cvta_generic_to_shared(shared));
}

// 9.7.3 "ex2": 2^x, 2 ulp, one MUFU.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 9.7.3 "sqrt": relative error 2^-23. sqrtf would be a function call.
__device__ __forceinline__ float sqrt_approx(float x) {
  float y;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The maximum and the minimum of three. CUDA's intrinsics for Hopper's VIMNMX3, which has no name in PTX.
__device__ __forceinline__ int max3(int a, int b, int c) { return __vimax3_s32(a, b, c); }
__device__ __forceinline__ uint32_t min3(uint32_t a, uint32_t b, uint32_t c) { return __vimin3_u32(a, b, c); }

// 9.7.9.7 "prmt": each four bits of `selector` choose a byte of x or, plus 8, that byte's sign in all bits. CUDA's
// __byte_perm does not replicate signs.
__device__ __forceinline__ uint32_t permute_bytes(uint32_t x, uint32_t selector) {
  uint32_t y;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(y) : "r"(x), "r"(selector));
  return y;
}

// 9.7.4 "fma": a b + c of each half, clamped to zero from below.
__device__ __forceinline__ uint32_t multiply_add_relu_bf16(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.relu.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// 9.7.4 "max": the larger magnitude of each half, with the sign of the product. Of a NaN and a number it is the number.
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

// 9.7.9.27 "cp.reduce.async.bulk": adds `bytes` of fp32 in shared memory to global memory. The manual says that
// subnormal numbers are flushed to zero; on Hopper they are added like others.
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

// 9.7.9.17 "discard": drops kDiscardedBytes, aligned to as many bytes, from L2 without writing them back.
constexpr int kDiscardedBytes = 128;
__device__ __forceinline__ void discard_l2(void* global) {
  asm volatile("discard.global.L2 [%0], 128;" ::"l"(__cvta_generic_to_global(global)) : "memory");
}

// 9.7.9.25 "cp.async.bulk.prefetch": prefetches `bytes` into L2, without completion. Both the size and the address are
// multiples of 16.
__device__ __forceinline__ void bulk_prefetch(const void* global, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(global)), "r"(bytes));
}

// "cp.async.bulk": copies `bytes` to shared memory, and counts them on `barrier`. The size and both addresses are
// multiples of 16.
__device__ __forceinline__ void bulk_load(void* shared, const void* global, int bytes, const void* barrier) {
  const uint32_t counter = shared_address(barrier);
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :
               : "r"(shared_address(shared)), "l"(global), "r"(bytes), "r"(counter)
               : "memory");
}

// "cp.async": copies 16 bytes to shared memory as an operation of the calling thread. The first `bytes` come from
// global memory, and the rest are zeros.
__device__ __forceinline__ void copy_16_bytes(void* shared, const void* global, int bytes, uint64_t cache_hint) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;"
               :
               : "r"(shared_address(shared)), "l"(__cvta_generic_to_global(global)), "r"(bytes), "l"(cache_hint)
               : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all but the last `kPending` groups of this thread's copies have been performed.
template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// "cp.async.bulk.tensor": copies the box of a tensor that begins at element `c` to shared memory, with a hint for L2,
// and counts its bytes on `barrier`. The map's address is passed as a number: a pointer would change the machine code.
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

// The other direction, as a bulk operation of the calling thread.
__device__ __forceinline__ void store_box(const CUtensorMap& map, const void* shared, BoxOrigin c) {
  asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%1, {%2, %3, %4, %5, %6}], [%0];"
               :
               : "r"(shared_address(shared)), "l"(reinterpret_cast<uint64_t>(&map)), "r"(c.x0), "r"(c.x1), "r"(c.x2),
                 "r"(c.x3), "r"(c.x4)
               : "memory");
}

__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until this thread's bulk operations are PERFORMED, not merely until shared memory may be reused (.read).
__device__ __forceinline__ void bulk_wait_performed() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Waits until all but the last `kPending` groups of this thread have read their shared memory.
template <int kPending = 0>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// 9.7.12.4 "fence.proxy.async": orders accesses of the generic proxy and of the async proxy (TMA, bulk copies, wgmma).
__device__ __forceinline__ void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// 9.7.9.8 "ld", for memory that nobody writes meanwhile. ptxas moves a plain load to the first use of its value; a
// relaxed load is issued where it is written.
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

// The same, for callers that look a limited number of times instead of waiting for a value.
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

// 9.7.13.12 "griddepcontrol": the next kernel in the stream, launched as this kernel's dependent, may start once every
// CTA has executed this or ended. It must itself wait for what it reads of this kernel's results.
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Waits until the previous kernels have ended and their writes are visible.
__device__ __forceinline__ void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// "elect.sync": true for one lane of the warp. All lanes must call it.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile("{ .reg .pred is; elect.sync _|is, %1; selp.u32 %0, 1, 0, is; }" : "=r"(elected) : "r"(0xffffffff));
  return elected != 0;
}

// "setmaxnreg": sets the registers of each thread of the warpgroup, to fewer or more than before.
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// "barrier.cluster": waits until all threads of the cluster have arrived and their writes are visible.
__device__ __forceinline__ void sync_cluster() {
  asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
}

// This CTA's rank in its cluster.
__device__ __forceinline__ int cta_rank() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// 9.7.8.24 "mapa": the address, in CTA `cta_rank` of the cluster, of a variable in shared memory.
__device__ __forceinline__ uint32_t map_shared(const void* shared, uint32_t cta_rank) {
  uint32_t mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(shared_address(shared)), "r"(cta_rank));
  return mapped;
}

// 9.7.8.13 "st.async": writes 4 bytes to another CTA of the cluster and counts them on that CTA's mbarrier.
__device__ __forceinline__ void store_async(uint32_t remote_address, int value, uint32_t remote_barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.s32 [%0], %1, [%2];"
               :
               : "r"(remote_address), "r"(value), "r"(remote_barrier)
               : "memory");
}

// 9.7.14.5.15 "stmatrix": stores four 8x8 matrices. Each thread passes the address of one 16-byte row.
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

// threadIdx.x, as a value that the compiler does not combine with other reads of it.
__device__ __forceinline__ int read_thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

// Hides the value from the compiler, which then recomputes what follows from it instead of keeping that in registers.
__device__ __forceinline__ void opaque(int& value) { asm volatile("" : "+r"(value)); }
__device__ __forceinline__ void opaque(uint32_t& value) { asm volatile("" : "+r"(value)); }

// Has memory read again, instead of keeping what was read before in registers.
__device__ __forceinline__ void compiler_fence() { asm volatile("" ::: "memory"); }

}  // namespace dash_attn
