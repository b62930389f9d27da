#pragma once
#include "device/elements.h"

struct float2 {
  float x, y;
};
struct __nv_bfloat162 {
  dash_attn::bf16 x, y;
};
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {dash_attn::bf16(x), dash_attn::bf16(y)};
}
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float2 __bfloat1622float2(__nv_bfloat162 pair) { return {float(pair.x), float(pair.y)}; }
inline __nv_bfloat162 __hmul2(__nv_bfloat162 a, __nv_bfloat162 b) {
  return __floats2bfloat162_rn(float(a.x) * float(b.x), float(a.y) * float(b.y));
}
