#pragma once
#include <cuda_bf16.h>

struct __half2 {
  cutlass::half_t x, y;
};
inline __half2 __floats2half2_rn(float x, float y) { return {cutlass::half_t(x), cutlass::half_t(y)}; }
inline float2 __half22float2(__half2 pair) { return {float(pair.x), float(pair.y)}; }
