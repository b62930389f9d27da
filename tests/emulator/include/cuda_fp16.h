#pragma once
#include <cuda_bf16.h>

struct __half2 {
  dash_attn::fp16 x, y;
};
inline __half2 __floats2half2_rn(float x, float y) { return {dash_attn::fp16(x), dash_attn::fp16(y)}; }
inline float2 __half22float2(__half2 pair) { return {float(pair.x), float(pair.y)}; }
