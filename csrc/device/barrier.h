// Barriers that threads wait at: those in shared memory, which also count bytes, and the CTA's numbered ones.
#pragma once

#include <cstdint>

#include "ptx.h"

namespace dash_attn {

// An mbarrier (PTX ISA 9.7.13.15). A phase ends with as many arrivals as `init` was told, and is known by its parity.
class Barrier {
 public:
  __device__ __forceinline__ void init(int arrivals) const {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(ptx::shared_address(this)), "r"(arrivals)
                 : "memory");
  }

  // Until the phase of that parity has ended. The hardware may suspend the thread for so many nanoseconds at a time.
  //
  // nvcc copies blocks of code around inline assembly that has a label only where the label is named LAB_WAIT and its
  // lines end as these do. The kernels were tuned with those copies.
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

  // At the same barrier of another CTA of the cluster.
  __device__ __forceinline__ void arrive(uint32_t cta_rank) const {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(ptx::map_shared(this, cta_rank)) : "memory");
  }

 protected:
  uint64_t state_;
};

// One whose phase ends when the bytes that were announced in it have come, too.
class TransactionBarrier : public Barrier {
 public:
  __device__ __forceinline__ void arrive_and_expect_tx(int bytes) const {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(ptx::shared_address(this)), "r"(bytes)
                 : "memory");
  }
};

// "fence.mbarrier_init": other CTAs of the cluster and the async proxy see barriers as they were initialised.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// "bar.sync": until `threads` threads have come, whole warps. Barrier 0 of the hardware is __syncthreads'.
__device__ __forceinline__ void sync_numbered(int barrier, int threads) {
  constexpr int kFirst = 8;
  asm volatile("bar.sync %0, %1;" ::"r"(kFirst + barrier), "r"(threads) : "memory");
}

}  // namespace dash_attn
