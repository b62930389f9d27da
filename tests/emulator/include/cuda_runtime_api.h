#pragma once
#include <cstddef>
#include <cstring>

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess };
inline const char* cudaGetErrorString(cudaError_t) { return ""; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaMemsetAsync(void* data, int value, size_t bytes, cudaStream_t) {
  std::memset(data, value, bytes);
  return cudaSuccess;
}

enum cudaLaunchAttributeID { cudaLaunchAttributeClusterDimension };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    struct {
      unsigned x, y, z;
    } clusterDim;
  } val;
};

enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess };
enum { cudaEnableDefault };
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned version, int flags,
                                             cudaDriverEntryPointQueryResult* found);
