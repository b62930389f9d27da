// How many lanes of an instruction an SM executes in a clock: what bounds Philox, whose round is two products of 64
// bits (IMAD.WIDE) and two logical operations (LOP3). One CTA of 1,024 threads an SM; chains that depend on themselves,
// more of them than latency needs. Beside that, marks on a stream, which show the clock of an SM. For benchmarks only.
#include <cuda_runtime.h>

#include <cstdint>

namespace {

constexpr int kThreads = 1024;
constexpr int kUnroll = 32;
constexpr int kLogic = 0, kProducts = 1, kBoth = 2, kPhilox = 3;

// Three registers that all change, so that no two of these can become one.
__device__ __forceinline__ void logic(uint32_t& x, uint32_t y, uint32_t z) {
  asm volatile("lop3.b32 %0, %0, %1, %2, 0xe8;" : "+r"(x) : "r"(y), "r"(z));
}

// Both halves of what it makes are factors of others, so that neither half alone will do.
__device__ __forceinline__ void product(uint64_t& x, uint64_t y) {
  asm volatile("mul.wide.u32 %0, %1, %2;" : "=l"(x) : "r"(uint32_t(x)), "r"(uint32_t(y >> 32)));
}

// A round of Philox: the products' halves go into the next one's factors.
__device__ __forceinline__ void round_of_philox(uint32_t (&x)[4], uint32_t key0, uint32_t key1) {
  uint64_t const first = uint64_t(x[0]) * 0xD2511F53u, second = uint64_t(x[2]) * 0xCD9E8D57u;
  x[0] = uint32_t(second >> 32) ^ x[1] ^ key0;
  x[1] = uint32_t(second);
  x[2] = uint32_t(first >> 32) ^ x[3] ^ key1;
  x[3] = uint32_t(first);
}

template <int kKind>
__global__ void __launch_bounds__(kThreads)
    rate_kernel(int repeats, uint32_t factor, long long* clocks, uint32_t* out) {
  uint32_t x[4];
  uint64_t sum[4];
  for (int i = 0; i < 4; ++i) {
    x[i] = threadIdx.x * 2654435761u + i * factor;
    sum[i] = uint64_t(x[i]) << 32 | threadIdx.x;
  }
  __syncthreads();
  long long const start = clock64();
  for (int repeat = 0; repeat < repeats; ++repeat) {
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      int const chain = i % 4;
      if constexpr (kKind == kLogic) { logic(x[chain], x[(chain + 1) % 4], x[(chain + 2) % 4]); }
      if constexpr (kKind == kProducts) { product(sum[chain], sum[(chain + 1) % 4]); }
      if constexpr (kKind == kBoth) {
        logic(x[chain], x[(chain + 1) % 4], x[(chain + 2) % 4]);
        product(sum[chain], sum[(chain + 1) % 4]);
      }
      if constexpr (kKind == kPhilox) { round_of_philox(x, factor, ~factor); }
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) { clocks[blockIdx.x] = clock64() - start; }
  uint64_t const all = sum[0] ^ sum[1] ^ sum[2] ^ sum[3];
  uint32_t const kept = x[0] ^ x[1] ^ x[2] ^ x[3] ^ uint32_t(all) ^ uint32_t(all >> 32);
  if (kept == 0x12345678u) { out[blockIdx.x] = kept; }  // what is not used is not made
}

// The clock, the nanoseconds and the number of the SM that it runs on.
__global__ void tick_kernel(long long* clock_nanoseconds_sm) {
  int sm;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
  clock_nanoseconds_sm[0] = clock64();
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(clock_nanoseconds_sm[1]));
  clock_nanoseconds_sm[2] = sm;
}

}  // namespace

// Returns a cudaError_t. `clock_nanoseconds_sm` is device memory.
extern "C" int tick(long long* clock_nanoseconds_sm, cudaStream_t stream) {
  tick_kernel<<<1, 1, 0, stream>>>(clock_nanoseconds_sm);
  return cudaGetLastError();
}

extern "C" int rate_threads() { return kThreads; }

// Instructions of a thread for each repeat.
extern "C" int rate_instructions(int kind) { return kUnroll * (kind == kPhilox ? 4 : kind == kBoth ? 2 : 1); }

// Returns a cudaError_t. `clocks` and `out` are device memory, a number for each CTA.
extern "C" int measure_rate(int kind, int ctas, int repeats, long long* clocks, uint32_t* out, cudaStream_t stream) {
  uint32_t const factor = 0xD2511F53u;
  switch (kind) {
    case kLogic:
      rate_kernel<kLogic><<<ctas, kThreads, 0, stream>>>(repeats, factor, clocks, out);
      break;
    case kProducts:
      rate_kernel<kProducts><<<ctas, kThreads, 0, stream>>>(repeats, factor, clocks, out);
      break;
    case kBoth:
      rate_kernel<kBoth><<<ctas, kThreads, 0, stream>>>(repeats, factor, clocks, out);
      break;
    case kPhilox:
      rate_kernel<kPhilox><<<ctas, kThreads, 0, stream>>>(repeats, factor, clocks, out);
      break;
    default:
      return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}
