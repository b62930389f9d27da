// Holds SMs for the progress tests: each CTA takes all the shared memory of one SM and waits for a flag in device
// memory. A flag in host memory would do more than hold SMs: reads that cross the bus hold up the memory fences of
// every other kernel.
#include <cuda_runtime.h>

namespace {

__global__ void hold(volatile int* resident, volatile int const* release, unsigned long long limit_ns) {
  unsigned long long start, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  resident[blockIdx.x] = 1;
  __threadfence_system();
  do {
    __nanosleep(2000);
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (*release == 0 && now - start < limit_ns);
}

}  // namespace

// `resident` (num_ctas ints) is pinned host memory, `release` (one int) device memory. Returns a cudaError_t.
extern "C" int hold_sms(int num_ctas, int* resident, int const* release, unsigned long long limit_ns,
                        cudaStream_t stream) {
  int device = 0, bytes = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error == cudaSuccess) error = cudaFuncSetAttribute(hold, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  hold<<<num_ctas, 1, bytes, stream>>>(resident, release, limit_ns);
  return cudaGetLastError();
}
