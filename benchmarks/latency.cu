// What the model of the machine needs and no shape of the backward shows apart: the time of a read of another SM's
// word, of a hop in an ordered chain, and of the bulk add of a dQ tile, alone and beside all other SMs'. One CTA an SM:
// every CTA asks for all shared memory. For benchmarks only.
#include <cuda_runtime.h>

#include <cstdint>

namespace {

constexpr int kWordStride = 1024;  // ints: each word on a line, and a slice of L2, of its own
constexpr int kMaxBytes = 32768;

__device__ __forceinline__ int load_acquire(int const* address) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ void store_release(int* address, int value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" : : "l"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void bulk_add(float* global, float const* shared, int bytes) {
  asm volatile(
      "fence.proxy.async.global;\n\t"
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n\t"
      "cp.async.bulk.commit_group;\n\t"
      "cp.async.bulk.wait_group 0;"
      :
      : "l"(__cvta_generic_to_global(global)), "r"((uint32_t)__cvta_generic_to_shared(shared)), "r"(bytes)
      : "memory");
}

__device__ __forceinline__ long long nanoseconds() {
  long long time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}

__device__ float* zeroed_tile() {
  extern __shared__ float tile[];
  for (int i = threadIdx.x; i < kMaxBytes / 4; i += blockDim.x) { tile[i] = 0.f; }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  return tile;
}

// clocks[cta][word]: the fastest of some acquiring reads of a word that nobody writes.
__global__ void read_kernel(int const* words, int num_words, unsigned* clocks) {
  for (int word = 0; word < num_words; ++word) {
    unsigned best = ~0u;
    for (int repeat = 0; repeat < 16; ++repeat) {
      long long const start = clock64();
      int const value = load_acquire(words + int64_t(word) * kWordStride);
      unsigned const taken = unsigned(clock64() - start) + (value == 12345);
      best = min(best, taken);
    }
    clocks[blockIdx.x * num_words + word] = best;
  }
}

// CTA b makes the hops h = b, b + CTAs, ...: waits until hop h - 1 is signalled, adds `bytes`, signals h. One poller a
// word.
__global__ void chain_kernel(int* words, float* sums, int hops, int bytes, long long* nanoseconds_out) {
  float* const tile = zeroed_tile();
  if (threadIdx.x != 0) { return; }
  long long start = 0;
  for (int hop = blockIdx.x; hop < hops; hop += gridDim.x) {
    if (hop > 0) {
      while (load_acquire(words + int64_t(hop - 1) * kWordStride) == 0) {}
    } else {
      start = nanoseconds();
    }
    if (bytes) { bulk_add(sums, tile, bytes); }
    store_release(words + int64_t(hop) * kWordStride, 1);
    if (hop == hops - 1) { nanoseconds_out[1] = nanoseconds(); }
  }
  if (blockIdx.x == 0) { nanoseconds_out[0] = start; }
}

// Each CTA adds a tile of its own every `period` clocks, or at once when that has passed; clocks[cta]: mean time of an
// add.
__global__ void add_kernel(float* sums, int tiles, int adds, int period, float* clocks) {
  float* const tile = zeroed_tile();
  if (threadIdx.x != 0) { return; }
  long long total = 0, next = clock64();
  for (int i = 0; i < adds; ++i) {
    while (clock64() < next) {}
    long long const start = clock64();
    bulk_add(sums + (int64_t(i) * gridDim.x + blockIdx.x) % tiles * (kMaxBytes / 4), tile, kMaxBytes);
    total += clock64() - start;
    next = start + period;
  }
  clocks[blockIdx.x] = float(total) / adds;
}

// When each CTA of a launch begins.
__global__ void start_kernel(long long* nanoseconds_out) { nanoseconds_out[blockIdx.x] = nanoseconds(); }

// Two of them give the clock of an SM between them, where both ran on it.
__global__ void tick_kernel(long long* clock_nanoseconds_sm) {
  int sm;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
  clock_nanoseconds_sm[0] = clock64();
  clock_nanoseconds_sm[1] = nanoseconds();
  clock_nanoseconds_sm[2] = sm;
}

template <typename Kernel>
int all_shared_memory(Kernel kernel, int& bytes) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error == cudaSuccess) error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  return error;
}

}  // namespace

// Each returns a cudaError_t; pointers are device memory, `words` num * kWordStride zeroed ints.
extern "C" int word_stride() { return kWordStride; }

extern "C" int measure_reads(int ctas, int const* words, int num_words, unsigned* clocks, cudaStream_t stream) {
  int bytes = 0;
  if (int const error = all_shared_memory(read_kernel, bytes)) return error;
  read_kernel<<<ctas, 1, bytes, stream>>>(words, num_words, clocks);
  return cudaGetLastError();
}

extern "C" int measure_chain(int ctas, int* words, float* sums, int hops, int bytes_added, long long* nanoseconds,
                             cudaStream_t stream) {
  int bytes = 0;
  if (int const error = all_shared_memory(chain_kernel, bytes)) return error;
  chain_kernel<<<ctas, 128, bytes, stream>>>(words, sums, hops, bytes_added, nanoseconds);
  return cudaGetLastError();
}

extern "C" int measure_adds(int ctas, float* sums, int tiles, int adds, int period, float* clocks,
                            cudaStream_t stream) {
  int bytes = 0;
  if (int const error = all_shared_memory(add_kernel, bytes)) return error;
  add_kernel<<<ctas, 128, bytes, stream>>>(sums, tiles, adds, period, clocks);
  return cudaGetLastError();
}

extern "C" int measure_starts(int ctas, long long* nanoseconds, cudaStream_t stream) {
  int bytes = 0;
  if (int const error = all_shared_memory(start_kernel, bytes)) return error;
  start_kernel<<<ctas, 384, bytes, stream>>>(nanoseconds);
  return cudaGetLastError();
}

extern "C" int tick(long long* clock_nanoseconds_sm, cudaStream_t stream) {
  tick_kernel<<<1, 1, 0, stream>>>(clock_nanoseconds_sm);
  return cudaGetLastError();
}
