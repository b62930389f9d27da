// Barriers: mbarriers in shared memory, which can also count bytes, and the hardware's numbered barriers of a CTA.
#pragma once

#include <cstdint>

#include "ptx.h"

namespace dash_attn {

// An mbarrier (PTX ISA 9.7.13.15). A phase completes after as many arrivals as `init` was given. Waiters identify a
// phase by its parity.
class Barrier {
 public:
  __device__ __forceinline__ void init(int arrivals) const {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(ptx::shared_address(this)), "r"(arrivals)
                 : "memory");
  }

  // Waits until the phase of that parity has completed. The hardware may suspend the thread for up to kSuspension
  // nanoseconds at a time.
  //
  // nvcc duplicates blocks of code around inline assembly with a label only if the label is named LAB_WAIT and the
  // lines end exactly like this. The kernels were tuned with those duplicates.
  __device__ __forceinline__ void wait(uint32_t parity) const {
    constexpr uint32_t kSuspension = 10'000'000;
    asm volatile(
        "{\n\t"
        ".reg .pred ended;\n\t"
        "LAB_WAIT:\n\t"
        "mbarrier.try_wait.parity.shared::cta.b64 ended, [%0], %1, %2;\n\t"
        "@!ended bra LAB_WAIT;\n\t"
        "}" ::"r"(ptx::shared_address(this)),
        "r"(parity), "r"(kSuspension)
        : "memory");
  }

  __device__ __forceinline__ void arrive() const {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(ptx::shared_address(this)) : "memory");
  }

  // Arrives on the same barrier of another CTA of the cluster.
  __device__ __forceinline__ void arrive(uint32_t cta_rank) const {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(ptx::map_shared(this, cta_rank)) : "memory");
  }

 protected:
  uint64_t state_;
};

// A barrier whose phase also waits for the bytes that were announced in it.
class TransactionBarrier : public Barrier {
 public:
  __device__ __forceinline__ void arrive_and_expect_tx(int bytes) const {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(ptx::shared_address(this)), "r"(bytes)
                 : "memory");
  }
};

// "fence.mbarrier_init": makes initialised barriers visible to the other CTAs of the cluster and to the async proxy.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// "bar.sync": waits until `threads` threads, in whole warps, have arrived. __syncthreads uses hardware barrier 0.
__device__ __forceinline__ void sync_numbered(int barrier, int threads) {
  constexpr int kFirst = 8;
  asm volatile("bar.sync %0, %1;" ::"r"(kFirst + barrier), "r"(threads) : "memory");
}

}  // namespace dash_attn
