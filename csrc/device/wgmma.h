// Warpgroup products (PTX ISA 9.7.15, "wgmma"): m64nNk16 of 16-bit elements with sums in fp32, for each N that the
// kernels use.
#pragma once

#include <cstdint>

#include "elements.h"

namespace dash_attn::wgmma {

// Orders earlier accesses to registers and shared memory before the products that follow.
__device__ __forceinline__ void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Closes the group of products issued since the last commit. `wait` counts groups.
__device__ __forceinline__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Returns when at most the last `kPending` groups are still running.
template <int kPending>
__device__ __forceinline__ void wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// `issue` starts D = A B or, if `adds`, D += A B. A thread holds kSums sums, so that N is 2 kSums. A and B are given as
// descriptors, or A in registers. An operand in shared memory is transposed if the products are summed along the rows
// of its tile.
template <typename Element, int kSums, bool kTransposesA, bool kTransposesB>
struct SharedProduct;
template <typename Element, int kSums, bool kTransposesB>
struct RegisterProduct;

// Inline assembly must list every operand: DASH_NAMES_<n> in the text and DASH_SUMS_<n> in the constraints. The sums
// come first, so the numbers of the other operands start at the number of sums.
#define DASH_EIGHT(i)                                                                                         \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define DASH_NAMES_32                                                    \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15" \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define DASH_NAMES_40 DASH_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define DASH_NAMES_48 DASH_NAMES_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define DASH_NAMES_64 DASH_NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define DASH_NAMES_96                                                                \
  DASH_NAMES_64                                                                      \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define DASH_NAMES_128                                                                           \
  DASH_NAMES_96                                                                                  \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define DASH_SUMS_32 DASH_EIGHT(0), DASH_EIGHT(8), DASH_EIGHT(16), DASH_EIGHT(24)
#define DASH_SUMS_40 DASH_SUMS_32, DASH_EIGHT(32)
#define DASH_SUMS_48 DASH_SUMS_40, DASH_EIGHT(40)
#define DASH_SUMS_64 DASH_SUMS_48, DASH_EIGHT(48), DASH_EIGHT(56)
#define DASH_SUMS_96 DASH_SUMS_64, DASH_EIGHT(64), DASH_EIGHT(72), DASH_EIGHT(80), DASH_EIGHT(88)
#define DASH_SUMS_128 DASH_SUMS_96, DASH_EIGHT(96), DASH_EIGHT(104), DASH_EIGHT(112), DASH_EIGHT(120)

#define DASH_PRODUCT_TEXT(type, N, sums, adds, others)                                                                \
  "{ .reg .pred adds; setp.ne.b32 adds, %" #adds ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." type "." type \
  " {" DASH_NAMES_##sums "}, " others "; }"
#define DASH_PRODUCTS_OF(Element, type, N, n0, n1, n2, n3, n4, n5, n6)                                                \
  template <bool kTransposesA, bool kTransposesB>                                                                     \
  struct SharedProduct<Element, n0, kTransposesA, kTransposesB> {                                                     \
    static __device__ __forceinline__ void issue(float (&d)[n0], uint64_t a, uint64_t b, bool adds) {                 \
      asm volatile(DASH_PRODUCT_TEXT(type, N, n0, n2, "%" #n0 ", %" #n1 ", adds, 1, 1, %" #n3 ", %" #n4)              \
                   : DASH_SUMS_##n0                                                                                   \
                   : "l"(a), "l"(b), "r"(int(adds)), "n"(int(kTransposesA)), "n"(int(kTransposesB)));                 \
    }                                                                                                                 \
  };                                                                                                                  \
  template <bool kTransposesB>                                                                                        \
  struct RegisterProduct<Element, n0, kTransposesB> {                                                                 \
    static __device__ __forceinline__ void issue(float (&d)[n0], const uint32_t (&a)[4], uint64_t b, bool adds) {     \
      asm volatile(                                                                                                   \
          DASH_PRODUCT_TEXT(type, N, n0, n5, "{%" #n0 ", %" #n1 ", %" #n2 ", %" #n3 "}, %" #n4 ", adds, 1, 1, %" #n6) \
          : DASH_SUMS_##n0                                                                                            \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(adds)), "n"(int(kTransposesB)));              \
    }                                                                                                                 \
  };
#define DASH_PRODUCTS(...)                    \
  DASH_PRODUCTS_OF(bf16, "bf16", __VA_ARGS__) \
  DASH_PRODUCTS_OF(fp16, "f16", __VA_ARGS__)

DASH_PRODUCTS(64, 32, 33, 34, 35, 36, 37, 38)
DASH_PRODUCTS(80, 40, 41, 42, 43, 44, 45, 46)
DASH_PRODUCTS(96, 48, 49, 50, 51, 52, 53, 54)
DASH_PRODUCTS(128, 64, 65, 66, 67, 68, 69, 70)
DASH_PRODUCTS(192, 96, 97, 98, 99, 100, 101, 102)
DASH_PRODUCTS(256, 128, 129, 130, 131, 132, 133, 134)

#undef DASH_EIGHT
#undef DASH_NAMES_128
#undef DASH_NAMES_32
#undef DASH_NAMES_40
#undef DASH_NAMES_48
#undef DASH_NAMES_64
#undef DASH_NAMES_96
#undef DASH_PRODUCTS
#undef DASH_PRODUCTS_OF
#undef DASH_PRODUCT_TEXT
#undef DASH_SUMS_128
#undef DASH_SUMS_32
#undef DASH_SUMS_40
#undef DASH_SUMS_48
#undef DASH_SUMS_64
#undef DASH_SUMS_96

}  // namespace dash_attn::wgmma
